-- One row per method, reference, support, voxel volume, threshold rule and budget: the threshold, or why there is none.
-- key: method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3
-- columns: level?, threshold?, status, reason?
-- stop: (status = 'ok') = (reason is null) | a threshold without status or a state without reason; report this defect

-- Without validation subjects the validation rule is cross-fitted (crossfit_threshold): subjects read the levels of their
--   folds, which stand in subject_threshold, and the rule is `degraded` with a reason that begins with `crossfit`.
with series as (
    select distinct method_id, reference_id, support_id, voxel_volume_id
    from cohort_curve
),
wanted as (
    select s.*, r.threshold_rule_id, r.rule_kind, r.allowed_exceedances, r.reason as rule_reason, b.budget_cm3
    from series as s
    cross join calibration_rule as r
    cross join budget as b
),
plain_curve as (
    select * from cohort_curve where postprocess_id = 'plain'
),
-- among the levels whose mean validation burden keeps the budget, those that hit nearly as many lesions as the best of
-- them; of these the highest mean validation Dice, ties to the larger level
validation_hits as (
    select
        c.method_id, c.reference_id, c.support_id, c.voxel_volume_id, c.level,
        sum(c.hit_iou_10) as hits,
        greatest(1, floor(any_value(p.guard_share) * sum(c.lesion_count))) as tolerated
    from lesion_curve as c
    join cohort_subject as s on s.subject_id = c.subject_id and s.is_included and s.split = 'validation'
    cross join protocol as p
    where c.postprocess_id = 'plain' and c.lesion_definition_id = 'conn6_floor'
    group by all
),
feasible as (
    select
        c.method_id, c.reference_id, c.support_id, c.voxel_volume_id, b.budget_cm3, c.level, c.dice_mean,
        h.hits >= max(h.hits) over (
            partition by c.method_id, c.reference_id, c.support_id, c.voxel_volume_id, b.budget_cm3
        ) - h.tolerated as is_guarded
    from plain_curve as c
    cross join budget as b
    join validation_hits as h using (method_id, reference_id, support_id, voxel_volume_id, level)
    where c.split = 'validation' and c.burden_cm3_mean <= b.budget_cm3
),
by_validation as (
    select method_id, reference_id, support_id, voxel_volume_id, budget_cm3, level
    from feasible
    where is_guarded and dice_mean is not null
    qualify row_number() over (
        partition by method_id, reference_id, support_id, voxel_volume_id, budget_cm3
        order by dice_mean desc, level desc
    ) = 1
),
-- smallest level at which no more validation subjects exceed the budget than the rule allows
by_calibration as (
    select
        e.method_id, e.reference_id, e.support_id, e.voxel_volume_id, r.threshold_rule_id, e.budget_cm3,
        min(e.level) as level
    from exceedance_curve as e
    join calibration_rule as r
        on case
            when r.rule_kind in ('crc', 'rcps') then e.burden_exceedance_count <= r.allowed_exceedances
            when r.rule_kind = 'crc_label_free' then e.volume_exceedance_count <= r.allowed_exceedances
        end
    where e.split = 'validation'
    group by all
),
-- smallest level whose mean test burden keeps the budget; never met where even level 0 keeps it
by_test as (
    select
        c.method_id, c.reference_id, c.support_id, c.voxel_volume_id, b.budget_cm3,
        min(c.level) filter (where c.burden_cm3_mean <= b.budget_cm3) as level,
        max(c.burden_cm3_mean) filter (where c.level = 0) as largest_burden_cm3
    from plain_curve as c
    cross join budget as b
    where c.split = 'test'
    group by all
),
-- a cross-fitted rule stands where every fold that has subjects in a series has a level
fold_total as (
    select
        c.method_id, c.reference_id, c.support_id, c.voxel_volume_id,
        count(distinct f.fold) as fold_count,
        count(distinct f.subject_id) as n_subjects
    from subject_curve as c
    join crossfit_fold as f using (subject_id)
    where c.postprocess_id = 'plain' and c.level = 0
    group by all
),
by_fold as (
    select
        t.method_id, t.reference_id, t.support_id, t.voxel_volume_id, b.budget_cm3,
        count(x.level) = any_value(t.fold_count) as is_complete,
        case
            when count(x.level) < any_value(t.fold_count)
                then 'cross-fitting leaves a fold without a subject that has a reference'
            else format(
                'crossfit: {} {} subjects, thresholds {:g} to {:g}',
                case
                    when any_value(t.fold_count) = any_value(t.n_subjects) then 'leave one out of'
                    else any_value(t.fold_count) || ' folds of'
                end,
                any_value(t.n_subjects), min(x.threshold), max(x.threshold)
            )
        end as reason
    from fold_total as t
    cross join budget as b
    left join crossfit_threshold as x using (method_id, reference_id, support_id, voxel_volume_id, budget_cm3)
    group by all
),
chosen as (
    select
        w.method_id, w.reference_id, w.support_id, w.voxel_volume_id, w.threshold_rule_id, w.budget_cm3,
        case
            when w.rule_reason is not null then null
            when w.rule_kind = 'validation' then v.level
            when w.rule_kind in ('crc', 'rcps', 'crc_label_free') then c.level
            when w.rule_kind = 'test_matched' and w.budget_cm3 < t.largest_burden_cm3 then t.level
            when w.rule_kind = 'fixed' then 100
        end as level,
        case
            when w.rule_reason is not null then w.rule_reason
            when w.rule_kind = 'validation' and f.reason is not null then f.reason
            when w.rule_kind = 'validation' and v.level is null then 'no validation subject has a reference'
            when w.rule_kind = 'test_matched' and t.level is null then 'the cohort has no test subject'
            when w.rule_kind = 'test_matched' and w.budget_cm3 >= t.largest_burden_cm3 then format(
                'burden never reached: even at threshold 0 the mean test burden is {:.3g} cm3', t.largest_burden_cm3
            )
        end as reason,
        w.rule_kind = 'validation' and coalesce(f.is_complete, false) as is_crossfit
    from wanted as w
    left join by_validation as v using (method_id, reference_id, support_id, voxel_volume_id, budget_cm3)
    left join by_fold as f using (method_id, reference_id, support_id, voxel_volume_id, budget_cm3)
    left join by_calibration as c
        using (method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3)
    left join by_test as t using (method_id, reference_id, support_id, voxel_volume_id, budget_cm3)
)
select
    method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3,
    level,
    level / 200 as threshold,
    case when is_crossfit then 'degraded' when reason is null then 'ok' else 'infeasible' end as status,
    reason
from chosen
