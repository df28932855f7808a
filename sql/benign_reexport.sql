-- One row per method: the benign re-export whose rank stability stands for no corruption.
-- key: method_id
-- columns: variant_id

-- Nearest neighbour in the place of linear interpolation; for a method stored on the canonical grid both are the same
--   array, and a re-export by half a voxel and back takes its place. Empty without diagnostics.
select
    n.method_id,
    case when bool_and(n.value is not distinct from d.value) then 'half_voxel' else 'nearest' end as variant_id
from variant_metric as n
join variant_metric as d using (method_id, subject_id, metric_id)
where n.variant_id = 'nearest' and d.variant_id = 'declared' and n.metric_id in ('voxel_auroc', 'voxel_ap')
group by n.method_id
