-- One row per method, reference, support, voxel volume, budget and fold: the level that the validation rule chooses on the
--   subjects of all other folds.
-- key: method_id, reference_id, support_id, voxel_volume_id, budget_cm3, fold
-- columns: level, threshold, n_subjects, n_dice, burden_cm3_mean, dice_mean

-- Sums over the other folds are those over all less the fold's own. They are whole numbers, Dice in units of 2^-52, so that
--   nothing is lost in the difference: levels at which the others are equal stay equal, and the larger one wins. A fold
--   without a row has no level: none of its other subjects has a reference.
with own_sum as (
    select
        c.method_id, c.reference_id, c.support_id, c.voxel_volume_id, f.fold, c.level,
        any_value(c.threshold) as threshold,
        any_value(c.voxel_mm3) as voxel_mm3,
        count(*) as n_subjects,
        count(c.dice) as n_dice,
        sum(c.false_positive_voxels) as false_positive_voxels,
        coalesce(sum((c.dice * 2 ** 52)::bigint), 0) as dice_units
    from subject_curve as c
    join crossfit_fold as f using (subject_id)
    where c.postprocess_id = 'plain'
    group by c.method_id, c.reference_id, c.support_id, c.voxel_volume_id, f.fold, c.level
),
own_hits as (
    select
        c.method_id, c.reference_id, c.support_id, c.voxel_volume_id, f.fold, c.level,
        sum(c.hit_iou_10) as hits,
        sum(c.lesion_count) as lesions
    from lesion_curve as c
    join crossfit_fold as f using (subject_id)
    where c.postprocess_id = 'plain' and c.lesion_definition_id = 'conn6_floor'
    group by c.method_id, c.reference_id, c.support_id, c.voxel_volume_id, f.fold, c.level
),
others as (
    select
        s.method_id, s.reference_id, s.support_id, s.voxel_volume_id, s.fold, s.level, s.threshold, s.voxel_mm3,
        sum(s.n_subjects) over every_fold - s.n_subjects as n_subjects,
        sum(s.n_dice) over every_fold - s.n_dice as n_dice,
        sum(s.false_positive_voxels) over every_fold - s.false_positive_voxels as false_positive_voxels,
        sum(s.dice_units) over every_fold - s.dice_units as dice_units,
        sum(h.hits) over every_fold - h.hits as hits,
        sum(h.lesions) over every_fold - h.lesions as lesions
    from own_sum as s
    join own_hits as h using (method_id, reference_id, support_id, voxel_volume_id, fold, level)
    window every_fold as (
        partition by s.method_id, s.reference_id, s.support_id, s.voxel_volume_id, s.level
    )
),
-- the rule is that of `threshold_choice`, once for every fold
feasible as (
    select
        o.*, b.budget_cm3,
        o.false_positive_voxels * o.voxel_mm3 / 1000 / o.n_subjects as burden_cm3_mean,
        o.hits >= max(o.hits) over (
            partition by o.method_id, o.reference_id, o.support_id, o.voxel_volume_id, o.fold, b.budget_cm3
        ) - greatest(1, floor(p.guard_share * o.lesions)) as is_guarded
    from others as o
    cross join budget as b
    cross join protocol as p
    where o.n_subjects > 0
        and o.false_positive_voxels * o.voxel_mm3 / 1000 / o.n_subjects <= b.budget_cm3
)
select
    method_id, reference_id, support_id, voxel_volume_id, budget_cm3, fold,
    level, threshold, n_subjects, n_dice, burden_cm3_mean,
    dice_units::double / 2 ** 52 / n_dice as dice_mean
from feasible
where is_guarded and n_dice > 0
qualify row_number() over (
    partition by method_id, reference_id, support_id, voxel_volume_id, budget_cm3, fold
    order by dice_units desc, level desc
) = 1
