-- One row per method, budget and post-processing: its gain in mean Dice over plain maps at equal burden, and whence; and
--   its gain in the pooled sensitivity to lesions above the floor (matched IoU of at least 0.10).
-- key: method_id, budget_cm3, postprocess_id
-- columns: threshold?, matched_threshold, burden_cm3_mean, n_dice, total_gain, total_gain_low?, total_gain_high?,
--   fixed_threshold_effect, fixed_threshold_effect_low?, fixed_threshold_effect_high?,
--   relaxation, relaxation_low?, relaxation_high?, sensitivity_gain?, sensitivity_gain_low?, sensitivity_gain_high?,
--   sensitivity_fixed_threshold_effect?, sensitivity_fixed_threshold_effect_low?,
--   sensitivity_fixed_threshold_effect_high?, lesion_total, n_replicates?
with lesion_hits as (
    select c.method_id, c.postprocess_id, c.level, sum(c.hit_iou_10) as hits, sum(c.lesion_count) as lesion_total
    from reference_curve as c
    join cohort_subject as s on s.subject_id = c.subject_id and s.is_included and s.split = 'test'
    where c.lesion_count is not null
    group by all
),
test_curve as (
    select
        c.method_id, c.postprocess_id, c.level, c.burden_cm3_mean, c.dice_mean, c.n_dice,
        l.hits::double / nullif(l.lesion_total, 0) as sensitivity, l.lesion_total
    from cohort_curve as c
    join lesion_hits as l using (method_id, postprocess_id, level)
    where c.split = 'test'
        and c.reference_id = 'canonical' and c.support_id = 'brain' and c.voxel_volume_id = 'true'
),
pooled_sensitivity as (
    select method_id, threshold_rule_id, budget_cm3, postprocess_id, sensitivity_pooled, lesion_total
    from lesion_score
    where reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'
        and lesion_definition_id = 'conn6_floor' and hit_criterion_id = 'iou_10'
),
processed as (
    select
        t.method_id, t.budget_cm3, c.postprocess_id, t.threshold,
        c.burden_cm3_mean, c.dice_mean, c.n_dice, c.sensitivity, c.lesion_total,
        p.dice_mean as plain_dice_mean, p.sensitivity as plain_sensitivity
    from threshold_choice as t
    join test_curve as c using (method_id, level)
    join test_curve as p on p.method_id = t.method_id and p.level = t.level and p.postprocess_id = 'plain'
    where t.threshold_rule_id = 'validation' and t.status = 'ok' and c.postprocess_id <> 'plain'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
        and c.dice_mean is not null
    union all by name
    -- cross-fitted, every subject has a level of its own
    select
        t.method_id, t.budget_cm3, o.postprocess_id, o.threshold,
        o.burden_cm3_mean, o.dice_mean, o.n_dice,
        l.sensitivity_pooled as sensitivity, coalesce(l.lesion_total, 0) as lesion_total,
        p.dice_mean as plain_dice_mean, k.sensitivity_pooled as plain_sensitivity
    from threshold_choice as t
    join operating_point as o using (method_id, threshold_rule_id, budget_cm3)
    join operating_point as p
        on p.method_id = t.method_id and p.threshold_rule_id = t.threshold_rule_id and p.budget_cm3 = t.budget_cm3
        and p.postprocess_id = 'plain'
    left join pooled_sensitivity as l
        on l.method_id = t.method_id and l.threshold_rule_id = t.threshold_rule_id and l.budget_cm3 = t.budget_cm3
        and l.postprocess_id = o.postprocess_id
    left join pooled_sensitivity as k
        on k.method_id = t.method_id and k.threshold_rule_id = t.threshold_rule_id and k.budget_cm3 = t.budget_cm3
        and k.postprocess_id = 'plain'
    where t.threshold_rule_id = 'validation' and t.status = 'degraded' and o.postprocess_id <> 'plain'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
        and o.dice_mean is not null
),
-- the plain threshold of the same burden lies between the first level that keeps it and the level below
matched as (
    select p.method_id, p.budget_cm3, p.postprocess_id, min(c.level) as level
    from processed as p
    join test_curve as c
        on c.method_id = p.method_id and c.postprocess_id = 'plain' and c.burden_cm3_mean <= p.burden_cm3_mean
    group by all
),
weighted as (
    select
        p.*,
        m.level as matched_level,
        above.dice_mean as dice_above,
        coalesce(below.dice_mean, above.dice_mean) as dice_below,
        above.sensitivity as sensitivity_above,
        coalesce(below.sensitivity, above.sensitivity) as sensitivity_below,
        coalesce(
            (p.burden_cm3_mean - above.burden_cm3_mean)
                / nullif(below.burden_cm3_mean - above.burden_cm3_mean, 0),
            0
        ) as weight
    from processed as p
    join matched as m using (method_id, budget_cm3, postprocess_id)
    join test_curve as above
        on above.method_id = p.method_id and above.postprocess_id = 'plain' and above.level = m.level
    left join test_curve as below
        on below.method_id = p.method_id and below.postprocess_id = 'plain' and below.level + 1 = m.level
),
interpolated as (
    select
        *,
        (1 - weight) * dice_above + weight * dice_below as matched_dice,
        (1 - weight) * sensitivity_above + weight * sensitivity_below as matched_sensitivity
    from weighted
)
select
    method_id, budget_cm3, postprocess_id,
    p.threshold, (p.matched_level - p.weight) / 200 as matched_threshold,
    p.burden_cm3_mean, p.n_dice,
    p.dice_mean - p.matched_dice as total_gain, i.total_gain_low, i.total_gain_high,
    p.dice_mean - p.plain_dice_mean as fixed_threshold_effect,
    i.fixed_threshold_effect_low, i.fixed_threshold_effect_high,
    p.plain_dice_mean - p.matched_dice as relaxation, i.relaxation_low, i.relaxation_high,
    p.sensitivity - p.matched_sensitivity as sensitivity_gain, i.sensitivity_gain_low, i.sensitivity_gain_high,
    p.sensitivity - p.plain_sensitivity as sensitivity_fixed_threshold_effect,
    i.sensitivity_fixed_threshold_effect_low, i.sensitivity_fixed_threshold_effect_high,
    p.lesion_total, i.n_replicates
from interpolated as p
left join gain_interval as i using (method_id, budget_cm3, postprocess_id)
