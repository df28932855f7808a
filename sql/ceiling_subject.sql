-- One row per method, test subject with a reference, budget and ceiling: the best Dice by a means that uses the reference,
--   beside that of the validation threshold; canonical reference, brain, plain maps.
-- key: method_id, subject_id, budget_cm3, ceiling_id
-- columns: validation_dice, dice?, attained_dice?, burden_cm3?, within_lesion_coverage?, least_dice
-- stop: dice >= least_dice - 1e-12 | a ceiling lies below what it bounds; report this defect
-- stop: attained_dice <= dice + 1e-12 | more is attained than the upper bound; report this defect
-- stop: ceiling_id = 'subject_optimum' or burden_cm3 <= budget_cm3 | a ceiling breaks its budget; report this defect

-- lesion_threshold and component_selection are upper bounds (segment_ceiling); the others are attained. least_dice is what the
--   ceiling cannot be below: one threshold for all lesions is a threshold per lesion, all components are a choice of them.
with validation as (
    select
        o.method_id, o.subject_id, o.budget_cm3, o.level, o.true_positive_voxels, o.reference_voxels, o.burden_cm3,
        2 * o.true_positive_voxels::double / (o.predicted_voxels + o.reference_voxels) as dice
    from operating_subject as o
    where o.threshold_rule_id = 'validation' and o.postprocess_id = 'plain' and o.reference_voxels > 0
),
-- the best level of the subject that keeps the budget, ties to the larger one; level 200 predicts nothing and always does
subject_threshold_ceiling as (
    select c.method_id, c.subject_id, b.budget_cm3, c.dice, c.burden_cm3
    from subject_curve as c
    join budget as b on c.burden_cm3 <= b.budget_cm3
    where c.reference_id = 'canonical' and c.support_id = 'brain' and c.voxel_volume_id = 'true'
        and c.postprocess_id = 'plain' and c.split = 'test' and c.reference_voxels > 0
    qualify row_number() over (
        partition by c.method_id, c.subject_id, b.budget_cm3
        order by c.dice desc, c.level desc
    ) = 1
),
-- every lesion that the validation threshold touches, exactly, and nothing else
touched as (
    select v.method_id, v.subject_id, v.budget_cm3, sum(r.lesion_voxels) as voxels, sum(r.overlap_voxels) as overlap
    from validation as v
    join region_curve as r using (method_id, subject_id, level)
    where r.overlap_voxels > 0
    group by all
),
boundary as (
    select
        v.method_id, v.subject_id, v.budget_cm3,
        2 * coalesce(t.voxels, 0) / (coalesce(t.voxels, 0) + v.reference_voxels) as dice,
        t.overlap / t.voxels as coverage
    from validation as v
    left join touched as t using (method_id, subject_id, budget_cm3)
    where v.true_positive_voxels = coalesce(t.overlap, 0)
),
optimum as (
    select method_id, subject_id, budget_cm3, dice, burden_cm3
    from operating_subject
    where threshold_rule_id = 'subject_optimum' and postprocess_id = 'plain'
),
ceiling as (
    select unnest(
        ['subject_threshold', 'lesion_threshold', 'component_selection', 'boundary_replacement', 'subject_optimum']
    ) as ceiling_id
)
select
    v.method_id, v.subject_id, v.budget_cm3, c.ceiling_id,
    v.dice as validation_dice,
    case c.ceiling_id
        when 'subject_threshold' then s.dice
        when 'boundary_replacement' then r.dice
        when 'subject_optimum' then o.dice
        else g.dice
    end as dice,
    case c.ceiling_id
        when 'subject_threshold' then s.dice
        when 'boundary_replacement' then r.dice
        when 'subject_optimum' then o.dice
        else g.attained_dice
    end as attained_dice,
    case c.ceiling_id
        when 'subject_threshold' then s.burden_cm3
        when 'boundary_replacement' then if(r.dice is null, null, 0)
        when 'subject_optimum' then o.burden_cm3
        else g.burden_cm3
    end as burden_cm3,
    case when c.ceiling_id = 'boundary_replacement' then r.coverage end as within_lesion_coverage,
    case
        when c.ceiling_id = 'lesion_threshold' then s.dice
        when c.ceiling_id = 'subject_optimum' then greatest(s.dice, v.dice)
        when c.ceiling_id = 'boundary_replacement' or v.burden_cm3 <= v.budget_cm3 then v.dice
        else 0
    end as least_dice
from validation as v
cross join ceiling as c
join subject_threshold_ceiling as s using (method_id, subject_id, budget_cm3)
join optimum as o using (method_id, subject_id, budget_cm3)
left join boundary as r using (method_id, subject_id, budget_cm3)
left join segment_ceiling as g using (method_id, subject_id, budget_cm3, ceiling_id)
