-- One row per method, subject, post-processing and level in the reference setting: voxels, and lesions above the floor.
-- key: method_id, subject_id, postprocess_id, level
-- columns: threshold, predicted_voxels, true_positive_voxels, reference_voxels, hit_iou_10?, lesion_count?

-- Canonical reference, brain, true voxel volume; of every ranked method and baseline, and every subject. Most questions are
--   asked here, so a thousand parts are read once for all of them.
select
    c.method_id, c.subject_id, c.postprocess_id, c.level, c.threshold,
    c.predicted_voxels, c.true_positive_voxels, c.reference_voxels, l.hit_iou_10, l.lesion_count
from threshold_curve as c
join ranked_method as r on r.method_id = c.method_id and r.is_ranked
left join lesion_curve as l
    on l.method_id = c.method_id and l.subject_id = c.subject_id and l.postprocess_id = c.postprocess_id and l.level = c.level
    and l.reference_id = 'canonical' and l.support_id = 'brain' and l.voxel_volume_id = 'true'
    and l.lesion_definition_id = 'conn6_floor'
where c.reference_id = 'canonical' and c.support_id = 'brain' and c.voxel_volume_id = 'true'
