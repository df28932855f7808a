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
dice_series as materialized (
    select
        t.method_id, t.reference_id, t.support_id, t.voxel_volume_id, t.threshold_rule_id, t.budget_cm3,
        c.postprocess_id, c.dice, c.predicted_voxels, c.true_positive_voxels, c.reference_voxels
    from subject_threshold as t
    join subject_curve as c using (method_id, subject_id, reference_id, support_id, voxel_volume_id, level)
    where t.threshold_rule_id in (select level_id from axis_level where axis_column = 'threshold_rule_id')
),
dice_score as (
    select
        method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
        favg(dice) as mean_score,
        median(dice) as median_score,
        2 * sum(true_positive_voxels)::double
            / nullif(sum(predicted_voxels) + sum(reference_voxels), 0) as pooled_score,
        count(dice) as n_dice,
        count(*) as n_subjects
    from dice_series
    group by all
)
select
    e.cell_id, e.method_id, e.metric_id,
    case e.metric_id
        when 'dice' then case e.aggregation_id
            when 'mean' then d.mean_score
            when 'median' then d.median_score
            when 'pooled' then d.pooled_score
        end
        else v.value
    end as score,
    coalesce(
        case
            when e.metric_id <> 'dice' then v.n_subjects
            when e.aggregation_id = 'pooled' then d.n_subjects
            else d.n_dice
        end,
        0
    ) as n_subjects,
    e.multiplicity
from entry as e
left join dice_score as d
    on e.metric_id = 'dice'
    and d.method_id = e.method_id
    and d.reference_id = e.measured_reference_id
    and d.support_id = e.support_id
    and d.voxel_volume_id = e.measured_volume_id
    and d.threshold_rule_id = e.threshold_rule_id
    and d.budget_cm3 = e.budget_cm3
    and d.postprocess_id = e.postprocess_id
left join voxel_metric as v
    on v.metric_id = e.metric_id
    and v.method_id = e.method_id
    and v.reference_id = e.measured_reference_id
    and v.support_id = e.support_id
    and v.aggregation_id = e.aggregation_id
