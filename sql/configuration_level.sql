-- One row per universe set and training set: whether it is a level of the eleventh axis there, or why not.
-- key: universe_set, training_set
-- columns: position, model_count, status, reason?
with model as (
    -- a level is balanced: every model has its maps, with a score in every universe that the primary maps score
    select model_id, model_position
    from configuration
    where is_primary and is_ranked
),
level as (
    select training_set, row_number() over (order by min(position)) - 1 as position
    from configuration
    where training_set is not null
    group by training_set
),
owned as (
    select l.training_set, m.model_id, m.model_position, c.method_id
    from level as l
    cross join model as m
    left join configuration as c
        on c.training_set = l.training_set and c.model_id = m.model_id and c.is_ranked
),
counted as (
    select
        training_set,
        count(method_id) as model_count,
        'no ranked maps of ' || string_agg(case when method_id is null then model_id end, ', ' order by model_position)
            as absence
    from owned
    group by training_set
),
missing_cell as (
    select o.training_set, o.method_id, o.model_position, s.cell_id
    from owned as o
    join cell_score as s on s.method_id = o.method_id and s.score is null
),
hole as (
    select
        training_set, method_id, model_position,
        unnest(case when u.is_defensible then ['all', 'defensible'] else ['all'] end) as universe_set
    from missing_cell
    join universe as u using (cell_id)
    where u.status = 'ok'
),
holed as (
    select
        universe_set, training_set,
        string_agg(
            format('{} has no score in {:d} universes that the primary maps score', method_id, universe_count), '; '
            order by model_position
        ) as holes
    from (select universe_set, training_set, method_id, model_position, count(*) as universe_count from hole group by all)
    group by universe_set, training_set
)
select
    x.universe_set, l.training_set, l.position,
    coalesce(c.model_count, 0) as model_count,
    case
        when c.model_count > 0 and coalesce(c.absence, h.holes) is null then 'ok' else 'unavailable'
    end as status,
    case when c.model_count is null then 'no model takes part' else coalesce(c.absence, h.holes) end as reason
from level as l
cross join (values ('all'), ('defensible')) as x(universe_set)
left join counted as c using (training_set)
left join holed as h using (universe_set, training_set)
