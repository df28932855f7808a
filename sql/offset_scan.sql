-- One row per method: the through-plane offset of best mean voxel AUROC, chosen on some test subjects and again on others.
-- key: method_id
-- columns: n_selection, n_replication, n_remaining, selection_dz?, replication_dz?, replication_gain?, remaining_gain?,
--   is_replicated?, status, reason?
-- stop: (status = 'ok') = (reason is null) | a value without status or a state without reason; report this defect
-- warn: not is_replicated | an offset is chosen on both sets and gains on the others: check start[2] of the transform

-- Subjects in order of their ids: the first offset_scan_count choose, as many choose again, the rest measure the gain of
--   the first choice over no offset; half choose and half choose again where there are not as many. An offset is
--   replicated where both choose the same, it is not 0, and it gains on the rest (without a rest, where it is chosen
--   again). Equal means go to the smaller offset, then to the negative one. Empty without diagnostics.
with scanned as (
    select c.method_id, c.subject_id, c.dz, c.auroc
    from candidate_ranking as c
    join cohort_subject as s on s.subject_id = c.subject_id and s.is_included and s.split = 'test'
    join ranked_method as m on m.method_id = c.method_id and m.is_ranked
    where not c.transposed and not c.flip_0 and not c.flip_1 and c.auroc is not null
),
numbered as (
    select *, dense_rank() over (partition by method_id order by subject_id) as place
    from scanned
),
sized as (
    select method_id, max(place) as n, least(any_value(offset_scan_count), ceil(max(place) / 2))::bigint as n_selection
    from numbered
    cross join protocol
    group by method_id
),
dealt as (
    select
        n.method_id, n.dz, n.auroc,
        case
            when n.place <= s.n_selection then 'selection'
            when n.place <= 2 * s.n_selection then 'replication'
            else 'remaining'
        end as deal
    from numbered as n
    join sized as s using (method_id)
),
averaged as (
    select method_id, deal, dz, favg(auroc) as auroc_mean, count(*) as n_subjects
    from dealt
    group by all
),
best as (
    select method_id, deal, dz, n_subjects
    from averaged
    qualify row_number() over (partition by method_id, deal order by auroc_mean desc, abs(dz), dz) = 1
),
chosen as (
    select
        method_id,
        max(dz) filter (where deal = 'selection') as selection_dz,
        max(dz) filter (where deal = 'replication') as replication_dz,
        coalesce(max(n_subjects) filter (where deal = 'selection'), 0) as n_selection,
        coalesce(max(n_subjects) filter (where deal = 'replication'), 0) as n_replication,
        coalesce(max(n_subjects) filter (where deal = 'remaining'), 0) as n_remaining
    from best
    group by method_id
),
gained as (
    select
        c.method_id,
        max(a.auroc_mean - zero.auroc_mean) filter (where a.deal = 'replication') as replication_gain,
        max(a.auroc_mean - zero.auroc_mean) filter (where a.deal = 'remaining') as remaining_gain
    from chosen as c
    join averaged as a on a.method_id = c.method_id and a.dz = c.selection_dz
    join averaged as zero on zero.method_id = a.method_id and zero.deal = a.deal and zero.dz = 0
    group by c.method_id
)
select
    c.method_id, c.n_selection, c.n_replication, c.n_remaining, c.selection_dz, c.replication_dz,
    g.replication_gain, g.remaining_gain,
    c.selection_dz = c.replication_dz and c.selection_dz <> 0
        and coalesce(g.remaining_gain, g.replication_gain) > 0 as is_replicated,
    case
        when c.n_replication = 0 then 'unavailable'
        when c.n_replication < protocol.offset_scan_count or c.n_remaining = 0 then 'degraded'
        else 'ok'
    end as status,
    case
        when c.n_replication = 0 then 'one test subject: an offset cannot be chosen again'
        when c.n_replication < protocol.offset_scan_count
            then format('chosen on {} subjects and again on {}', c.n_selection, c.n_replication)
        when c.n_remaining = 0 then 'no subject is left to measure the gain on'
    end as reason
from chosen as c
join gained as g using (method_id)
cross join protocol
