-- One row per method or baseline: what tied scores and the field of view do to its voxel ranking.
-- key: method_id
-- columns: tied_fraction_median?, outside_view_fraction_median?, auroc_difference_mean?, auroc_difference_max?,
--   precision_difference_max?, n_subjects

-- Test cohort, canonical reference, brain. A difference is the ordinal value, where ties rank in array order, less the one
--   with mid-ranks (AUROC) or with tied scores collapsed to one threshold (average precision); the largest is in size.
with paired as (
    select
        v.method_id, v.subject_id,
        max(v.tied_fraction) filter (where v.support_id = 'brain') as tied_fraction,
        max(v.positive_voxels + v.negative_voxels) filter (where v.support_id = 'brain') as brain_voxels,
        max(v.positive_voxels + v.negative_voxels) filter (where v.support_id = 'brain_in_view') as in_view_voxels,
        max(v.ordinal_auroc - v.auroc) filter (where v.support_id = 'brain') as auroc_difference,
        max(v.ordinal_average_precision - v.average_precision) filter (where v.support_id = 'brain')
            as precision_difference
    from voxel_ranking as v
    join cohort_subject as s on s.subject_id = v.subject_id and s.is_included and s.split = 'test'
    join ranked_method as m on m.method_id = v.method_id and m.is_ranked
    where v.reference_id = 'canonical'
    group by v.method_id, v.subject_id
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
