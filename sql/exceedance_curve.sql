-- One row per method, split, reference, support, voxel volume, budget and level: subjects above the budget, plain maps.
-- key: method_id, split, reference_id, support_id, voxel_volume_id, budget_cm3, level
-- columns: n_subjects, burden_exceedance_count, volume_exceedance_count
select
    c.method_id, c.split, c.reference_id, c.support_id, c.voxel_volume_id, b.budget_cm3, c.level,
    count(*) as n_subjects,
    count(*) filter (c.burden_cm3 > b.budget_cm3) as burden_exceedance_count,
    count(*) filter (c.predicted_voxels * c.voxel_mm3 / 1000 > b.budget_cm3) as volume_exceedance_count
from subject_curve as c
cross join budget as b
where c.postprocess_id = 'plain'
group by all
