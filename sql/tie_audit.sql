-- One row per method or baseline: what tied scores and the field of view do to its voxel ranking.
-- key: method_id
-- columns: tied_fraction_median?, outside_view_fraction_median?, auroc_difference_mean?, auroc_difference_max?,
--   precision_difference_max?, n_subjects

-- Test cohort, canonical reference, brain. A difference is the ordinal value, where ties rank in array order, less the one
--   with mid-ranks (AUROC) or with tied scores collapsed to one threshold (average precision); the largest is in size.
with paired as (
    select
        b.method_id, b.tied_fraction, b.positive_voxels + b.negative_voxels as brain_voxels,
        v.positive_voxels + v.negative_voxels as in_view_voxels,
        b.ordinal_auroc - b.auroc as auroc_difference,
        b.ordinal_average_precision - b.average_precision as precision_difference
    from voxel_ranking as b
    join voxel_ranking as v using (method_id, subject_id, reference_id)
    join cohort_subject as s on s.subject_id = b.subject_id and s.is_included and s.split = 'test'
    join ranked_method as m on m.method_id = b.method_id and m.is_ranked
    where b.reference_id = 'canonical' and b.support_id = 'brain' and v.support_id = 'brain_in_view'
)
select
    method_id,
    median(tied_fraction) as tied_fraction_median,
    median(1 - in_view_voxels / nullif(brain_voxels, 0)) as outside_view_fraction_median,
    favg(auroc_difference) as auroc_difference_mean,
    max(abs(auroc_difference)) as auroc_difference_max,
    max(abs(precision_difference)) as precision_difference_max,
    count(*) as n_subjects
from paired
group by method_id
