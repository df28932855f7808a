-- One row per configuration set (none: all training sets together), universe set, statistic, metric (each and `all`) and
--   pair or term: its percentile interval over replicates.
-- key: configuration_set?, universe_set, statistic, metric_id, item
-- columns: value_low, value_high, n_replicates
with every_statistic as (
    select 'primary' as configuration_set, * from replicate_statistic
    union all by name
    from configuration_statistic
),
ranked as (
    select configuration_set, universe_set, statistic, metric_id, item, list(value order by value) as ordered
    from every_statistic
    where replicate > 0
    group by all
),
-- linear quantiles: DuckDB's own takes no level from a table
placed as (
    select
        ranked.*,
        (len(ordered) - 1) * (1 - interval_level) / 2 as place_low,
        (len(ordered) - 1) * (1 + interval_level) / 2 as place_high
    from ranked
    cross join protocol
)
select
    configuration_set, universe_set, statistic, metric_id, item,
    ordered[floor(place_low)::bigint + 1]
        + (place_low - floor(place_low)) * (ordered[ceil(place_low)::bigint + 1] - ordered[floor(place_low)::bigint + 1])
        as value_low,
    ordered[floor(place_high)::bigint + 1]
        + (place_high - floor(place_high))
        * (ordered[ceil(place_high)::bigint + 1] - ordered[floor(place_high)::bigint + 1]) as value_high,
    len(ordered) as n_replicates
from placed
