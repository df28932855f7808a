-- One row per method, threshold rule, budget and post-processing: Dice and the burden actually realised on test.
-- key: method_id, threshold_rule_id, budget_cm3, postprocess_id
-- columns: threshold?, n_subjects, n_dice, dice_mean?, dice_mean_low?, dice_mean_high?, dice_median?, dice_median_low?,
--   dice_median_high?, dice_pooled?, dice_pooled_low?, dice_pooled_high?, burden_cm3_mean, burden_cm3_mean_low?,
--   burden_cm3_mean_high?, burden_cm3_median, burden_cm3_p95, burden_cm3_max, exceedance
with point as (
    select
        o.method_id, o.threshold_rule_id, o.budget_cm3, o.postprocess_id,
        -- subjects have levels of their own at their optimum, and where the validation rule is cross-fitted
        case
            when o.threshold_rule_id = 'subject_optimum' then null
            when o.threshold_rule_id = 'validation' and count(f.fold) > 0 then null
            else any_value(o.threshold)
        end as threshold,
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
        count(*) filter (o.burden_cm3 > o.budget_cm3) / count(*) as exceedance
    from operating_subject as o
    join cohort_subject as s using (subject_id)
    left join crossfit_fold as f using (subject_id)
    group by o.method_id, o.threshold_rule_id, o.budget_cm3, o.postprocess_id
)
-- intervals keep the threshold of the point, also where it was matched on test
select
    p.method_id, p.threshold_rule_id, p.budget_cm3, p.postprocess_id,
    p.threshold, p.n_subjects, p.n_dice,
    p.dice_mean, i.dice_mean_low, i.dice_mean_high,
    p.dice_median, i.dice_median_low, i.dice_median_high,
    p.dice_pooled, i.dice_pooled_low, i.dice_pooled_high,
    p.burden_cm3_mean, i.burden_cm3_mean_low, i.burden_cm3_mean_high,
    p.burden_cm3_median, p.burden_cm3_p95, p.burden_cm3_max, p.exceedance
from point as p
left join operating_interval as i using (method_id, threshold_rule_id, budget_cm3, postprocess_id)
