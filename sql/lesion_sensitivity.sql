-- One row per method, threshold rule, budget, post-processing, lesion definition, hit criterion and size class: the share of
--   the test cohort's lesions that is hit.
-- key: method_id, threshold_rule_id, budget_cm3, postprocess_id, lesion_definition_id, hit_criterion_id, size_class
-- columns: value, hit_count, n_lesions, n_subjects, size_limit_mm3?
-- stop: hit_count <= n_lesions | more lesions are hit than there are; report this defect

-- Canonical reference, brain, true voxel volume. A class without a test lesion has no row; lesions of one subject are not
-- independent, so their number stands beside the value instead of an interval.
with point as (
    select method_id, subject_id, threshold_rule_id, budget_cm3, level
    from subject_threshold
    where reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'
),
by_size as (
    select
        p.method_id, p.threshold_rule_id, p.budget_cm3, m.postprocess_id,
        'conn6_floor' as lesion_definition_id, l.size_class,
        count(*) filter (m.matched_iou >= 0.10) as hit_iou_10,
        count(*) filter (m.matched_iou >= 0.25) as hit_iou_25,
        count(*) filter (m.matched_iou >= 0.50) as hit_iou_50,
        count(*) filter (m.overlap_voxels > 0) as hit_any_overlap,
        count(*) as n_lesions,
        count(distinct p.subject_id) as n_subjects,
        any_value(l.size_limit_mm3) as size_limit_mm3
    from point as p
    join lesion_match as m using (method_id, subject_id, level)
    join lesion_size as l using (subject_id, lesion_id)
    where l.size_class is not null
    group by p.method_id, p.threshold_rule_id, p.budget_cm3, m.postprocess_id, l.size_class
),
of_any_size as (
    select
        p.method_id, p.threshold_rule_id, p.budget_cm3, c.postprocess_id, c.lesion_definition_id, 'all' as size_class,
        sum(c.hit_iou_10) as hit_iou_10,
        sum(c.hit_iou_25) as hit_iou_25,
        sum(c.hit_iou_50) as hit_iou_50,
        sum(c.hit_any_overlap) as hit_any_overlap,
        sum(c.lesion_count) as n_lesions,
        count(*) as n_subjects
    from point as p
    join lesion_curve as c using (method_id, subject_id, level)
    where c.reference_id = 'canonical' and c.support_id = 'brain' and c.voxel_volume_id = 'true' and c.lesion_count > 0
    group by all
),
every_class as (
    from by_size
    union all by name
    from of_any_size
),
long as (
    select
        * exclude (hit_iou_10, hit_iou_25, hit_iou_50, hit_any_overlap),
        unnest(['iou_10', 'iou_25', 'iou_50', 'any_overlap']) as hit_criterion_id,
        unnest([hit_iou_10, hit_iou_25, hit_iou_50, hit_any_overlap]) as hit_count
    from every_class
)
select
    method_id, threshold_rule_id, budget_cm3, postprocess_id, lesion_definition_id, hit_criterion_id, size_class,
    hit_count::double / n_lesions as value,
    hit_count, n_lesions, n_subjects, size_limit_mm3
from long
