-- One row per configuration set that the hypotheses are judged in: its place, the first set of the same maps, and whether
--   these have a score in every defensible universe.
-- key: configuration_set
-- columns: position, same_as, status, reason?
with common as (
    select distinct 'all ' || training_set as configuration_set, position as level_position
    from configuration_level
),
listed as (
    select configuration_set from ledger_member union select 'primary'
),
placed as (
    -- the primary maps, then those of each common training set in its order, then as selected on validation, then on test
    select
        listed.configuration_set,
        row_number() over (
            order by
                listed.configuration_set <> 'primary', common.level_position nulls last, listed.configuration_set desc
        ) - 1 as position
    from listed
    left join common using (configuration_set)
),
described as (
    select configuration_set, list(method_id order by model_position) as maps
    from ledger_member
    group by configuration_set
),
hole as (
    select m.configuration_set, m.method_id, m.model_position, count(*) as universe_count
    from ledger_member as m
    join cell_score as s on s.method_id = m.method_id and s.score is null
    join universe as u on u.cell_id = s.cell_id and u.status = 'ok' and u.is_defensible
    group by all
),
holed as (
    select
        configuration_set,
        string_agg(
            format('{} has no score in {:d} universes that the primary maps score', method_id, universe_count), '; '
            order by model_position
        ) as reason
    from hole
    group by configuration_set
)
select
    p.configuration_set, p.position,
    first_value(p.configuration_set) over (partition by d.maps order by p.position) as same_as,
    case when h.reason is null then 'ok' else 'unavailable' end as status,
    h.reason
from placed as p
left join described as d using (configuration_set)
left join holed as h using (configuration_set)
