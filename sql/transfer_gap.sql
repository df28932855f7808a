-- One row per method and budget: what test-matched thresholds would gain over validation thresholds, plain maps.
-- key: method_id, budget_cm3
-- columns: n_dice, validation_threshold?, validation_burden_cm3, test_matched_threshold, test_matched_burden_cm3,
--   interpolation_weight, gap_mean?, gap_mean_low?, gap_mean_high?, interval_kind?, gap_median?,
--   equal_burden_dice_mean?, gap_interpolated?, gap_interpolated_low?, gap_interpolated_high?,
--   interpolated_interval_kind?, n_replicates?
with pair as (
    select
        v.method_id, v.budget_cm3, v.subject_id,
        case when f.fold is null then v.threshold end as validation_threshold,
        (v.predicted_voxels - v.true_positive_voxels) as validation_false_positives, v.dice as validation_dice, s.voxel_mm3,
        t.threshold as test_matched_threshold, t.level as matched_level,
        t.dice - v.dice as gap
    from operating_subject as v
    join operating_subject as t using (method_id, subject_id, budget_cm3, postprocess_id)
    join cohort_subject as s on s.subject_id = v.subject_id
    left join crossfit_fold as f on f.subject_id = v.subject_id
    where v.threshold_rule_id = 'validation' and t.threshold_rule_id = 'test_matched' and v.postprocess_id = 'plain'
),
summary as (
    select
        method_id, budget_cm3,
        count(gap) as n_dice,
        any_value(validation_threshold) as validation_threshold,
        sum(validation_false_positives) * any_value(voxel_mm3) / 1000 / count(*) as crossfit_burden_cm3,
        favg(validation_dice) as crossfit_dice_mean,
        any_value(test_matched_threshold) as test_matched_threshold,
        any_value(matched_level) as matched_level,
        favg(gap) as gap_mean,
        median(gap) as gap_median
    from pair
    group by all
),
test_curve as (
    select method_id, level, burden_cm3_mean, dice_mean
    from cohort_curve
    where split = 'test' and postprocess_id = 'plain'
        and reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'
),
-- the burden is exactly the budget between the matched level and the level below: lambda weighs the level below
interpolated as (
    select
        s.method_id, s.budget_cm3,
        (s.budget_cm3 - above.burden_cm3_mean) / (below.burden_cm3_mean - above.burden_cm3_mean) as weight,
        above.burden_cm3_mean as test_matched_burden_cm3,
        above.dice_mean as dice_above,
        below.dice_mean as dice_below
    from summary as s
    join test_curve as above on above.method_id = s.method_id and above.level = s.matched_level
    join test_curve as below on below.method_id = s.method_id and below.level = s.matched_level - 1
)
select
    s.method_id, s.budget_cm3, s.n_dice,
    s.validation_threshold,
    coalesce(v.burden_cm3_mean, s.crossfit_burden_cm3) as validation_burden_cm3,
    s.test_matched_threshold, i.test_matched_burden_cm3,
    i.weight as interpolation_weight,
    s.gap_mean, r.gap_mean_low, r.gap_mean_high, r.interval_kind,
    s.gap_median,
    (1 - i.weight) * i.dice_above + i.weight * i.dice_below as equal_burden_dice_mean,
    (1 - i.weight) * i.dice_above + i.weight * i.dice_below
        - case when s.validation_threshold is null then s.crossfit_dice_mean else v.dice_mean end as gap_interpolated,
    r.gap_interpolated_low, r.gap_interpolated_high, r.interpolated_interval_kind, r.n_replicates
from summary as s
join interpolated as i using (method_id, budget_cm3)
-- at one threshold for all the cohort's curve says what it came to; cross-fitted, only the subjects' own levels do
left join test_curve as v on v.method_id = s.method_id and v.level = round(s.validation_threshold * 200)::utinyint
left join gap_interval as r on r.method_id = s.method_id and r.budget_cm3 = s.budget_cm3
