-- One row per universe set, metric (each and `all`), kind of order and order of the methods: its share of universes.
-- key: universe_set, metric_id, order_kind, method_order
-- columns: universe_count, share
with weighted as (
    select
        unnest(case when u.is_defensible then ['all', 'defensible'] else ['all'] end) as universe_set,
        u.metric_id, o.weak_order, o.resolved_order
    from universe as u
    join cell_order as o using (cell_id)
    where u.status = 'ok'
),
long as (
    select universe_set, unnest([metric_id, 'all']) as metric_id, 'weak' as order_kind, weak_order as method_order
    from weighted
    union all
    select universe_set, unnest([metric_id, 'all']), 'resolved', resolved_order
    from weighted
),
counted as (
    select universe_set, metric_id, order_kind, method_order, count(*) as universe_count
    from long
    group by all
)
select
    universe_set, metric_id, order_kind, method_order, universe_count,
    universe_count / sum(universe_count) over (partition by universe_set, metric_id, order_kind) as share
from counted
