-- One row per split: its subjects, their arrays and reference volumes, and how many references are alike.
-- Every subject of the study counts, also those that the cohort leaves out; volumes are of the references that hold a voxel in
-- the brain. Two references are alike where every voxel is: the same subject, or a file copied by mistake.
-- key: split
-- columns: n_subjects, included_count, empty_reference_count, distinct_reference_count, repeated_reference_count,
--   shape_0_minimum, shape_0_median, shape_0_maximum, shape_1_minimum, shape_1_median, shape_1_maximum,
--   shape_2_minimum, shape_2_median, shape_2_maximum,
--   reference_mm3_minimum?, reference_mm3_q1?, reference_mm3_median?, reference_mm3_q3?, reference_mm3_maximum?
-- warn: repeated_reference_count = 0 | some subjects have the same reference to the voxel: see `from subject` where a
--   reference_sha256 repeats, and remove copies; across splits they would leak
with marked as (
    select
        s.*,
        c.is_included,
        s.reference_voxels + s.reference_outside_voxels = 0 as is_empty,
        count(*) over (partition by s.reference_sha256) > 1 as is_repeated,
        case when s.reference_voxels > 0 then s.reference_mm3 end as held_mm3
    from subject as s
    join cohort_subject as c using (subject_id)
)
select
    split,
    count(*) as n_subjects,
    count(*) filter (is_included) as included_count,
    count(*) filter (is_empty) as empty_reference_count,
    count(distinct reference_sha256) filter (not is_empty) as distinct_reference_count,
    count(*) filter (is_repeated and not is_empty) as repeated_reference_count,
    min(shape_0) as shape_0_minimum, median(shape_0) as shape_0_median, max(shape_0) as shape_0_maximum,
    min(shape_1) as shape_1_minimum, median(shape_1) as shape_1_median, max(shape_1) as shape_1_maximum,
    min(shape_2) as shape_2_minimum, median(shape_2) as shape_2_median, max(shape_2) as shape_2_maximum,
    min(held_mm3) as reference_mm3_minimum,
    quantile_cont(held_mm3, 0.25) as reference_mm3_q1,
    median(held_mm3) as reference_mm3_median,
    quantile_cont(held_mm3, 0.75) as reference_mm3_q3,
    max(held_mm3) as reference_mm3_maximum
from marked
group by split
