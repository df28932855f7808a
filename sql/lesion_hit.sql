-- One row per method, subject, reference, support, voxel volume, post-processing, lesion definition, criterion and level.
-- key: method_id, subject_id, reference_id, support_id, voxel_volume_id, postprocess_id, lesion_definition_id,
--   hit_criterion_id, level
-- columns: threshold, hit_count, lesion_count
-- kind: view
select
    method_id, subject_id, reference_id, support_id, voxel_volume_id, postprocess_id, lesion_definition_id,
    unnest(['iou_10', 'iou_25', 'iou_50', 'any_overlap']) as hit_criterion_id,
    level, threshold,
    unnest([hit_iou_10, hit_iou_25, hit_iou_50, hit_any_overlap]) as hit_count,
    lesion_count
from lesion_curve
