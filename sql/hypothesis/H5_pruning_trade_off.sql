-- Pruning trade-off: at equal burden, pruning raises the sensitivity to lesions at the smallest budget and lowers it at the largest.
-- criterion: interval of the gain in pooled sensitivity (lesions above the floor) above 0 at the smallest budget, below 0 at the largest
-- cases: every
-- needs: methods with a validation threshold at both budgets, and lesions above the floor
with asked as (
    select
        m.configuration_set, m.method_id, b.budget_cm3,
        case when b.budget_cm3 = min(b.budget_cm3) over () then 1 else -1 end as direction
    from ledger_member as m
    cross join budget as b
    qualify count(*) over (partition by m.configuration_set, m.method_id) > 1
        and (b.budget_cm3 = min(b.budget_cm3) over () or b.budget_cm3 = max(b.budget_cm3) over ())
),
gained as (
    select
        a.configuration_set, a.method_id, a.budget_cm3, a.direction,
        g.sensitivity_gain as gain, g.sensitivity_gain_low as gain_low, g.sensitivity_gain_high as gain_high,
        g.total_gain
    from asked as a
    left join postprocess_gain as g
        on g.method_id = a.method_id and g.budget_cm3 = a.budget_cm3 and g.postprocess_id = 'hysteresis_pruned'
)
select
    configuration_set,
    format('{} at {:g} cm3', method_id, budget_cm3) as item,
    gain as estimate, gain_low as estimate_low, gain_high as estimate_high,
    case direction when 1 then gain_low else -gain_high end as criterion_margin,
    case direction when 1 then gain_low > 0 else gain_high < 0 end as is_supported,
    case
        when gain is null then format('{} has no gain to show at {:g} cm3: no validation threshold, or no lesions', method_id, budget_cm3)
        else format(
            'pruning changes the sensitivity of {} at {:g} cm3 by {:+.3f}, and its mean Dice by {:+.3f}',
            method_id, budget_cm3, gain, total_gain
        )
    end as reason
from gained
