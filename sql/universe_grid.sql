-- One row per declared universe: every combination of the ten axes, with the distinct cell that gives its score.
-- key: universe_id
-- columns: reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
--   lesion_definition_id, hit_criterion_id, aggregation_id, metric_id, is_defensible, is_reference, cell_id
with level as (
    select axis_column, level_id, position, is_defensible, uses_budget, uses_voxel_volume
    from axis_level
),
combination as (
    select
        r.level_id as reference_id, r.position as reference_position,
        s.level_id as support_id, s.position as support_position,
        v.level_id as voxel_volume_id, v.position as volume_position,
        t.level_id as threshold_rule_id, t.position as rule_position, t.uses_budget as rule_uses_budget,
        b.budget_cm3, b.position as budget_position,
        p.level_id as postprocess_id, p.position as postprocess_position,
        p.uses_voxel_volume as postprocess_uses_volume,
        d.level_id as lesion_definition_id, d.position as definition_position,
        d.uses_voxel_volume as definition_uses_volume,
        h.level_id as hit_criterion_id, h.position as criterion_position,
        a.level_id as aggregation_id, a.position as aggregation_position,
        m.level_id as metric_id, m.position as metric_position,
        r.is_defensible and s.is_defensible and v.is_defensible and t.is_defensible and p.is_defensible
            and d.is_defensible and h.is_defensible and a.is_defensible and m.is_defensible as is_defensible
    from (from level where axis_column = 'reference_id') as r
    cross join (from level where axis_column = 'support_id') as s
    cross join (from level where axis_column = 'voxel_volume_id') as v
    cross join (from level where axis_column = 'threshold_rule_id') as t
    cross join budget as b
    cross join (from level where axis_column = 'postprocess_id') as p
    cross join (from level where axis_column = 'lesion_definition_id') as d
    cross join (from level where axis_column = 'hit_criterion_id') as h
    cross join (from level where axis_column = 'aggregation_id') as a
    cross join (from level where axis_column = 'metric_id') as m
),
action as (
    select
        metric_id,
        bool_or(axis_column = 'reference_id') as reference,
        bool_or(axis_column = 'support_id') as support,
        bool_or(axis_column = 'threshold_rule_id') as rule,
        bool_or(axis_column = 'budget_cm3') as budget,
        bool_or(axis_column = 'postprocess_id') as postprocess,
        bool_or(axis_column = 'lesion_definition_id') as definition,
        bool_or(axis_column = 'hit_criterion_id') as criterion,
        bool_or(axis_column = 'aggregation_id') as aggregation
    from metric_axis
    group by metric_id
),
-- a level that does not act counts as the first of its axis: universes that then agree share one cell
acting as (
    select
        c.*,
        case when x.reference then reference_position else 0 end as cell_reference,
        case when x.support then support_position else 0 end as cell_support,
        case
            when (x.budget and rule_uses_budget) or (x.postprocess and postprocess_uses_volume)
                or (x.definition and definition_uses_volume) then volume_position
            else 0
        end as cell_volume,
        case when x.rule then rule_position else 0 end as cell_rule,
        case when x.budget and rule_uses_budget then budget_position else 0 end as cell_budget,
        case when x.postprocess then postprocess_position else 0 end as cell_postprocess,
        case when x.definition then definition_position else 0 end as cell_definition,
        case when x.criterion then criterion_position else 0 end as cell_criterion,
        case when x.aggregation then aggregation_position else 0 end as cell_aggregation
    from combination as c
    join action as x using (metric_id)
)
select
    row_number() over (
        order by
            reference_position, support_position, volume_position, rule_position, budget_position,
            postprocess_position, definition_position, criterion_position, aggregation_position, metric_position
    ) as universe_id,
    reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
    lesion_definition_id, hit_criterion_id, aggregation_id, metric_id,
    is_defensible,
    metric_id = 'dice' and budget_cm3 = protocol.reference_budget_cm3 and threshold_rule_id = 'validation'
        and aggregation_id = 'mean' and reference_id = 'canonical' and support_id = 'brain'
        and voxel_volume_id = 'true' and postprocess_id = 'plain' and lesion_definition_id = 'conn6_floor'
        and hit_criterion_id = 'iou_10' as is_reference,
    dense_rank() over (
        order by
            metric_position, cell_reference, cell_support, cell_volume, cell_rule, cell_budget,
            cell_postprocess, cell_definition, cell_criterion, cell_aggregation
    ) as cell_id
from acting
cross join protocol
