-- Pruning costs lesions: at the same threshold, hysteresis and pruning lower the sensitivity to lesions above the floor.
-- criterion: interval of the change in pooled sensitivity at the reference budget below 0
-- cases: any
-- needs: a method with a validation threshold at the reference budget, and lesions above the floor
select
    m.configuration_set,
    g.method_id as item,
    g.sensitivity_fixed_threshold_effect as estimate,
    g.sensitivity_fixed_threshold_effect_low as estimate_low,
    g.sensitivity_fixed_threshold_effect_high as estimate_high,
    -g.sensitivity_fixed_threshold_effect_high as criterion_margin,
    g.sensitivity_fixed_threshold_effect_high < 0 as is_supported,
    format(
        'sensitivity of {} changes by {:+.3f}, over {} lesions', g.method_id, g.sensitivity_fixed_threshold_effect, g.lesion_total
    ) as reason
from postprocess_gain as g
join ledger_member as m on m.method_id = g.method_id
cross join protocol
where g.postprocess_id = 'hysteresis_pruned' and g.budget_cm3 = protocol.reference_budget_cm3
    and g.sensitivity_fixed_threshold_effect is not null
