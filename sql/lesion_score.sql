-- One row per method, reference, support, voxel volume, threshold rule of the multiverse, budget, post-processing, lesion
--   definition and hit criterion: lesion sensitivity over the test cohort.
-- key: method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
--   lesion_definition_id, hit_criterion_id
-- columns: sensitivity_mean?, sensitivity_median?, sensitivity_pooled?, n_with_lesions, lesion_total
with series as materialized (
    select
        t.method_id, t.reference_id, t.support_id, t.voxel_volume_id, t.threshold_rule_id, t.budget_cm3,
        c.postprocess_id, c.lesion_definition_id,
        c.hit_iou_10, c.hit_iou_25, c.hit_iou_50, c.hit_any_overlap, c.lesion_count
    from subject_threshold as t
    join lesion_curve as c using (method_id, subject_id, reference_id, support_id, voxel_volume_id, level)
    where t.threshold_rule_id in (select level_id from axis_level where axis_column = 'threshold_rule_id')
        and c.lesion_definition_id in (select level_id from axis_level where axis_column = 'lesion_definition_id')
        and c.lesion_count > 0
),
long as (
    select
        * exclude (hit_iou_10, hit_iou_25, hit_iou_50, hit_any_overlap),
        unnest(['iou_10', 'iou_25', 'iou_50', 'any_overlap']) as hit_criterion_id,
        unnest([hit_iou_10, hit_iou_25, hit_iou_50, hit_any_overlap]) as hit_count
    from series
)
select
    method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
    lesion_definition_id, hit_criterion_id,
    favg(hit_count::double / lesion_count) as sensitivity_mean,
    median(hit_count::double / lesion_count) as sensitivity_median,
    sum(hit_count)::double / sum(lesion_count) as sensitivity_pooled,
    count(*) as n_with_lesions,
    sum(lesion_count)::bigint as lesion_total
from long
group by all
