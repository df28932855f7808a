-- One row per universe set, metric (each and `all`), cell and method or baseline that takes part: score and weight.
-- key: universe_set, metric_id, cell_id, method_id
-- columns: score, weight
-- kind: view
with weighted as (
    select 'all' as universe_set, cell_id, metric_id, count(*) as weight
    from universe
    where status = 'ok'
    group by all
    union all
    select 'defensible' as universe_set, cell_id, metric_id, count(*) as weight
    from universe
    where status = 'ok' and is_defensible
    group by all
)
select w.universe_set, unnest([w.metric_id, 'all']) as metric_id, w.cell_id, s.method_id, s.score, w.weight
from weighted as w
join cell_score as s using (cell_id)
join ranked_method as m on m.method_id = s.method_id and m.kind <> 'configuration'
where s.score is not null
