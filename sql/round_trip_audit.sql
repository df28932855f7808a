-- One row per method and lesion definition: what a trip to the method's grid and back does to the canonical reference.
-- Sums over the test cohort, of lesions and volume inside the brain: of the whole reference, of its part in the field of view,
-- and of that part after the trip. Where the trip makes more components or less volume, the grid does it, not the method.
-- key: method_id, lesion_definition_id
-- columns: n_subjects, canonical_lesion_count, in_view_lesion_count, round_trip_lesion_count, canonical_mm3, in_view_mm3,
--   round_trip_mm3, round_trip_volume_ratio?, n_own, own_equal_count
-- stop: round(in_view_mm3 - canonical_mm3, 3) <= 0 | the part in view is larger than the whole; measure the part again
with pair as (
    select m.method_id, s.subject_id
    from ranked_method as m
    cross join cohort_subject as s
    where m.kind <> 'baseline' and m.is_ranked and s.is_included and s.split = 'test'
),
definition as (
    select distinct lesion_definition_id from lesion
),
own as (
    select
        p.method_id,
        count(*) as n_subjects,
        count(o.subject_id) as n_own,
        count(*) filter (coalesce(o.round_trip_dice = 1, o.own_in_view_voxels = 0)) as own_equal_count
    from pair as p
    left join gate_overlap as o using (method_id, subject_id)
    group by p.method_id
),
stage as (
    select p.method_id, l.lesion_definition_id, 'canonical' as stage, l.volume_mm3
    from pair as p
    join lesion as l using (subject_id)
    where l.method_id is null and l.reference_id = 'canonical' and l.support_id = 'brain'
    union all
    select method_id, l.lesion_definition_id, 'in_view' as stage, l.volume_mm3
    from pair
    join lesion as l using (method_id, subject_id)
    where l.reference_id = 'canonical' and l.support_id = 'brain_in_view'
    union all
    select method_id, l.lesion_definition_id, 'round_trip' as stage, l.volume_mm3
    from pair
    join lesion as l using (method_id, subject_id)
    where l.reference_id = 'round_trip' and l.support_id = 'brain'
),
summed as (
    select
        method_id, lesion_definition_id,
        count(*) filter (stage = 'canonical') as canonical_lesion_count,
        count(*) filter (stage = 'in_view') as in_view_lesion_count,
        count(*) filter (stage = 'round_trip') as round_trip_lesion_count,
        coalesce(fsum(volume_mm3) filter (stage = 'canonical'), 0) as canonical_mm3,
        coalesce(fsum(volume_mm3) filter (stage = 'in_view'), 0) as in_view_mm3,
        coalesce(fsum(volume_mm3) filter (stage = 'round_trip'), 0) as round_trip_mm3
    from stage
    group by method_id, lesion_definition_id
)
select
    own.method_id, d.lesion_definition_id, own.n_subjects,
    coalesce(s.canonical_lesion_count, 0) as canonical_lesion_count,
    coalesce(s.in_view_lesion_count, 0) as in_view_lesion_count,
    coalesce(s.round_trip_lesion_count, 0) as round_trip_lesion_count,
    coalesce(s.canonical_mm3, 0) as canonical_mm3,
    coalesce(s.in_view_mm3, 0) as in_view_mm3,
    coalesce(s.round_trip_mm3, 0) as round_trip_mm3,
    s.round_trip_mm3 / nullif(s.canonical_mm3, 0) as round_trip_volume_ratio,
    own.n_own, own.own_equal_count
from own
cross join definition as d
left join summed as s on s.method_id = own.method_id and s.lesion_definition_id = d.lesion_definition_id
