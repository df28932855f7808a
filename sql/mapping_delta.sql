-- One row per method with an alternative transform and metric: the same maps under it less under the declared one.
-- key: method_id, metric_id
-- columns: declared_mean?, variant_mean?, mean_difference?, n_subjects, status, reason?
-- kind: view
select method_id, metric_id, declared_mean, variant_mean, mean_difference, n_subjects, status, reason
from variant_effect
where variant_id = 'alternative'
