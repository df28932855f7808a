-- One row per method, budget and post-processing: its gain in mean Dice over plain maps at equal burden, and whence.
-- key: method_id, budget_cm3, postprocess_id
-- columns: threshold, matched_threshold, burden_cm3_mean, n_dice, total_gain, fixed_threshold_effect, relaxation
with test_curve as (
    select method_id, postprocess_id, level, burden_cm3_mean, dice_mean, n_dice
    from cohort_curve
    where split = 'test' and reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'
),
processed as (
    select
        t.method_id, t.budget_cm3, c.postprocess_id, t.level, t.threshold,
        c.burden_cm3_mean, c.dice_mean, c.n_dice, p.dice_mean as plain_dice_mean
    from threshold_choice as t
    join test_curve as c using (method_id, level)
    join test_curve as p on p.method_id = t.method_id and p.level = t.level and p.postprocess_id = 'plain'
    where t.threshold_rule_id = 'validation' and t.status = 'ok' and c.postprocess_id <> 'plain'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
        and c.dice_mean is not null
),
-- the plain threshold of the same burden lies between the first level that keeps it and the level below
matched as (
    select p.method_id, p.budget_cm3, p.postprocess_id, min(c.level) as level
    from processed as p
    join test_curve as c
        on c.method_id = p.method_id and c.postprocess_id = 'plain' and c.burden_cm3_mean <= p.burden_cm3_mean
    group by all
),
interpolated as (
    select
        p.*,
        m.level as matched_level,
        above.dice_mean as dice_above,
        coalesce(below.dice_mean, above.dice_mean) as dice_below,
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
)
select
    method_id, budget_cm3, postprocess_id, threshold,
    (matched_level - weight) / 200 as matched_threshold,
    burden_cm3_mean, n_dice,
    dice_mean - ((1 - weight) * dice_above + weight * dice_below) as total_gain,
    dice_mean - plain_dice_mean as fixed_threshold_effect,
    plain_dice_mean - ((1 - weight) * dice_above + weight * dice_below) as relaxation
from interpolated
