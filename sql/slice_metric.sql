-- One row per method, slice metric, support, reference and aggregation over the test cohort.
-- key: method_id, metric_id, support_id, reference_id, aggregation_id
-- columns: value?, n_subjects
with per_subject as (
    select
        r.method_id, r.reference_id, r.support_id, r.subject_id, r.auroc,
        1 - r.placement_sum / nullif(r.matched_count, 0) as aroc,
        r.placement_sum, r.matched_count
    from slice_ranking as r
    join cohort_subject as s on s.subject_id = r.subject_id and s.is_included and s.split = 'test'
    join ranked_method as m on m.method_id = r.method_id and m.is_ranked
),
long as (
    select method_id, reference_id, support_id, 'slice_auroc' as metric_id, auroc as value
    from per_subject
    union all
    select method_id, reference_id, support_id, 'slice_aroc' as metric_id, aroc as value
    from per_subject
),
-- all slices of the cohort in one ranking; ties count half
pooled_slice as (
    select
        s.method_id, s.support_id, x.reference_id, s.subject_id, s.score_max,
        case x.reference_id
            when 'canonical' then s.reference_voxels_canonical
            when 'own_mapped' then s.reference_voxels_own_mapped
            when 'round_trip' then s.reference_voxels_round_trip
        end > 0 as is_positive
    from slice_score as s
    join cohort_subject as c on c.subject_id = s.subject_id and c.is_included and c.split = 'test'
    join ranked_method as m on m.method_id = s.method_id and m.is_ranked
    cross join (select level_id as reference_id from axis_level where axis_column = 'reference_id') as x
),
tied as (
    select
        method_id, support_id, reference_id, score_max,
        count(*) filter (is_positive) as positive,
        count(*) filter (not is_positive) as negative
    from pooled_slice
    where is_positive is not null
    group by all
),
ranked as (
    select
        *,
        sum(negative) over (
            partition by method_id, support_id, reference_id order by score_max rows unbounded preceding
        ) - negative as negative_below
    from tied
),
pooled as (
    select
        method_id, support_id, reference_id,
        sum(positive * (2 * negative_below + negative))::double
            / nullif(2 * sum(positive) * sum(negative), 0)::double as auroc
    from ranked
    group by all
),
subjects as (
    select method_id, reference_id, support_id, count(*) as n_subjects
    from per_subject
    group by all
)
select
    method_id, metric_id, support_id, reference_id, 'mean' as aggregation_id,
    favg(value) as value, count(value) as n_subjects
from long
group by all
union all
select
    method_id, metric_id, support_id, reference_id, 'median' as aggregation_id,
    median(value) as value, count(value) as n_subjects
from long
group by all
union all
select p.method_id, 'slice_auroc', p.support_id, p.reference_id, 'pooled', p.auroc, s.n_subjects
from pooled as p
join subjects as s using (method_id, reference_id, support_id)
union all
select
    method_id, 'slice_aroc', support_id, reference_id, 'pooled',
    1 - fsum(placement_sum) / nullif(sum(matched_count), 0), count(*) filter (matched_count > 0)
from per_subject
group by all
