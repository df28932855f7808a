-- One row per method, test subject, reference, support, voxel volume, threshold rule and budget whose level is the subject's own.
-- key: method_id, subject_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3
-- columns: level

-- Best Dice, or the threshold of the subject's fold: the rows of subject_threshold that one level per rule does not hold. A table,
--   so that its size is known where whole curves are read at these levels.
select
    t.method_id, t.subject_id, t.reference_id, t.support_id, t.voxel_volume_id, t.threshold_rule_id, t.budget_cm3, t.level
from subject_threshold as t
join threshold_choice as c using (method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3)
where c.level is null
