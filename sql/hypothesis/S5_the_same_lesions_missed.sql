-- The same lesions are missed: methods miss much the same lesions.
-- criterion: Jaccard index of the sets of missed lesions (no matched IoU of at least 0.10, validation threshold, reference budget) at least 0.70
-- cases: every
-- needs: two methods with a validation threshold at the reference budget, that miss lesions above the floor

-- where methods declare the family `residual`, only those are compared
with residual as (
    select m.configuration_set, m.method_id, m.model_position
    from ledger_member as m
    join method as d on d.method_id = m.model_id
    qualify coalesce(d.family, '') = 'residual'
        or count(*) filter (d.family = 'residual') over (partition by m.configuration_set) < 2
),
test_lesion as (
    select l.subject_id, l.lesion_id
    from lesion as l
    join cohort_subject as s on s.subject_id = l.subject_id and s.is_included and s.split = 'test'
    where l.method_id is null and l.reference_id = 'canonical' and l.support_id = 'brain'
        and l.lesion_definition_id = 'conn6_floor'
),
missed as (
    select r.method_id, t.budget_cm3, l.subject_id, l.lesion_id
    from (select distinct method_id from residual) as r
    join subject_threshold as t using (method_id)
    cross join protocol
    join test_lesion as l on l.subject_id = t.subject_id
    anti join lesion_match as h
        on h.method_id = r.method_id and h.subject_id = l.subject_id and h.lesion_id = l.lesion_id
        and h.level = t.level and h.postprocess_id = 'plain' and h.matched_iou >= 0.10
    where t.threshold_rule_id = 'validation' and t.budget_cm3 = protocol.reference_budget_cm3
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
),
missed_count as (
    select method_id, count(*) as n from missed group by all
),
pair as (
    select
        a.configuration_set, a.method_id as method_a, b.method_id as method_b, m.n as missed_a, n.n as missed_b,
        (
            select count(*)
            from missed as x
            join missed as y using (subject_id, lesion_id)
            where x.method_id = a.method_id and y.method_id = b.method_id
        ) as missed_by_both
    from residual as a
    join residual as b on b.configuration_set = a.configuration_set and a.model_position < b.model_position
    join missed_count as m on m.method_id = a.method_id
    join missed_count as n on n.method_id = b.method_id
)
select
    configuration_set,
    method_a || ' and ' || method_b as item,
    missed_by_both / (missed_a + missed_b - missed_by_both) as estimate,
    null as estimate_low, null as estimate_high,
    estimate - 0.70 as criterion_margin,
    estimate >= 0.70 as is_supported,
    format(
        '{} and {} miss {} and {} lesions, {} of them both', method_a, method_b, missed_a, missed_b, missed_by_both
    ) as reason
from pair
