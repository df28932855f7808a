-- One row per method, spatial control and metric: mean over test subjects under it less that of the declared maps.
-- key: method_id, variant_id, metric_id
-- columns: declared_mean?, variant_mean?, mean_difference?, n_subjects, status, reason?
-- kind: view

-- Through-plane shifts of the map, its slices permuted within the subject, and the map of the next subject.
select method_id, variant_id, metric_id, declared_mean, variant_mean, mean_difference, n_subjects, status, reason
from variant_effect
where variant_id in (
    'shift_minus_2', 'shift_plus_2', 'shift_minus_5', 'shift_plus_5', 'shift_minus_10', 'shift_plus_10',
    'slices_permuted', 'exchanged'
)
