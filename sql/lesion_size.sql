-- One row per test lesion above the floor: whether it is small.
-- key: subject_id, lesion_id
-- columns: volume_mm3, size_class?, size_limit_mm3?

-- Canonical reference, brain, true voxel volume. Small is below the first tertile of validation lesions; without any of these
-- there are no classes of size.
with above_floor as (
    select s.split, l.subject_id, l.lesion_id, l.volume_mm3
    from lesion as l
    join cohort_subject as s on s.subject_id = l.subject_id and s.is_included
    where l.method_id is null and l.lesion_definition_id = 'conn6_floor'
),
limit_of_small as (
    select quantile_cont(volume_mm3, 1 / 3) as size_limit_mm3
    from above_floor
    where split = 'validation'
)
select
    subject_id, lesion_id, volume_mm3,
    case when volume_mm3 < size_limit_mm3 then 'small' when volume_mm3 >= size_limit_mm3 then 'not_small' end as size_class,
    size_limit_mm3
from above_floor
cross join limit_of_small
where split = 'test'
