-- One row per method, reference, support, voxel volume, threshold rule of the multiverse, budget and post-processing.
-- key: method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id
-- columns: dice_mean?, dice_median?, dice_pooled?, n_dice, n_subjects
with series as materialized (
    select
        t.method_id, t.reference_id, t.support_id, t.voxel_volume_id, t.threshold_rule_id, t.budget_cm3,
        c.postprocess_id, c.dice, c.predicted_voxels, c.true_positive_voxels, c.reference_voxels
    from subject_threshold as t
    join subject_curve as c using (method_id, subject_id, reference_id, support_id, voxel_volume_id, level)
    where t.threshold_rule_id in (select level_id from axis_level where axis_column = 'threshold_rule_id')
)
select
    method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
    favg(dice) as dice_mean,
    median(dice) as dice_median,
    2 * sum(true_positive_voxels)::double
        / nullif(sum(predicted_voxels) + sum(reference_voxels), 0) as dice_pooled,
    count(dice) as n_dice,
    count(*) as n_subjects
from series
group by all
