-- One row per universe set, metric (each and `all`) and term: its part of the sum of squares over universes and methods.
-- key: universe_set, metric_id, term
-- columns: sum_of_squares, share?, share_low?, share_high?, level_count?
select
    t.universe_set, t.metric_id, t.term, t.sum_of_squares,
    t.sum_of_squares / nullif(max(t.sum_of_squares) filter (where t.term = 'total') over whole, 0) as share,
    i.value_low as share_low, i.value_high as share_high,
    t.level_count
from variance_term as t
left join replicate_interval as i
    on i.configuration_set = 'primary' and i.statistic = 'variance_share' and i.universe_set = t.universe_set and i.metric_id = t.metric_id
    and i.item = t.term
where t.variance_design = 'primary'
window whole as (partition by t.universe_set, t.metric_id)
