-- One row per configuration set and metric (each and `all`): the pair of models that flips most, over defensible universes.
-- key: configuration_set, metric_id
-- columns: value, value_low?, value_high?, method_a, method_b

-- method_a and method_b name models. A set whose maps lack a score in a defensible universe has no row (see ledger_set).
with pair as (
    select a.configuration_set, a.model_id as method_a, b.model_id as method_b
    from ledger_member as a
    join ledger_member as b using (configuration_set)
    where a.model_position < b.model_position
),
largest as (
    -- replicate 0 takes every subject once: the share itself
    select s.configuration_set, s.metric_id, s.value, p.method_a, p.method_b
    from configuration_statistic as s
    join pair as p on p.configuration_set = s.configuration_set and s.item = p.method_a || '|' || p.method_b
    where s.statistic = 'flip_share' and s.replicate = 0
    qualify row_number() over (
        partition by s.configuration_set, s.metric_id
        order by s.value desc, p.method_a, p.method_b
    ) = 1
),
found as (
    select 'primary' as configuration_set, metric_id, value, value_low, value_high, method_a, method_b
    from phi_max
    where universe_set = 'defensible'
    union all
    select l.configuration_set, l.metric_id, l.value, i.value_low, i.value_high, l.method_a, l.method_b
    from largest as l
    left join replicate_interval as i
        on i.configuration_set = l.configuration_set and i.universe_set = 'defensible'
        and i.statistic = 'phi_max' and i.metric_id = l.metric_id
)
select s.configuration_set, f.* exclude (configuration_set)
from ledger_set as s
join found as f on f.configuration_set = s.same_as
