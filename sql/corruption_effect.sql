-- One row per method, injected corruption and metric: mean over test subjects under it less that of the declared maps.
-- key: method_id, variant_id, metric_id
-- columns: declared_mean?, variant_mean?, mean_difference?, n_subjects, status, reason?
-- kind: view
select method_id, variant_id, metric_id, declared_mean, variant_mean, mean_difference, n_subjects, status, reason
from variant_effect
where variant_id in (
    'flip_left_right', 'flip_anterior_posterior', 'transpose', 'shift_minus_2', 'shift_plus_2', 'reference_dilated',
    'ids_permuted'
)
