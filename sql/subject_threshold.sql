-- One row per method, test subject, reference, support, voxel volume, threshold rule and budget: the level to read.
-- key: method_id, subject_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3
-- columns: level
with optimum as (
    -- best Dice of the subject, ties to the larger level; level 200 where it has no reference
    select
        method_id, subject_id, reference_id, support_id, voxel_volume_id,
        max((case when reference_voxels > 0 then dice else -1 end, level))[2] as level
    from subject_curve
    where postprocess_id = 'plain' and split = 'test'
    group by all
)
select
    o.method_id, o.subject_id, o.reference_id, o.support_id, o.voxel_volume_id, t.threshold_rule_id, t.budget_cm3,
    case when r.rule_kind = 'subject_optimum' then o.level when t.status = 'degraded' then x.level else t.level end as level
from optimum as o
join threshold_choice as t using (method_id, reference_id, support_id, voxel_volume_id)
join calibration_rule as r using (threshold_rule_id)
left join crossfit_fold as f on f.subject_id = o.subject_id
left join crossfit_threshold as x
    on x.method_id = t.method_id and x.reference_id = t.reference_id and x.support_id = t.support_id
    and x.voxel_volume_id = t.voxel_volume_id and x.budget_cm3 = t.budget_cm3 and x.fold = f.fold
where t.status <> 'infeasible'
