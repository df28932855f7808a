-- One row per method, split, reference, support and bin of the clipped score: voxels of the cohort.
-- key: method_id, split, reference_id, support_id, bin
-- columns: positive_voxels, negative_voxels
select
    h.method_id, s.split, h.reference_id, h.support_id, h.bin,
    sum(h.positive_voxels)::bigint as positive_voxels,
    sum(h.negative_voxels)::bigint as negative_voxels
from score_histogram as h
join cohort_subject as s on s.subject_id = h.subject_id and s.is_included
join ranked_method as m on m.method_id = h.method_id and m.is_ranked
group by all
