-- One row per distinct cell of the multiverse, under the first level of each axis that does not act.
-- key: cell_id
-- columns: metric_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
--   lesion_definition_id, hit_criterion_id, aggregation_id, multiplicity
select
    cell_id, metric_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
    lesion_definition_id, hit_criterion_id, aggregation_id,
    count(*) over (partition by cell_id) as multiplicity
from universe_grid
qualify row_number() over (partition by cell_id order by universe_id) = 1
