-- One row per configuration set and model that takes part: whose maps the hypotheses ask of in the set.
-- key: configuration_set, model_id
-- columns: method_id, model_position
select 'primary' as configuration_set, method_id as model_id, method_id, position as model_position
from ranked_method
where is_ranked and kind = 'method'
union all
select configuration_set, model_id, method_id, model_position
from configuration_member
where configuration_set <> 'primary'
