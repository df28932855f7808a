-- One row per scored universe and method.
-- key: universe_id, method_id
-- columns: metric_id, is_defensible, score, n_subjects
-- stop: score is not null | a universe that kept its place has no score for some method; report this defect
-- kind: view
select u.universe_id, s.method_id, u.metric_id, u.is_defensible, s.score, s.n_subjects
from universe as u
join cell_score as s using (cell_id)
where u.status = 'ok' and s.score is not null
