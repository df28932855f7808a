-- One row per configuration set and model: whose maps stand for the model in the set.
-- key: configuration_set, model_id
-- columns: method_id, training_set?, model_position
with ranked as (
    -- a selected set takes the first criterion that chooses for every model with several training sets; the others keep
    -- their only maps
    select method_id, model_id, training_set, is_primary, model_position
    from configuration
    where is_ranked
),
model as (
    select model_id, method_id, training_set, model_position
    from ranked
    where is_primary
),
common as (
    select distinct training_set
    from configuration_level
    where model_count = (select count(*) from model)
),
first_rule as (
    select split, min_by(selection_rule_id, position) as selection_rule_id
    from (
        select split, selection_rule_id, position
        from selection
        group by all
        having count(*) = count(method_id)
    )
    group by split
)
select 'primary' as configuration_set, model_id, method_id, training_set, model_position
from model
union all
select 'all ' || r.training_set, r.model_id, r.method_id, r.training_set, r.model_position
from ranked as r
join common using (training_set)
union all
select
    f.split || '_selected', m.model_id,
    coalesce(s.method_id, m.method_id), coalesce(s.training_set, m.training_set), m.model_position
from first_rule as f
cross join model as m
left join selection as s on s.selection_rule_id = f.selection_rule_id and s.model_id = m.model_id
