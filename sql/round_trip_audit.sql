-- One row per method: what its grid alone does to the canonical reference, there and back by the nearest voxel.
-- key: method_id
-- columns: component_count, round_trip_component_count, lesion_count, round_trip_lesion_count, volume_ratio?,
--   equal_fraction?, n_subjects

-- Test cohort, brain; components are 6-connected, lesions those of at least lesion_floor_mm3. equal_fraction is the share
--   of subjects with an own reference in which the round trip is the own reference, voxel by voxel.
with entry as (
    select s.subject_id, m.method_id
    from cohort_subject as s
    cross join ranked_method as m
    where s.is_included and s.split = 'test' and m.is_ranked and m.kind = 'method'
),
counted as (
    select
        e.method_id,
        count_if(l.reference_id = 'canonical' and l.lesion_definition_id = 'conn6_all') as component_count,
        count_if(l.reference_id = 'round_trip' and l.lesion_definition_id = 'conn6_all') as round_trip_component_count,
        count_if(l.reference_id = 'canonical' and l.lesion_definition_id = 'conn6_floor') as lesion_count,
        count_if(l.reference_id = 'round_trip' and l.lesion_definition_id = 'conn6_floor') as round_trip_lesion_count
    from entry as e
    left join lesion as l
        on l.subject_id = e.subject_id and l.support_id = 'brain'
        and coalesce(l.method_id, e.method_id) = e.method_id
    group by e.method_id
),
volume as (
    select
        e.method_id,
        sum(v.positive_voxels) filter (where v.reference_id = 'round_trip')
            / nullif(sum(v.positive_voxels) filter (where v.reference_id = 'canonical'), 0) as volume_ratio,
        count(distinct e.subject_id) as n_subjects
    from entry as e
    left join voxel_ranking as v
        on v.method_id = e.method_id and v.subject_id = e.subject_id and v.support_id = 'brain'
    group by e.method_id
),
returned as (
    select e.method_id, avg((o.round_trip_dice = 1)::int) as equal_fraction
    from entry as e
    join gate_overlap as o using (method_id, subject_id)
    where o.round_trip_dice is not null
    group by e.method_id
)
select
    c.method_id, c.component_count, c.round_trip_component_count, c.lesion_count, c.round_trip_lesion_count,
    v.volume_ratio, r.equal_fraction, v.n_subjects
from counted as c
join volume as v using (method_id)
left join returned as r using (method_id)
