-- One row per model, training set and selection rule: the criterion, what the choice costs on test, and who chooses it.
-- key: model_id, training_set, selection_rule_id
-- columns: method_id, split, position, is_primary, value?, n_subjects, is_chosen, chosen_count, n_replicates,
--   test_dice_mean?, test_average_precision?, test_regret?, chosen_by?, status, reason?
with test_point as (
    -- test_dice_mean and test_regret: reference budget, validation threshold, plain maps, canonical reference, brain
    select
        c.method_id, c.model_id,
        d.dice_mean as test_dice_mean,
        v.value as test_average_precision,
        max(d.dice_mean) over (partition by c.model_id) - d.dice_mean as test_regret
    from configuration as c
    cross join protocol as p
    left join operating_point as d
        on d.method_id = c.method_id and d.threshold_rule_id = 'validation' and d.postprocess_id = 'plain'
        and d.budget_cm3 = p.reference_budget_cm3
    left join voxel_metric as v
        on v.method_id = c.method_id and v.metric_id = 'voxel_ap' and v.support_id = 'brain'
        and v.reference_id = 'canonical' and v.aggregation_id = 'mean'
    where c.is_ranked
),
chooser as (
    select method_id, string_agg(selection_rule_id, ', ' order by position) filter (is_chosen) as chosen_by
    from configuration_choice
    group by method_id
)
select
    h.model_id, c.training_set, h.selection_rule_id, h.method_id, h.split, h.position, c.is_primary,
    h.value, h.n_subjects, h.is_chosen, h.chosen_count, h.n_replicates,
    t.test_dice_mean, t.test_average_precision, t.test_regret, b.chosen_by,
    h.status, h.reason
from configuration_choice as h
join configuration as c on c.method_id = h.method_id
join test_point as t on t.method_id = h.method_id
join chooser as b on b.method_id = h.method_id
