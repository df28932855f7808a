-- One row per method, variant and metric: mean over test subjects under the variant less the mean of the declared maps.
-- key: method_id, variant_id, metric_id
-- columns: declared_mean?, variant_mean?, mean_difference?, n_subjects, status, reason?
-- stop: (status = 'ok') = (reason is null) | a value without status or a state without reason; report this defect

-- Paired: over the subjects where both are defined. ids_permuted is not measured: it is what to expect where the maps of
--   a random permuted_id_share of the subjects, at least two, are exchanged. Empty without diagnostics.
with pair as (
    select v.method_id, v.variant_id, v.metric_id, v.subject_id, d.value as declared_value, v.value as variant_value
    from variant_metric as v
    join variant_metric as d using (method_id, subject_id, metric_id)
    where d.variant_id = 'declared' and v.variant_id <> 'declared'
),
measured as (
    select
        method_id, variant_id, metric_id,
        favg(declared_value) filter (where variant_value is not null) as declared_mean,
        favg(variant_value) filter (where declared_value is not null) as variant_mean,
        count(declared_value + variant_value) as n_subjects,
        count(*) as n_measured
    from pair
    group by all
),
declared as (
    select method_id, metric_id, count(value) as n_declared
    from variant_metric
    where variant_id = 'declared'
    group by all
),
expected as (
    select
        method_id, 'ids_permuted' as variant_id, metric_id, declared_mean,
        declared_mean + (variant_mean - declared_mean)
            * least(greatest(2, round(protocol.permuted_id_share * n_subjects)), n_subjects) / n_subjects as variant_mean,
        n_subjects
    from measured
    cross join protocol
    where variant_id = 'exchanged' and n_subjects > 0
),
together as (
    select method_id, variant_id, metric_id, declared_mean, variant_mean, n_subjects
    from measured
    union all
    select method_id, variant_id, metric_id, declared_mean, variant_mean, n_subjects
    from expected
)
select
    t.method_id, t.variant_id, t.metric_id, t.declared_mean, t.variant_mean,
    t.variant_mean - t.declared_mean as mean_difference,
    t.n_subjects,
    case
        when t.n_subjects = 0 then 'unavailable'
        when t.n_subjects < d.n_declared then 'degraded'
        else 'ok'
    end as status,
    case
        when t.n_subjects = 0 and d.n_declared = 0 then 'no test subject has a value of the declared maps'
        when t.n_subjects = 0 then 'no test subject has a value under both'
        when t.n_subjects < d.n_declared then format('measured for {} of {} test subjects', t.n_subjects, d.n_declared)
    end as reason
from together as t
join declared as d using (method_id, metric_id)
