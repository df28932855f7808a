-- One row per distinct cell: Kendall's tau-b of its order with the reference universe's, null where all methods tie.
-- key: cell_id
-- columns: kendall_tau_b?, reproduces_reference?
with scored as (
    select s.cell_id, s.method_id, s.score, m.position
    from cell_score as s
    join ranked_method as m on m.method_id = s.method_id and m.kind = 'method'
    where s.score is not null
),
pair as (
    select
        a.cell_id, a.method_id as method_a, b.method_id as method_b,
        case when abs(a.score - b.score) < protocol.tie_tolerance then 0 else sign(a.score - b.score) end as direction
    from scored as a
    join scored as b on b.cell_id = a.cell_id and a.position < b.position
    cross join protocol
),
reference_pair as (
    select p.method_a, p.method_b, p.direction
    from pair as p
    join universe as u on u.cell_id = p.cell_id and u.is_reference and u.status = 'ok'
),
counted as (
    select
        p.cell_id,
        sum(p.direction::int * r.direction::int) as concordance,
        count(*) filter (p.direction <> 0) as untied,
        count(*) filter (r.direction <> 0) as reference_untied
    from pair as p
    join reference_pair as r using (method_a, method_b)
    group by p.cell_id
)
select
    cell_id,
    concordance / nullif(sqrt(untied::double * reference_untied), 0) as kendall_tau_b,
    case when untied > 0 then concordance = untied and concordance = reference_untied end as reproduces_reference
from counted
