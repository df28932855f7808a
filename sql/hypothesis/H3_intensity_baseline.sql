-- Intensity baseline: an intensity image comes within 0.05 Dice of a method at equal burden and the reference budget.
-- criterion: mean Dice of the method less that of the baseline, both at a mean burden of exactly the budget, at most 0.05
-- cases: any
-- needs: a method and a baseline that reach the reference budget
select
    'primary' as configuration_set,
    c.method_a || ' less ' || c.method_b as item,
    c.estimate, c.estimate_low, c.estimate_high,
    0.05 - c.estimate as criterion_margin,
    c.estimate <= 0.05 as is_supported,
    case
        when c.estimate is null
            then format('{} or {} never reaches {:g} cm3', c.method_a, c.method_b, c.budget_cm3)
        else format('Dice of {} less that of {}: {:+.3f} at {:g} cm3', c.method_a, c.method_b, c.estimate, c.budget_cm3)
    end as reason
from paired_contrast as c
join ranked_method as b on b.method_id = c.method_b and b.kind = 'baseline'
cross join protocol
where c.metric_id = 'dice' and c.operating_point = 'equal_burden' and c.aggregation_id = 'mean'
    and c.budget_cm3 = protocol.reference_budget_cm3
