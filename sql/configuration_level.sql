-- One row per training set: whether it is a level of the eleventh axis, which every model must have, scored throughout.
-- key: training_set
-- columns: position, model_count, status, reason?
with model as (
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
hole as (
    -- universes that the primary maps score and these do not
    select o.training_set, o.method_id, o.model_position, count(*) as universe_count
    from owned as o
    join cell_score as s on s.method_id = o.method_id and s.score is null
    join universe as u on u.cell_id = s.cell_id and u.status = 'ok'
    group by all
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
holed as (
    select
        training_set,
        string_agg(
            format('{} has no score in {:d} universes that the primary maps score', method_id, universe_count), '; '
            order by model_position
        ) as holes
    from hole
    group by training_set
)
select
    l.training_set, l.position,
    coalesce(c.model_count, 0) as model_count,
    case when coalesce(c.absence, h.holes) is null and c.model_count > 0 then 'ok' else 'unavailable' end as status,
    case
        when c.model_count is null then 'no model takes part'
        else coalesce(c.absence, h.holes)
    end as reason
from level as l
left join counted as c using (training_set)
left join holed as h using (training_set)
