-- One row per universe set and metric (each and `all`): the pair of methods that flips most.
-- key: universe_set, metric_id
-- columns: value, value_low?, value_high?, method_a, method_b
with largest as (
    select universe_set, metric_id, flip_share as value, method_a, method_b
    from flip_share
    where not is_baseline_pair
    qualify row_number() over (
        partition by universe_set, metric_id
        order by flip_share desc, method_a, method_b
    ) = 1
)
-- the interval is of the maximum over pairs, taken anew in every replicate
select l.universe_set, l.metric_id, l.value, i.value_low, i.value_high, l.method_a, l.method_b
from largest as l
left join replicate_interval as i
    on i.configuration_set = 'primary' and i.statistic = 'phi_max' and i.universe_set = l.universe_set and i.metric_id = l.metric_id
