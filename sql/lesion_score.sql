-- One row per method, reference, support, voxel volume, threshold rule of the multiverse, budget, post-processing, lesion
--   definition and hit criterion: lesion sensitivity over the test cohort.
-- key: method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
--   lesion_definition_id, hit_criterion_id
-- columns: sensitivity_mean?, sensitivity_median?, sensitivity_pooled?, n_with_lesions, lesion_total
with series as (
    select
        t.method_id, t.reference_id, t.support_id, t.voxel_volume_id, t.threshold_rule_id, t.budget_cm3,
        c.postprocess_id, c.lesion_definition_id, c.lesion_count,
        c.hit_iou_10, c.hit_iou_25, c.hit_iou_50, c.hit_any_overlap
    from subject_threshold as t
    join lesion_curve as c using (method_id, subject_id, reference_id, support_id, voxel_volume_id, level)
    where t.threshold_rule_id in (select level_id from axis_level where axis_column = 'threshold_rule_id')
        and c.lesion_definition_id in (select level_id from axis_level where axis_column = 'lesion_definition_id')
        and c.lesion_count > 0
),
-- the four criteria side by side, and one below the other only when they are numbers of the cohort: a quarter of the rows
wide as (
    select
        * exclude (hit_iou_10, hit_iou_25, hit_iou_50, hit_any_overlap, lesion_count),
        ['iou_10', 'iou_25', 'iou_50', 'any_overlap'] as criteria,
        [
            favg(hit_iou_10::double / lesion_count), favg(hit_iou_25::double / lesion_count),
            favg(hit_iou_50::double / lesion_count), favg(hit_any_overlap::double / lesion_count)
        ] as means,
        [
            median(hit_iou_10::double / lesion_count), median(hit_iou_25::double / lesion_count),
            median(hit_iou_50::double / lesion_count), median(hit_any_overlap::double / lesion_count)
        ] as medians,
        [sum(hit_iou_10), sum(hit_iou_25), sum(hit_iou_50), sum(hit_any_overlap)] as hits,
        sum(lesion_count)::bigint as lesion_total,
        count(*) as n_with_lesions
    from series
    group by all
)
select
    method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
    lesion_definition_id,
    unnest(criteria) as hit_criterion_id,
    unnest(means) as sensitivity_mean,
    unnest(medians) as sensitivity_median,
    unnest(hits)::double / lesion_total as sensitivity_pooled,
    n_with_lesions,
    lesion_total
from wide
