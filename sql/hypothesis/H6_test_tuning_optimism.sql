-- Test-tuning optimism: thresholds matched on test overstate mean Dice by at least 0.02 at the reference budget.
-- criterion: lower end of the mean transfer gap at least 0.02
-- cases: any
-- needs: a method with a validation threshold that reaches the reference budget on test
select
    m.configuration_set,
    g.method_id as item,
    g.gap_mean as estimate, g.gap_mean_low as estimate_low, g.gap_mean_high as estimate_high,
    g.gap_mean_low - 0.02 as criterion_margin,
    g.gap_mean_low >= 0.02 as is_supported,
    format(
        'gap of {}: {:+.4f}; a nominal {:g} cm3 realises {:.1f} on test with the validation threshold',
        g.method_id, g.gap_mean, g.budget_cm3, g.validation_burden_cm3
    ) as reason
from transfer_gap as g
join ledger_member as m on m.method_id = g.method_id
cross join protocol
where g.budget_cm3 = protocol.reference_budget_cm3 and g.gap_mean is not null
