-- One row per declared universe: its ten levels, and whether it has a score for every method.
-- key: universe_id
-- columns: reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
--   lesion_definition_id, hit_criterion_id, aggregation_id, metric_id, is_defensible, is_reference, cell_id, status,
--   reason?
with dropped as (
    select axis_column, level_id, position, format('{} {}: {}', axis_column, level_id, reason) as reason
    from dropped_level
),
marked as (
    select
        u.*,
        b.level_id as budget_level_id
    from universe_grid as u
    join budget as b using (budget_cm3)
),
with_reason as (
    select
        u.universe_id,
        min_by(d.reason, d.position) as reason
    from marked as u
    join dropped as d
        on (d.axis_column = 'reference_id' and d.level_id = u.reference_id)
        or (d.axis_column = 'support_id' and d.level_id = u.support_id)
        or (d.axis_column = 'voxel_volume_id' and d.level_id = u.voxel_volume_id)
        or (d.axis_column = 'threshold_rule_id' and d.level_id = u.threshold_rule_id)
        or (d.axis_column = 'budget_cm3' and d.level_id = u.budget_level_id)
        or (d.axis_column = 'postprocess_id' and d.level_id = u.postprocess_id)
        or (d.axis_column = 'lesion_definition_id' and d.level_id = u.lesion_definition_id)
        or (d.axis_column = 'hit_criterion_id' and d.level_id = u.hit_criterion_id)
        or (d.axis_column = 'aggregation_id' and d.level_id = u.aggregation_id)
        or (d.axis_column = 'metric_id' and d.level_id = u.metric_id)
    group by u.universe_id
)
select
    u.universe_id, u.reference_id, u.support_id, u.voxel_volume_id, u.threshold_rule_id, u.budget_cm3, u.postprocess_id,
    u.lesion_definition_id, u.hit_criterion_id, u.aggregation_id, u.metric_id, u.is_defensible, u.is_reference,
    u.cell_id,
    case when r.reason is null then 'ok' else 'unavailable' end as status,
    r.reason
from universe_grid as u
left join with_reason as r using (universe_id)
