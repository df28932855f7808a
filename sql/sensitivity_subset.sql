-- One row per method, subset of the test subjects and metric: does the result hang on subjects of doubtful geometry?
-- key: method_id, subset_id, metric_id
-- columns: value?, n_subjects

-- all: every test subject that was measured; registered: without those misregistered for any ranked method, whatever
--   `misregistered` says; inside_every_view: of these, the subjects whose reference lies inside every method's field of
--   view. Means; canonical reference, brain, plain maps, conn6_floor and IoU 0.10 at the validation threshold of the
--   reference budget, which stays as it is. Cross-fitted, a subject outside the cohort has no threshold: a subset that holds
--   one has no value at it.
with entry as (
    select method_id, kind
    from ranked_method
    where is_ranked
),
ranking as materialized (
    select
        v.method_id, v.subject_id,
        max(v.auroc) filter (where v.support_id = 'brain') as auroc,
        max(v.average_precision) filter (where v.support_id = 'brain') as average_precision,
        max(v.positive_voxels) filter (where v.support_id = 'brain')
            <> max(v.positive_voxels) filter (where v.support_id = 'brain_in_view') as leaves_view
    from voxel_ranking as v
    join entry as e using (method_id)
    join subject as s on s.subject_id = v.subject_id and s.split = 'test'
    where v.reference_id = 'canonical'
    group by all
    having bool_or(v.support_id = 'brain')
),
measured as (
    select subject_id
    from ranking
    group by subject_id
    having count(*) = (select count(*) from entry)
),
misregistered as (
    select distinct g.subject_id
    from gate_subject as g
    join entry as e using (method_id)
    where g.verdict = 'misregistered'
),
leaving as (
    select distinct subject_id
    from ranking
    where leaves_view
),
member as (
    select subject_id, 'all' as subset_id
    from measured
    union all
    select subject_id, 'registered'
    from measured
    anti join misregistered using (subject_id)
    union all
    select subject_id, 'inside_every_view'
    from measured
    anti join misregistered using (subject_id)
    anti join leaving using (subject_id)
),
operating as (
    select t.method_id, m.subject_id, t.level
    from threshold_choice as t
    join protocol on protocol.reference_budget_cm3 = t.budget_cm3
    cross join measured as m
    where t.threshold_rule_id = 'validation' and t.status = 'ok'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
    union all
    select t.method_id, t.subject_id, t.level
    from subject_threshold as t
    join crossfit_fold as f using (subject_id)
    join protocol on protocol.reference_budget_cm3 = t.budget_cm3
    where t.threshold_rule_id = 'validation'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
),
per_subject as (
    select method_id, subject_id, 'voxel_auroc' as metric_id, auroc as value
    from ranking
    union all
    select method_id, subject_id, 'voxel_ap', average_precision
    from ranking
    union all
    select
        c.method_id, c.subject_id, 'dice',
        case
            when c.reference_voxels > 0
                then 2 * c.true_positive_voxels::double / (c.predicted_voxels + c.reference_voxels)
            when protocol.empty_dice = 'one_if_both_empty' then (c.predicted_voxels = 0)::int::double
        end
    from reference_curve as c
    join operating as o using (method_id, subject_id, level)
    cross join protocol
    where c.postprocess_id = 'plain'
    union all
    select c.method_id, c.subject_id, 'lesion_sensitivity', c.hit_iou_10::double / nullif(c.lesion_count, 0)
    from reference_curve as c
    join operating as o using (method_id, subject_id, level)
    where c.postprocess_id = 'plain' and c.lesion_count is not null
),
subset as (
    select unnest(['all', 'registered', 'inside_every_view']) as subset_id
),
metric as (
    select
        unnest(['dice', 'lesion_sensitivity', 'voxel_auroc', 'voxel_ap']) as metric_id,
        unnest([true, true, false, false]) as is_at_threshold
),
averaged as (
    select
        e.method_id, b.subset_id, k.metric_id,
        any_value(k.is_at_threshold) and count(m.subject_id) > count(o.level) as lacks_threshold,
        favg(p.value) as value,
        count(p.value) as n_subjects
    from entry as e
    cross join subset as b
    cross join metric as k
    left join member as m using (subset_id)
    left join per_subject as p
        on p.method_id = e.method_id and p.metric_id = k.metric_id and p.subject_id = m.subject_id
    left join operating as o on o.method_id = e.method_id and o.subject_id = m.subject_id
    group by all
)
select
    method_id, subset_id, metric_id,
    case when not lacks_threshold then value end as value,
    case when lacks_threshold then 0 else n_subjects end as n_subjects
from averaged
