-- One row per method, conformal rule, alpha and budget: its threshold, what test subjects show, and what the law predicts.
-- key: method_id, threshold_rule_id, alpha, budget_cm3
-- columns: rule_kind, n_calibration, allowed_exceedances, smallest_n, threshold?, status, reason?, n_subjects, n_dice,
--   burden_exceedance_count?, volume_exceedance_count?, exceedance?, exceedance_low?, exceedance_high?,
--   controlled_exceedance?, burden_cm3_mean?, dice_mean?, betabinomial_exceedance_mean?, betabinomial_exceedance_low?,
--   betabinomial_exceedance_high?, betabinomial_within_alpha?
-- stop: (status = 'ok') = (exceedance is not null) | a rule that stands shows no exceedance, or one that does not shows one; report this defect
-- stop: abs(exceedance * n_subjects - burden_exceedance_count) < 1e-6 | subjects above the budget are counted in two ways that differ; report this defect

-- canonical reference, brain, true voxel volume, plain maps; the interval is Clopper-Pearson's
with rule as (
    select t.method_id, t.threshold_rule_id, t.budget_cm3, t.level, t.threshold, t.status, t.reason
    from threshold_choice as t
    where t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
),
-- test subjects above the budget at the chosen level, in false positives and in all predicted volume
seen as (
    select r.method_id, r.threshold_rule_id, r.budget_cm3, e.burden_exceedance_count, e.volume_exceedance_count
    from rule as r
    join exceedance_curve as e using (method_id, budget_cm3, level)
    where e.split = 'test'
        and e.reference_id = 'canonical' and e.support_id = 'brain' and e.voxel_volume_id = 'true'
),
plain_point as (
    select method_id, threshold_rule_id, budget_cm3, n_subjects, n_dice, exceedance, burden_cm3_mean, dice_mean
    from operating_point
    where postprocess_id = 'plain'
)
select
    r.method_id, r.threshold_rule_id, l.alpha, r.budget_cm3,
    l.rule_kind, l.n_calibration, l.allowed_exceedances, l.smallest_n,
    r.threshold,
    case when r.status = 'ok' and p.n_subjects is null then 'unavailable' else r.status end as status,
    case when r.status = 'ok' and p.n_subjects is null then 'the cohort has no test subject' else r.reason end as reason,
    coalesce(p.n_subjects, 0) as n_subjects,
    coalesce(p.n_dice, 0) as n_dice,
    s.burden_exceedance_count, s.volume_exceedance_count,
    p.exceedance, i.exceedance_low, i.exceedance_high,
    case when l.rule_kind = 'crc_label_free' then s.volume_exceedance_count else s.burden_exceedance_count end
        / p.n_subjects as controlled_exceedance,
    p.burden_cm3_mean, p.dice_mean,
    l.betabinomial_exceedance_mean, l.betabinomial_exceedance_low, l.betabinomial_exceedance_high,
    l.betabinomial_within_alpha
from rule as r
join rule_law as l using (threshold_rule_id)
left join plain_point as p using (method_id, threshold_rule_id, budget_cm3)
left join seen as s using (method_id, threshold_rule_id, budget_cm3)
left join exceedance_interval as i
    on i.n_subjects = p.n_subjects and i.exceedance_count = s.burden_exceedance_count
