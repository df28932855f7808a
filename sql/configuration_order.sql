-- One row per configuration set, universe set and metric (each and `all`): in which share of universes the models are in
--   another order than with their primary maps; ties count as a place of the order.
-- key: configuration_set, universe_set, metric_id
-- columns: universe_count, differing_count, share?, unscored_count, status, reason?
with scored as (
    select m.configuration_set, m.model_id, m.model_position, s.cell_id, s.score
    from configuration_member as m
    join cell_score as s using (method_id)
),
pair as (
    select
        a.configuration_set, a.cell_id, a.model_id as method_a, b.model_id as method_b,
        case when abs(a.score - b.score) < protocol.tie_tolerance then 0 else sign(a.score - b.score) end as direction
    from scored as a
    join scored as b using (configuration_set, cell_id)
    cross join protocol
    where a.model_position < b.model_position
),
compared as (
    select
        p.configuration_set, p.cell_id,
        bool_or(p.direction <> r.direction) as differs,
        bool_or(p.direction is null) as is_unscored
    from pair as p
    join pair as r using (cell_id, method_a, method_b)
    where p.configuration_set <> 'primary' and r.configuration_set = 'primary'
    group by all
),
standing as (
    select universe_set, cell_id, metric_id, count(*) as weight
    from (
        select *, unnest(case when is_defensible then ['all', 'defensible'] else ['all'] end) as universe_set
        from universe
        where status = 'ok'
    )
    group by all
),
counted as (
    select
        c.configuration_set, s.universe_set, unnest([s.metric_id, 'all']) as metric_id,
        s.weight, c.differs, c.is_unscored
    from standing as s
    join compared as c using (cell_id)
),
summed as (
    select
        configuration_set, universe_set, metric_id,
        coalesce(sum(weight) filter (not is_unscored), 0)::bigint as universe_count,
        coalesce(sum(weight) filter (not is_unscored and differs), 0)::bigint as differing_count,
        coalesce(sum(weight) filter (is_unscored), 0)::bigint as unscored_count
    from counted
    group by all
)
select
    configuration_set, universe_set, metric_id, universe_count, differing_count,
    differing_count / nullif(universe_count, 0) as share,
    unscored_count,
    case when unscored_count = 0 then 'ok' when universe_count > 0 then 'degraded' else 'unavailable' end as status,
    case
        when unscored_count > 0
            then format('{:d} universes are left out: some model of the set has no score there', unscored_count)
    end as reason
from summed
