-- One row per method: the volume of a stored voxel by its headers, by the declared transform and by counting, over all subjects.
-- Counting: the canonical reference in view, in mm3, divided by the voxels of the method's own reference. Under the legacy
-- voxel volume, own voxels at their declared size would come to `legacy_count_ratio` times the canonical count; 1 means that
-- earlier reports counted true volumes.
-- key: method_id
-- columns: n_subjects, header_agrees_count, header_voxel_mm3_median?, declared_voxel_mm3_median?, n_counted,
--   counted_voxel_mm3_median?, counted_voxel_mm3_minimum?, counted_voxel_mm3_maximum?, legacy_voxel_mm3?,
--   legacy_count_ratio_median?, legacy_count_ratio_minimum?, legacy_count_ratio_maximum?
-- stop: header_agrees_count <= n_subjects and n_counted <= n_subjects | more comparisons than subjects; report this defect
with header as (
    select method_id, subject_id, declared_voxel_mm3, header_voxel_mm3, header_agrees
    from source_file
    where role = 'map'
),
counted as (
    select
        h.method_id, h.header_voxel_mm3, h.declared_voxel_mm3, h.header_agrees, m.legacy_voxel_mm3,
        o.in_view_voxels * s.voxel_mm3 / nullif(o.own_voxels, 0) as counted_voxel_mm3,
        o.own_voxels * h.declared_voxel_mm3 / m.legacy_voxel_mm3 / nullif(o.in_view_voxels, 0) as legacy_count_ratio,
        o.own_voxels > 0 and o.in_view_voxels > 0 as is_counted
    from header as h
    join method as m on m.method_id = h.method_id and m.kind <> 'baseline'
    join ranked_method as r on r.method_id = h.method_id and r.is_ranked
    join subject as s on s.subject_id = h.subject_id
    left join gate_overlap as o on o.method_id = h.method_id and o.subject_id = h.subject_id
)
select
    method_id,
    count(*) as n_subjects,
    count(*) filter (header_agrees) as header_agrees_count,
    median(header_voxel_mm3) as header_voxel_mm3_median,
    median(declared_voxel_mm3) as declared_voxel_mm3_median,
    count(*) filter (is_counted) as n_counted,
    median(counted_voxel_mm3) filter (is_counted) as counted_voxel_mm3_median,
    min(counted_voxel_mm3) filter (is_counted) as counted_voxel_mm3_minimum,
    max(counted_voxel_mm3) filter (is_counted) as counted_voxel_mm3_maximum,
    max(legacy_voxel_mm3) as legacy_voxel_mm3,
    median(legacy_count_ratio) filter (is_counted) as legacy_count_ratio_median,
    min(legacy_count_ratio) filter (is_counted) as legacy_count_ratio_minimum,
    max(legacy_count_ratio) filter (is_counted) as legacy_count_ratio_maximum
from counted
group by method_id
