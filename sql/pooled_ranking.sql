-- One row per method, reference and support: AUROC and average precision pooled over the test cohort, from histograms.
-- key: method_id, reference_id, support_id
-- columns: n_subjects, positive_voxels, negative_voxels, auroc?, auroc_error_bound?, auroc_within?, auroc_between?,
--   average_precision?
with ranked as (
    select
        method_id, reference_id, support_id, positive_voxels as positive, negative_voxels as negative,
        sum(positive_voxels) over from_above as positive_above,
        sum(negative_voxels) over from_above as negative_above,
        sum(negative_voxels) over (partition by method_id, reference_id, support_id) as negative_total
    from pooled_histogram
    where split = 'test'
    window from_above as (partition by method_id, reference_id, support_id order by bin desc rows unbounded preceding)
),
subjects as (
    select count(*) as n_subjects from cohort_subject where is_included and split = 'test'
),
totals as (
    select
        method_id, reference_id, support_id,
        sum(positive) as positive_total,
        any_value(negative_total) as negative_total,
        -- a positive outranks the negatives of lower bins and half of those of its own: twice that, in whole numbers
        sum(positive::hugeint * (2 * (negative_total - negative_above) + negative)) as twice_outranked,
        sum(positive::hugeint * negative) as undecided,
        fsum(positive::double * (positive_above / (positive_above + negative_above))) as precision_sum
    from ranked
    group by all
),
-- comparisons of voxels of one subject, by its exact AUROC; the rest compares voxels of different subjects
within_subjects as (
    select
        r.method_id, r.reference_id, r.support_id,
        fsum(r.positive_voxels::double * r.negative_voxels * r.auroc) as outranked
    from voxel_ranking as r
    join cohort_subject as s on s.subject_id = r.subject_id and s.is_included and s.split = 'test'
    group by all
)
select
    method_id, reference_id, support_id, n_subjects,
    positive_total::bigint as positive_voxels,
    negative_total::bigint as negative_voxels,
    twice_outranked::double / nullif(2 * positive_total * negative_total, 0)::double as auroc,
    undecided::double / nullif(2 * positive_total * negative_total, 0)::double as auroc_error_bound,
    outranked / nullif(positive_total * negative_total, 0)::double as auroc_within,
    (twice_outranked::double / 2 - outranked) / nullif(positive_total * negative_total, 0)::double as auroc_between,
    precision_sum / nullif(positive_total, 0)::double as average_precision
from totals
join within_subjects using (method_id, reference_id, support_id)
cross join subjects
