-- Contrast dependence: lesions are detected the more readily, the higher their contrast and their share of oedema.
-- criterion: interval of the log odds of detection (estimating equations, subjects as clusters; Firth's where those do not
--   converge) above 0 for contrast; and for oedema
-- cases: every
-- needs: an intensity image, a validation threshold at the reference budget, and lesions some of which are detected

-- Where methods declare the family `residual`, only those are asked. No table holds oedema, so contrast alone can refute the
-- claim and never support it; a study that knows the share of oedema replaces this file.
with residual as (
    select m.configuration_set, m.method_id
    from ledger_member as m
    join method as d on d.method_id = m.model_id
    qualify coalesce(d.family, '') = 'residual'
        or count(*) filter (d.family = 'residual') over (partition by m.configuration_set) = 0
),
asked as (
    select
        r.configuration_set, r.method_id,
        d.regression, d.log_odds, d.log_odds_low, d.log_odds_high, d.lesion_total, d.n_subjects, d.reason
    from residual as r
    left join determinant as d on d.method_id = r.method_id and d.covariate = 'contrast'
    qualify row_number() over (
        partition by r.configuration_set, r.method_id order by d.log_odds is null, d.regression desc
    ) = 1
)
select
    configuration_set,
    method_id as item,
    log_odds as estimate, log_odds_low as estimate_low, log_odds_high as estimate_high,
    case when log_odds_low <= 0 then log_odds_low end as criterion_margin,
    case when log_odds_low <= 0 then false end as is_supported,
    case
        when log_odds is null then coalesce(reason, 'no lesion of ' || method_id || ' was asked')
        else format(
            'log odds of {} change by {:+.2f} with a standard deviation of contrast ({}), over {} lesions of {} subjects;'
            ' oedema is not measured', method_id, log_odds, regression, lesion_total, n_subjects
        )
    end as reason
from asked
