-- One row per distinct cell: the methods in order of score, weak (ties as =) and resolved (ties by declared order).
-- key: cell_id
-- columns: metric_id, weak_order, resolved_order
with scored as (
    select s.cell_id, s.metric_id, s.method_id, s.score, m.position
    from cell_score as s
    join ranked_method as m on m.method_id = s.method_id and m.kind = 'method'
    where s.score is not null
),
placed as (
    select
        *,
        lag(score) over (partition by cell_id order by score desc, position) as score_above
    from scored
),
tied as (
    select
        placed.*,
        coalesce(score_above - score < protocol.tie_tolerance, false) as is_tied,
        sum((coalesce(score_above - score < protocol.tie_tolerance, false) = false)::int) over (
            partition by cell_id order by score desc, position
        ) as tie_group
    from placed
    cross join protocol
),
ordered as (
    select
        *,
        row_number() over (partition by cell_id order by tie_group, position) as place,
        row_number() over (partition by cell_id, tie_group order by position) as place_in_group
    from tied
)
select
    cell_id, metric_id,
    string_agg(
        case when place = 1 then '' when place_in_group > 1 then '=' else '>' end || method_id, '' order by place
    ) as weak_order,
    string_agg(method_id, '>' order by place) as resolved_order
from ordered
group by cell_id, metric_id
