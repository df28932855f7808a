-- Conformal control: calibrated thresholds keep the share of test subjects above the budget within alpha + 0.02.
-- criterion: observed share of the controlled loss at most alpha + 0.02
-- cases: every
-- needs: enough validation subjects for a conformal rule (19, 9 and 4 for an alpha of 0.05, 0.10 and 0.20), and test subjects
select
    m.configuration_set,
    format('{} {} at {:g} cm3', c.method_id, c.threshold_rule_id, c.budget_cm3) as item,
    c.controlled_exceedance as estimate,
    null as estimate_low, null as estimate_high,
    c.alpha + 0.02 - c.controlled_exceedance as criterion_margin,
    c.controlled_exceedance <= c.alpha + 0.02 as is_supported,
    case
        when c.status = 'ok' then format(
            '{} with {} at {:g} cm3: {:.3f} of {} test subjects lie above, alpha {:g}; with {} calibration subjects the law'
            ' lets 95 % of such cohorts lie between {:.3f} and {:.3f}',
            c.method_id, c.threshold_rule_id, c.budget_cm3, c.controlled_exceedance, c.n_subjects, c.alpha,
            c.n_calibration, c.betabinomial_exceedance_low, c.betabinomial_exceedance_high
        )
        else c.reason
    end as reason
from conformal_rule as c
join ledger_member as m on m.method_id = c.method_id
