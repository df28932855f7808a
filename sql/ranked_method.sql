-- One row per method, baseline, or other training set of a method: whether it takes part in the marts.
-- key: method_id
-- columns: kind, position, is_ranked, reason?
select
    m.method_id, m.kind, m.position,
    coalesce(g.verdict, '') <> 'failed' as is_ranked,
    case when g.verdict = 'failed' then 'held out by the geometry gate: ' || g.suggestion end as reason
from method as m
left join gate_summary as g using (method_id)
