-- One row per model, training set and metric: its mean over test subjects in the reference universe's other levels.
-- key: model_id, training_set?, metric_id
-- columns: method_id, is_primary, score?, n_subjects, status, reason?
with reference_cell as (
    select u.metric_id, u.cell_id
    from universe_grid as u
    join universe_grid as r
        on r.is_reference
        and r.reference_id = u.reference_id and r.support_id = u.support_id
        and r.voxel_volume_id = u.voxel_volume_id and r.threshold_rule_id = u.threshold_rule_id
        and r.budget_cm3 = u.budget_cm3 and r.postprocess_id = u.postprocess_id
        and r.lesion_definition_id = u.lesion_definition_id and r.hit_criterion_id = u.hit_criterion_id
        and r.aggregation_id = u.aggregation_id
),
threshold as (
    select t.method_id, t.status, t.reason
    from threshold_choice as t
    join protocol as p on p.reference_budget_cm3 = t.budget_cm3
    where t.threshold_rule_id = 'validation' and t.status <> 'ok'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
)
select
    c.model_id, c.training_set, r.metric_id, c.method_id, c.is_primary,
    s.score,
    coalesce(s.n_subjects, 0) as n_subjects,
    -- a score at cross-fitted thresholds stands, and says so
    case
        when s.score is null then 'unavailable'
        when r.metric_id in ('dice', 'lesion_sensitivity') and t.status = 'degraded' then 'degraded'
        else 'ok'
    end as status,
    case
        when s.score is not null and r.metric_id in ('dice', 'lesion_sensitivity') and t.status = 'degraded' then t.reason
        when s.score is not null then null
        when not c.is_ranked then coalesce(c.reason, 'held out')
        when r.metric_id in ('dice', 'lesion_sensitivity') and t.status = 'infeasible' then t.reason
        else 'no test subject has a value'
    end as reason
from configuration as c
cross join reference_cell as r
left join cell_score as s on s.method_id = c.method_id and s.cell_id = r.cell_id
left join threshold as t on t.method_id = c.method_id
