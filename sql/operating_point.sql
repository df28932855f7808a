-- One row per method, threshold rule, budget and post-processing: Dice and the burden actually realised on test.
-- key: method_id, threshold_rule_id, budget_cm3, postprocess_id
-- columns: threshold?, n_subjects, n_dice, dice_mean?, dice_median?, dice_pooled?, burden_cm3_mean, burden_cm3_median,
--   burden_cm3_p95, burden_cm3_max, exceedance
select
    o.method_id, o.threshold_rule_id, o.budget_cm3, o.postprocess_id,
    case when o.threshold_rule_id <> 'subject_optimum' then any_value(o.threshold) end as threshold,
    count(*) as n_subjects,
    count(o.dice) as n_dice,
    favg(o.dice) as dice_mean,
    median(o.dice) as dice_median,
    2 * sum(o.true_positive_voxels)::double
        / nullif(sum(o.predicted_voxels) + sum(o.reference_voxels), 0) as dice_pooled,
    sum(o.predicted_voxels - o.true_positive_voxels) * any_value(s.voxel_mm3) / 1000 / count(*) as burden_cm3_mean,
    median(o.burden_cm3) as burden_cm3_median,
    quantile_cont(o.burden_cm3, 0.95) as burden_cm3_p95,
    max(o.burden_cm3) as burden_cm3_max,
    count_if(o.burden_cm3 > o.budget_cm3) / count(*) as exceedance
from operating_subject as o
join cohort_subject as s using (subject_id)
group by o.method_id, o.threshold_rule_id, o.budget_cm3, o.postprocess_id
