-- No gain for the last: post-processing with pruning gains nothing at equal burden for the method that ranks last.
-- criterion: total gain in mean Dice at the reference budget at most 0, for the method of lowest mean Dice at its validation threshold
-- cases: every
-- needs: two methods with a validation threshold at the reference budget
with last_method as (
    select m.configuration_set, o.method_id, o.budget_cm3
    from operating_point as o
    join ledger_member as m on m.method_id = o.method_id
    cross join protocol
    where o.threshold_rule_id = 'validation' and o.postprocess_id = 'plain' and o.dice_mean is not null
        and o.budget_cm3 = protocol.reference_budget_cm3
    qualify count(*) over (partition by m.configuration_set) > 1
        and row_number() over (partition by m.configuration_set order by o.dice_mean, m.model_position) = 1
)
select
    configuration_set,
    g.method_id as item,
    g.total_gain as estimate, g.total_gain_low as estimate_low, g.total_gain_high as estimate_high,
    -g.total_gain as criterion_margin,
    g.total_gain <= 0 as is_supported,
    format('{} ranks last and gains {:+.3f}', g.method_id, g.total_gain) as reason
from postprocess_gain as g
join last_method using (method_id, budget_cm3)
where g.postprocess_id = 'hysteresis_pruned'
