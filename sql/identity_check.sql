-- One row per identity and what it was checked on: two sides that must agree, from different marts or tables.
-- key: identity, item
-- columns: left_value, right_value, difference, tolerance, holds
-- stop: holds | two numbers that must agree do not; the lake or a mart is wrong, so report this defect
with dice_point as (
    select o.*, m.position
    from operating_point as o
    join ranked_method as m on m.method_id = o.method_id and m.kind = 'method'
    where o.postprocess_id = 'plain'
),
-- Identity 1: the contrast at validation thresholds is the contrast at equal burden minus the difference of transfer gaps
identity_1 as (
    select
        'identity_1' as identity,
        format('{} - {} at {:g} cm3', a.method_id, b.method_id, a.budget_cm3) as item,
        a.dice_mean - b.dice_mean as left_value,
        (ga.equal_burden_dice_mean - gb.equal_burden_dice_mean) - (ga.gap_interpolated - gb.gap_interpolated)
            as right_value,
        1e-9 as tolerance
    from dice_point as a
    join dice_point as b using (threshold_rule_id, budget_cm3)
    join transfer_gap as ga on ga.method_id = a.method_id and ga.budget_cm3 = a.budget_cm3
    join transfer_gap as gb on gb.method_id = b.method_id and gb.budget_cm3 = b.budget_cm3
    where a.threshold_rule_id = 'validation' and a.position < b.position
        and a.dice_mean is not null and b.dice_mean is not null
),
-- Identity 2: pooled minus mean Dice is n times the covariance of Dice with the share of predicted and reference voxels
with_reference as (
    select
        *,
        predicted_voxels + reference_voxels as size,
        count(*) over point as n,
        sum(predicted_voxels + reference_voxels) over point as total_size,
        sum(true_positive_voxels) over point as total_hits
    from operating_subject
    where reference_voxels > 0
    window point as (partition by method_id, threshold_rule_id, budget_cm3, postprocess_id)
),
covariance as (
    select
        method_id, threshold_rule_id, budget_cm3, postprocess_id,
        fsum((size / total_size - 1 / n) * dice) as n_covariance,
        any_value(n) as n
    from with_reference
    group by all
),
curve_point as (
    -- the other side from the cohort's curve: the same subjects, counted at one level for all
    select
        t.method_id, t.threshold_rule_id, t.budget_cm3, c.postprocess_id, c.dice_pooled - c.dice_mean as pooled_minus_mean
    from threshold_choice as t
    join cohort_curve as c using (method_id, reference_id, support_id, voxel_volume_id, level)
    where c.split = 'test' and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
        and c.n_dice = c.n_subjects
),
identity_2 as (
    select
        'identity_2' as identity,
        format('{} {} {} at {:g} cm3', v.method_id, v.threshold_rule_id, v.postprocess_id, v.budget_cm3) as item,
        p.pooled_minus_mean as left_value,
        v.n_covariance as right_value,
        1e-9 as tolerance
    from covariance as v
    join curve_point as p using (method_id, threshold_rule_id, budget_cm3, postprocess_id)
    where p.pooled_minus_mean is not null
),
-- predicted voxels are true and false positives: the histogram's voxels above zero are those predicted at level 0
histogram_total as (
    select
        method_id, subject_id, reference_id, support_id,
        sum(positive_voxels) filter (where bin > 0) as true_positive_voxels,
        sum(negative_voxels) filter (where bin > 0) as false_positive_voxels
    from score_histogram
    group by all
),
predicted as (
    select
        'true_and_false_positives' as identity,
        format('{} {} {}', c.method_id, c.reference_id, c.support_id) as item,
        sum(c.predicted_voxels)::double as left_value,
        sum(coalesce(h.true_positive_voxels, 0) + coalesce(h.false_positive_voxels, 0))::double as right_value,
        0 as tolerance
    from threshold_curve as c
    join histogram_total as h using (method_id, subject_id, reference_id, support_id)
    where c.level = 0 and c.voxel_volume_id = 'true' and c.postprocess_id = 'plain'
    group by c.method_id, c.reference_id, c.support_id
),
-- no curve rises with the threshold
step as (
    select
        method_id, reference_id, support_id, postprocess_id,
        predicted_voxels > lag(predicted_voxels) over curve
            or true_positive_voxels > lag(true_positive_voxels) over curve as rises
    from threshold_curve
    window curve as (
        partition by method_id, subject_id, reference_id, support_id, voxel_volume_id, postprocess_id order by level
    )
),
monotone as (
    select
        'monotone_curve' as identity,
        format('{} {} {} {}', method_id, reference_id, support_id, postprocess_id) as item,
        count_if(rises)::double as left_value,
        0::double as right_value,
        0 as tolerance
    from step
    group by method_id, reference_id, support_id, postprocess_id
),
-- the support's voxels are the brain's
counted as (
    select
        'support_voxels' as identity,
        format('{} {}', v.method_id, v.reference_id) as item,
        sum(v.positive_voxels + v.negative_voxels)::double as left_value,
        sum(s.brain_voxels)::double as right_value,
        0 as tolerance
    from voxel_ranking as v
    join subject as s using (subject_id)
    where v.support_id = 'brain'
    group by v.method_id, v.reference_id
),
every_side as (
    from identity_1
    union all by name
    from identity_2
    union all by name
    from predicted
    union all by name
    from monotone
    union all by name
    from counted
)
select
    identity, item, left_value, right_value,
    left_value - right_value as difference,
    tolerance::double as tolerance,
    abs(left_value - right_value) <= tolerance as holds
from every_side
