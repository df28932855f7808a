-- One row per method, subject of the cohort, reference, support, voxel volume, post-processing and level: burden and Dice.
-- key: method_id, subject_id, reference_id, support_id, voxel_volume_id, postprocess_id, level
-- columns: split, threshold, predicted_voxels, true_positive_voxels, reference_voxels, false_positive_voxels, voxel_mm3,
--   burden_cm3, dice?
-- kind: view
select
    c.method_id, c.subject_id, c.reference_id, c.support_id, c.voxel_volume_id, c.postprocess_id, c.level,
    s.split, c.threshold, c.predicted_voxels, c.true_positive_voxels, c.reference_voxels,
    c.predicted_voxels - c.true_positive_voxels as false_positive_voxels,
    case when c.voxel_volume_id = 'legacy' then m.legacy_voxel_mm3 else s.voxel_mm3 end as voxel_mm3,
    (c.predicted_voxels - c.true_positive_voxels)
        * case when c.voxel_volume_id = 'legacy' then m.legacy_voxel_mm3 else s.voxel_mm3 end / 1000 as burden_cm3,
    case
        when c.reference_voxels > 0
            then 2 * c.true_positive_voxels::double / (c.predicted_voxels + c.reference_voxels)
        when protocol.empty_dice = 'one_if_both_empty' then (c.predicted_voxels = 0)::int::double
    end as dice
from threshold_curve as c
join cohort_subject as s on s.subject_id = c.subject_id and s.is_included
join method as m on m.method_id = c.method_id
join ranked_method as r on r.method_id = c.method_id and r.is_ranked
cross join protocol
