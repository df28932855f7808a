-- One row per scored universe: Kendall's tau-b of its order with the reference universe's, null where all methods tie.
-- key: universe_id
-- columns: metric_id, is_defensible, kendall_tau_b?, reproduces_reference?
select u.universe_id, u.metric_id, u.is_defensible, a.kendall_tau_b, a.reproduces_reference
from universe as u
join cell_agreement as a using (cell_id)
where u.status = 'ok'
