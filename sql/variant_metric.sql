-- One row per method, test subject, variant and metric: what the subject scores under a diagnostic variant.
-- key: method_id, subject_id, variant_id, metric_id
-- columns: value?

-- Canonical reference, brain, plain maps, conn6_floor and IoU 0.10; thresholds are those chosen on validation for the
--   declared maps at the reference budget, whatever the variant does. Empty without diagnostics.
with ranking as (
    select * from variant_ranking
    union all
    select * from exchange_ranking
),
curve as (
    select * from variant_curve
    union all
    select * from exchange_curve
),
included as (
    select s.subject_id, m.method_id
    from cohort_subject as s
    cross join ranked_method as m
    where s.is_included and s.split = 'test' and m.is_ranked
),
operating as (
    select t.method_id, t.subject_id, t.level, protocol.empty_dice
    from subject_threshold as t
    join protocol on protocol.reference_budget_cm3 = t.budget_cm3
    where t.threshold_rule_id = 'validation'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
),
at_threshold as (
    select
        c.method_id, c.subject_id, c.variant_id,
        case
            when c.reference_voxels > 0
                then 2 * c.true_positive_voxels::double / (c.predicted_voxels + c.reference_voxels)
            when o.empty_dice = 'one_if_both_empty' then (c.predicted_voxels = 0)::int::double
        end as dice,
        c.hit_iou_10::double / nullif(c.lesion_count, 0) as lesion_sensitivity
    from curve as c
    join operating as o using (method_id, subject_id, level)
),
long as (
    select
        r.method_id, r.subject_id, r.variant_id,
        unnest(['dice', 'lesion_sensitivity', 'voxel_auroc', 'voxel_ap', 'slice_auroc']) as metric_id,
        unnest([a.dice, a.lesion_sensitivity, r.auroc, r.average_precision, r.slice_auroc]) as value
    from ranking as r
    left join at_threshold as a using (method_id, subject_id, variant_id)
)
select l.method_id, l.subject_id, l.variant_id, l.metric_id, l.value
from long as l
join included as i using (method_id, subject_id)
