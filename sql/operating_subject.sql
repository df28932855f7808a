-- One row per method, test subject, threshold rule, budget and post-processing, for the canonical reference in the brain.
-- key: method_id, subject_id, threshold_rule_id, budget_cm3, postprocess_id
-- columns: level, threshold, predicted_voxels, true_positive_voxels, reference_voxels, burden_cm3, dice?
select
    t.method_id, t.subject_id, t.threshold_rule_id, t.budget_cm3, c.postprocess_id,
    t.level, c.threshold, c.predicted_voxels, c.true_positive_voxels, c.reference_voxels, c.burden_cm3, c.dice
from subject_threshold as t
join subject_curve as c using (method_id, subject_id, reference_id, support_id, voxel_volume_id, level)
where t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
