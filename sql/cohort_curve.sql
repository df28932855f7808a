-- One row per method, split, reference, support, voxel volume, post-processing and level: the cohort's mean burden and Dice.
-- key: method_id, split, reference_id, support_id, voxel_volume_id, postprocess_id, level
-- columns: threshold, n_subjects, n_dice, burden_cm3_mean, dice_mean?, dice_pooled?, predicted_voxels_total,
--   true_positive_voxels_total, reference_voxels_total
select
    method_id, split, reference_id, support_id, voxel_volume_id, postprocess_id, level,
    any_value(threshold) as threshold,
    count(*) as n_subjects,
    count(dice) as n_dice,
    -- voxels are summed as integers: one division, the same on every machine
    sum(false_positive_voxels) * any_value(voxel_mm3) / 1000 / count(*) as burden_cm3_mean,
    favg(dice) as dice_mean,
    2 * sum(true_positive_voxels)::double / nullif(sum(predicted_voxels) + sum(reference_voxels), 0) as dice_pooled,
    sum(predicted_voxels)::bigint as predicted_voxels_total,
    sum(true_positive_voxels)::bigint as true_positive_voxels_total,
    sum(reference_voxels)::bigint as reference_voxels_total
from subject_curve
group by all
