-- One row per diagnostic of geometry and method, or pair of methods: its value over the test cohort.
-- key: diagnostic_id, method_id, other_method_id?
-- columns: value?, n_subjects, variant_id?, candidate?, status, reason?, is_warning
-- stop: (status = 'ok') = (reason is null) | a value without status or a state without reason; report this defect
-- warn: not is_warning | the maps may not lie where their transform says: compare it with the candidate named here and
--   with an independent export

-- rank_stability: Spearman correlation of the voxel AUROC of the declared maps and a benign re-export (variant_id).
--   shared_conspicuity: the same of two methods; never a warning. anti_location: share of subjects with AUROC below 0.5.
--   transform_scan: best mean AUROC over the candidates less that of the declared transform. jaccard_bound: the largest
--   excess over the bound (jaccard_excess), 0 at most. rank_stability and transform_scan are measured with --diagnostics.
with entry as (
    select method_id, position
    from ranked_method
    where is_ranked and kind = 'method'
),
auroc as (
    select v.method_id, v.subject_id, v.auroc, e.position
    from voxel_ranking as v
    join entry as e using (method_id)
    join cohort_subject as s on s.subject_id = v.subject_id and s.is_included and s.split = 'test'
    where v.reference_id = 'canonical' and v.support_id = 'brain' and v.auroc is not null
),
available as (
    select e.method_id, count(a.auroc) as n_available
    from entry as e
    left join auroc as a using (method_id)
    group by e.method_id
),
pair as (
    select
        'rank_stability' as diagnostic_id, a.method_id, null as other_method_id,
        a.auroc as first_auroc, v.auroc as second_auroc
    from auroc as a
    join benign_reexport as b using (method_id)
    join variant_ranking as v
        on v.method_id = a.method_id and v.subject_id = a.subject_id and v.variant_id = b.variant_id
    union all
    select 'shared_conspicuity', a.method_id, b.method_id, a.auroc, b.auroc
    from auroc as a
    join auroc as b on b.subject_id = a.subject_id and b.position > a.position
),
-- twice a mid-rank less its mean is a whole number, so the sums are exact
ranked as (
    select
        diagnostic_id, method_id, other_method_id,
        2 * rank() over first_order + count(*) over first_tie - 2 - count(*) over cohort as first_rank,
        2 * rank() over second_order + count(*) over second_tie - 2 - count(*) over cohort as second_rank
    from pair
    window
        cohort as (partition by diagnostic_id, method_id, other_method_id),
        first_order as (partition by diagnostic_id, method_id, other_method_id order by first_auroc),
        second_order as (partition by diagnostic_id, method_id, other_method_id order by second_auroc),
        first_tie as (partition by diagnostic_id, method_id, other_method_id, first_auroc),
        second_tie as (partition by diagnostic_id, method_id, other_method_id, second_auroc)
),
correlation as (
    select
        diagnostic_id, method_id, other_method_id,
        sum(first_rank * second_rank)::double
            / nullif(sqrt(sum(first_rank * first_rank)::double * sum(second_rank * second_rank)::double), 0) as rho,
        count(*) as n_subjects
    from ranked
    group by all
),
scan as (
    select
        method_id,
        max(auroc_mean) - max(auroc_mean) filter (where is_applied) as value,
        arg_max(candidate, (auroc_mean, is_applied, -abs(dz), candidate)) as candidate,
        max(n_subjects) as n_subjects
    from candidate_scan
    group by method_id
),
found as (
    select
        diagnostic_id, method_id, other_method_id, case when n_subjects >= 3 then rho end as value, n_subjects,
        null as candidate
    from correlation
    union all
    select 'anti_location', method_id, null, avg((auroc < 0.5)::int), count(*), null
    from auroc
    group by method_id
    union all
    select 'transform_scan', method_id, null, value, n_subjects, candidate
    from scan
    union all
    select 'jaccard_bound', method_id, null, max(excess), count(*), null
    from jaccard_excess
    group by method_id
),
wanted as (
    select
        unnest(['rank_stability', 'anti_location', 'transform_scan', 'jaccard_bound']) as diagnostic_id,
        method_id, null as other_method_id
    from entry
    union all
    select 'shared_conspicuity', a.method_id, b.method_id
    from entry as a
    join entry as b on b.position > a.position
),
valued as (
    select
        w.diagnostic_id, w.method_id, w.other_method_id, f.value, coalesce(f.n_subjects, 0) as n_subjects, f.candidate,
        case when w.diagnostic_id = 'rank_stability' then b.variant_id end as variant_id,
        least(a.n_available, coalesce(o.n_available, a.n_available)) as n_available
    from wanted as w
    left join found as f
        on f.diagnostic_id = w.diagnostic_id and f.method_id = w.method_id
        and f.other_method_id is not distinct from w.other_method_id
    left join benign_reexport as b on b.method_id = w.method_id
    join available as a on a.method_id = w.method_id
    left join available as o on o.method_id = w.other_method_id
),
judged as (
    select
        v.*,
        case
            when v.value is null and v.n_available = 0 then 'no test subject has an AUROC'
            when v.value is null and v.n_subjects = 0 and v.diagnostic_id in ('rank_stability', 'transform_scan')
                then 'not measured: run it with --diagnostics'
            when v.value is null and v.diagnostic_id = 'jaccard_bound' and v.n_subjects = 0
                then 'no own reference, or no threshold: there is nothing to bound'
            when v.value is null and v.n_subjects < 3
                then format('a correlation of {} subjects says nothing', v.n_subjects)
            when v.value is null then 'all subjects have the same AUROC'
        end as lacking,
        case
            when v.n_subjects < v.n_available
                then format('measured for {} of {} test subjects', v.n_subjects, v.n_available)
        end as partial,
        coalesce(
            case v.diagnostic_id
                when 'rank_stability' then v.value < protocol.rank_stability_floor
                when 'anti_location' then v.value > protocol.anti_location_limit
                when 'transform_scan' then v.value > protocol.transform_scan_margin
                else false
            end,
            false
        ) as is_warning
    from valued as v
    cross join protocol
)
select
    diagnostic_id, method_id, other_method_id, value, n_subjects, variant_id, candidate,
    case when lacking is not null then 'unavailable' when partial is not null then 'degraded' else 'ok' end as status,
    coalesce(lacking, partial) as reason,
    is_warning
from judged
