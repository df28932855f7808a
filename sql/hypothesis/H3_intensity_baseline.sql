-- Intensity baseline: an intensity image comes within 0.05 Dice of a method at equal burden and the reference budget.
-- criterion: mean Dice of the method less that of the baseline, both at a mean burden of exactly the budget, at most 0.05
-- cases: any
-- needs: a method and a baseline that reach the reference budget
with contrast as (
    select method_a, method_b, budget_cm3, estimate, estimate_low, estimate_high
    from paired_contrast
    where metric_id = 'dice' and operating_point = 'equal_burden' and aggregation_id = 'mean'
    union all
    select method_a, method_b, budget_cm3, estimate, estimate_low, estimate_high
    from configuration_baseline_contrast
)
select
    m.configuration_set,
    c.method_a || ' less ' || c.method_b as item,
    c.estimate, c.estimate_low, c.estimate_high,
    0.05 - c.estimate as criterion_margin,
    c.estimate <= 0.05 as is_supported,
    case
        when c.estimate is null
            then format('{} or {} never reaches {:g} cm3', c.method_a, c.method_b, c.budget_cm3)
        else format('Dice of {} less that of {}: {:+.3f} at {:g} cm3', c.method_a, c.method_b, c.estimate, c.budget_cm3)
    end as reason
from contrast as c
join ledger_member as m on m.method_id = c.method_a
join ranked_method as b on b.method_id = c.method_b and b.kind = 'baseline'
cross join protocol
where c.budget_cm3 = protocol.reference_budget_cm3
