-- One row per test subject of a cohort without validation subjects: the fold that its threshold is chosen without.
-- key: subject_id
-- columns: fold, fold_count
-- stop: fold < fold_count | a fold beyond the last; report this defect

-- Every subject is a fold up to `crossfit_leave_one_out_limit` subjects; beyond, `crossfit_folds` folds are dealt out in the
--   order of subject_id, one subject each in turn. Empty where a validation subject is included, and for a single subject.
with test_subject as (
    select
        subject_id,
        row_number() over (order by subject_id) - 1 as position,
        count(*) over () as n_subjects
    from cohort_subject
    where is_included and split = 'test'
        and not exists (select 1 from cohort_subject where is_included and split = 'validation')
),
sized as (
    select
        t.*,
        case
            when t.n_subjects <= p.crossfit_leave_one_out_limit then t.n_subjects
            else least(p.crossfit_folds, t.n_subjects)
        end as fold_count
    from test_subject as t
    cross join protocol as p
)
select subject_id, position % fold_count as fold, fold_count
from sized
where n_subjects > 1
