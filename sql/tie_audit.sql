-- One row per method, reference and support: how much tied scores matter, over the test cohort.
-- The published AUROC gives ties mid-ranks and the average precision collapses them; had array order broken the ties, they
-- would differ by the excess. Voxels outside the field of view, all of score 0, make the largest tie.
-- key: method_id, reference_id, support_id
-- columns: n_subjects, tied_fraction_median?, outside_view_fraction_median?, auroc_excess_mean?, auroc_excess_largest?,
--   average_precision_excess_mean?, average_precision_excess_largest?
with ranked as (
    select r.*
    from voxel_ranking as r
    join ranked_method as m on m.method_id = r.method_id and m.is_ranked
    join cohort_subject as s on s.subject_id = r.subject_id and s.is_included and s.split = 'test'
),
seen as (
    select method_id, subject_id, reference_id, positive_voxels + negative_voxels as in_view_voxels
    from ranked
    where support_id = 'brain_in_view'
),
excess as (
    select
        r.method_id, r.reference_id, r.support_id, r.tied_fraction,
        case
            when r.support_id = 'brain_in_view' then 0
            else 1 - v.in_view_voxels / nullif(r.positive_voxels + r.negative_voxels, 0)
        end as outside_view_fraction,
        r.ordinal_auroc - r.auroc as auroc_excess,
        r.ordinal_average_precision - r.average_precision as average_precision_excess
    from ranked as r
    left join seen as v using (method_id, subject_id, reference_id)
)
select
    method_id, reference_id, support_id,
    count(*) as n_subjects,
    median(tied_fraction) as tied_fraction_median,
    median(outside_view_fraction) as outside_view_fraction_median,
    favg(auroc_excess) as auroc_excess_mean,
    max(abs(auroc_excess)) as auroc_excess_largest,
    favg(average_precision_excess) as average_precision_excess_mean,
    max(abs(average_precision_excess)) as average_precision_excess_largest
from excess
group by method_id, reference_id, support_id
