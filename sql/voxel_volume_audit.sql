-- One row per method: the volume of a stored voxel by the study, by its headers and by the ratio of voxel counts.
-- key: method_id
-- columns: declared_voxel_mm3_median?, header_voxel_mm3_median?, counted_voxel_mm3_median?, legacy_voxel_mm3?,
--   header_agrees_fraction?, n_subjects

-- Declared: extent over stored size times the canonical voxel. Counted: the canonical reference's volume in view over the
--   voxels of the own reference as stored, of subjects where neither is empty; another value than the declared one means
--   another reference, or another grid. legacy_voxel_mm3 is what the method's own code assumed of a canonical voxel.
with header as (
    select
        method_id,
        median(declared_voxel_mm3) as declared_voxel_mm3_median,
        median(header_voxel_mm3) as header_voxel_mm3_median,
        avg(header_agrees::int) as header_agrees_fraction,
        count(*) as n_subjects
    from source_file
    where role = 'map' and method_id is not null
    group by method_id
),
counted as (
    select
        o.method_id,
        median(s.voxel_mm3 * o.in_view_voxels / o.own_voxels) as counted_voxel_mm3_median
    from gate_overlap as o
    join subject as s using (subject_id)
    where o.own_voxels > 0 and o.in_view_voxels > 0
    group by o.method_id
)
select
    method_id, h.declared_voxel_mm3_median, h.header_voxel_mm3_median, c.counted_voxel_mm3_median,
    m.legacy_voxel_mm3, h.header_agrees_fraction, coalesce(h.n_subjects, 0) as n_subjects
from method as m
join ranked_method as r using (method_id)
left join header as h using (method_id)
left join counted as c using (method_id)
where m.kind = 'method' and r.is_ranked
