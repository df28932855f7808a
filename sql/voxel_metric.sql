-- One row per method, voxel metric, support, reference and aggregation over the test cohort.
-- key: method_id, metric_id, support_id, reference_id, aggregation_id
-- columns: value?, n_subjects, error_bound?
with per_subject as (
    select r.method_id, r.reference_id, r.support_id, r.subject_id, r.auroc, r.average_precision
    from voxel_ranking as r
    join cohort_subject as s on s.subject_id = r.subject_id and s.is_included and s.split = 'test'
    join ranked_method as m on m.method_id = r.method_id and m.is_ranked
),
long as (
    select method_id, reference_id, support_id, 'voxel_auroc' as metric_id, auroc as value
    from per_subject
    union all
    select method_id, reference_id, support_id, 'voxel_ap' as metric_id, average_precision as value
    from per_subject
)
select
    method_id, metric_id, support_id, reference_id, 'mean' as aggregation_id,
    favg(value) as value, count(value) as n_subjects, null as error_bound
from long
group by all
union all
select
    method_id, metric_id, support_id, reference_id, 'median' as aggregation_id,
    median(value) as value, count(value) as n_subjects, null as error_bound
from long
group by all
union all
select
    method_id, 'voxel_auroc' as metric_id, support_id, reference_id, 'pooled' as aggregation_id,
    auroc as value, n_subjects, auroc_error_bound as error_bound
from pooled_ranking
union all
select
    method_id, 'voxel_ap' as metric_id, support_id, reference_id, 'pooled' as aggregation_id,
    average_precision as value, n_subjects, null as error_bound
from pooled_ranking
