-- One row per method, budget and ceiling: what a means that uses the reference would gain in mean Dice over the validation
--   threshold. Ceilings, not methods; canonical reference, brain, plain maps, test subjects with a reference.
-- key: method_id, budget_cm3, ceiling_id
-- columns: validation_dice_mean?, dice_mean?, attained_dice_mean?, gain?, gain_low?, gain_high?, n_subjects, n_replicates?,
--   burden_cm3_mean?, within_lesion_coverage?, n_covered, status, reason?
-- stop: (status = 'ok') = (reason is null) | a status without reason; report this defect

-- Every ceiling but subject_optimum keeps the budget in every subject, which the validation threshold does in the mean of the
--   validation cohort only: a gain may be negative. lesion_threshold and component_selection are upper bounds;
--   attained_dice_mean is what is attained for certain. within_lesion_coverage is the mean, over the n_covered subjects with a
--   lesion touched, of the share of the touched lesions' voxels that is predicted.
with ceiling as (
    select unnest(
        ['subject_threshold', 'lesion_threshold', 'component_selection', 'boundary_replacement', 'subject_optimum']
    ) as ceiling_id
),
summary as (
    select
        method_id, budget_cm3, ceiling_id,
        count(*) as subject_count,
        count(dice) as n_subjects,
        favg(validation_dice) filter (where dice is not null) as validation_dice_mean,
        favg(dice) as dice_mean,
        favg(attained_dice) as attained_dice_mean,
        favg(dice - validation_dice) as gain,
        favg(burden_cm3) as burden_cm3_mean,
        favg(within_lesion_coverage) as within_lesion_coverage,
        count(within_lesion_coverage) as n_covered
    from ceiling_subject
    group by all
),
judged as (
    select
        t.method_id, t.budget_cm3, c.ceiling_id, t.status as threshold_status,
        case
            when t.status = 'infeasible' then t.reason
            when s.subject_count is null then 'no test subject has a reference'
            when s.n_subjects = 0 then 'what is predicted of each lesion and component is not measured; ingest the study again'
            when s.n_subjects < s.subject_count then format(
                'not measured for {} of {} subjects; ingest the study again', s.subject_count - s.n_subjects, s.subject_count
            )
            else t.reason
        end as reason
    from threshold_choice as t
    cross join ceiling as c
    left join summary as s using (method_id, budget_cm3, ceiling_id)
    where t.threshold_rule_id = 'validation'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
)
select
    j.method_id, j.budget_cm3, j.ceiling_id,
    s.validation_dice_mean, s.dice_mean, s.attained_dice_mean,
    s.gain, i.gain_low, i.gain_high,
    coalesce(s.n_subjects, 0) as n_subjects, i.n_replicates,
    s.burden_cm3_mean, s.within_lesion_coverage, coalesce(s.n_covered, 0) as n_covered,
    case
        when j.threshold_status = 'infeasible' or coalesce(s.n_subjects, 0) = 0 then 'unavailable'
        when j.reason is not null then 'degraded'
        else 'ok'
    end as status,
    j.reason
from judged as j
left join summary as s using (method_id, budget_cm3, ceiling_id)
left join ceiling_interval as i using (method_id, budget_cm3, ceiling_id)
