-- One row per distinct cell and method: its score over the test cohort, null where there is none.
-- key: cell_id, method_id
-- columns: metric_id, score?, n_subjects, multiplicity
with entry as (
    -- a baseline has no grid of its own: canonical stands for every reference and true for the voxel volume
    select
        c.*, m.method_id,
        case when m.kind = 'baseline' then 'canonical' else c.reference_id end as measured_reference_id,
        case when m.kind = 'baseline' then 'true' else c.voxel_volume_id end as measured_volume_id
    from cell as c
    cross join ranked_method as m
    where m.is_ranked
),
threshold_free as (
    select method_id, metric_id, support_id, reference_id, aggregation_id, value, n_subjects
    from voxel_metric
    union all
    select method_id, metric_id, support_id, reference_id, aggregation_id, value, n_subjects
    from slice_metric
),
scored as (
    select e.cell_id, e.method_id, t.value as score, t.n_subjects
    from entry as e
    join threshold_free as t
        on t.metric_id = e.metric_id
        and t.method_id = e.method_id
        and t.reference_id = e.measured_reference_id
        and t.support_id = e.support_id
        and t.aggregation_id = e.aggregation_id
    union all
    select
        e.cell_id, e.method_id,
        case e.aggregation_id
            when 'mean' then d.dice_mean
            when 'median' then d.dice_median
            when 'pooled' then d.dice_pooled
        end as score,
        case when e.aggregation_id = 'pooled' then d.n_subjects else d.n_dice end as n_subjects
    from entry as e
    join dice_score as d
        on d.method_id = e.method_id
        and d.reference_id = e.measured_reference_id
        and d.support_id = e.support_id
        and d.voxel_volume_id = e.measured_volume_id
        and d.threshold_rule_id = e.threshold_rule_id
        and d.budget_cm3 = e.budget_cm3
        and d.postprocess_id = e.postprocess_id
    where e.metric_id = 'dice'
    union all
    select
        e.cell_id, e.method_id,
        case e.aggregation_id
            when 'mean' then l.sensitivity_mean
            when 'median' then l.sensitivity_median
            when 'pooled' then l.sensitivity_pooled
        end as score,
        l.n_with_lesions as n_subjects
    from entry as e
    join lesion_score as l
        on l.method_id = e.method_id
        and l.reference_id = e.measured_reference_id
        and l.support_id = e.support_id
        and l.voxel_volume_id = e.measured_volume_id
        and l.threshold_rule_id = e.threshold_rule_id
        and l.budget_cm3 = e.budget_cm3
        and l.postprocess_id = e.postprocess_id
        and l.lesion_definition_id = e.lesion_definition_id
        and l.hit_criterion_id = e.hit_criterion_id
    where e.metric_id = 'lesion_sensitivity'
)
select
    e.cell_id, e.method_id, e.metric_id,
    s.score,
    coalesce(s.n_subjects, 0) as n_subjects,
    e.multiplicity
from entry as e
left join scored as s using (cell_id, method_id)
