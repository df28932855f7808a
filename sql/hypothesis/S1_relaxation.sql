-- Relaxation: what post-processing with pruning gains at equal burden comes from the relaxed threshold, not from the maps.
-- criterion: at the reference budget the interval of the relaxation term above 0, and the term above the fixed-threshold effect
-- cases: any
-- needs: a method with a validation threshold at the reference budget
select
    m.configuration_set,
    g.method_id as item,
    g.relaxation as estimate, g.relaxation_low as estimate_low, g.relaxation_high as estimate_high,
    case
        when g.relaxation_low is not null then least(g.relaxation_low, g.relaxation - g.fixed_threshold_effect)
    end as criterion_margin,
    case
        when g.relaxation_low is not null then g.relaxation_low > 0 and g.relaxation > g.fixed_threshold_effect
    end as is_supported,
    format(
        '{}: relaxation {:+.3f}, effect at the same threshold {:+.3f}', g.method_id, g.relaxation, g.fixed_threshold_effect
    ) as reason
from postprocess_gain as g
join ledger_member as m on m.method_id = g.method_id
cross join protocol
where g.postprocess_id = 'hysteresis_pruned' and g.budget_cm3 = protocol.reference_budget_cm3
