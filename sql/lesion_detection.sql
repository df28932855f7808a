-- One row per method and test lesion above the floor: whether it is detected at the validation threshold and the reference
--   budget (plain maps, matched IoU of at least 0.10), and what may explain it.
-- key: method_id, subject_id, lesion_id
-- columns: volume_mm3, mean_contrast?, relative_position?, matched_iou, overlap_voxels, is_detected
with test_lesion as (
    select l.subject_id, l.lesion_id, l.volume_mm3, l.mean_contrast, l.centroid_2
    from lesion as l
    join cohort_subject as s on s.subject_id = l.subject_id and s.is_included and s.split = 'test'
    where l.method_id is null and l.reference_id = 'canonical' and l.support_id = 'brain'
        and l.lesion_definition_id = 'conn6_floor'
),
chosen as (
    select t.method_id, t.subject_id, t.level
    from subject_threshold as t
    cross join protocol
    where t.threshold_rule_id = 'validation' and t.budget_cm3 = protocol.reference_budget_cm3
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
),
brain_slices as (
    -- every method sees the same brain
    select subject_id, min(slice_index) as first_slice, max(slice_index) as last_slice
    from slice_score
    where support_id = 'brain'
    group by subject_id
)
select
    c.method_id, l.subject_id, l.lesion_id, l.volume_mm3, l.mean_contrast,
    (l.centroid_2 - b.first_slice) / nullif(b.last_slice - b.first_slice, 0) as relative_position,
    coalesce(m.matched_iou, 0) as matched_iou,
    coalesce(m.overlap_voxels, 0) as overlap_voxels,
    coalesce(m.matched_iou >= 0.10, false) as is_detected
from chosen as c
join test_lesion as l using (subject_id)
left join brain_slices as b using (subject_id)
left join lesion_match as m
    on m.method_id = c.method_id and m.subject_id = l.subject_id and m.lesion_id = l.lesion_id
    and m.level = c.level and m.postprocess_id = 'plain'
