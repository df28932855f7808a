-- Small lesions: fewer than a tenth of the small lesions are found.
-- criterion: pooled sensitivity to small lesions (matched IoU of at least 0.10, validation threshold, reference budget) below 0.10
-- cases: every
-- needs: methods with a validation threshold at the reference budget, and small lesions above the floor on test
select
    m.configuration_set,
    s.method_id as item,
    s.value as estimate,
    null as estimate_low, null as estimate_high,
    0.10 - s.value as criterion_margin,
    s.value < 0.10 as is_supported,
    format(
        '{} finds {} of {} lesions below {:.0f} mm3', s.method_id, s.hit_count, s.n_lesions, s.size_limit_mm3
    ) as reason
from lesion_sensitivity as s
join ledger_member as m on m.method_id = s.method_id
cross join protocol
where s.threshold_rule_id = 'validation' and s.budget_cm3 = protocol.reference_budget_cm3
    and s.postprocess_id = 'plain' and s.lesion_definition_id = 'conn6_floor' and s.hit_criterion_id = 'iou_10'
    and s.size_class = 'small'
