-- One row per training set, pair of models that share it, and metric: the paired contrast of their subject means.
-- key: training_set, method_a, method_b, metric_id
-- columns: operating_point, budget_cm3?, estimate?, estimate_low?, estimate_high?, p_value?, p_holm?, is_resolvable,
--   n_subjects, n_replicates
-- stop: (p_value is null) = (p_holm is null) | a p-value was lost in the adjustment; report this defect
-- stop: p_holm >= p_value | the adjusted p-value is below the one it adjusts; report this defect
with ranked as (
    -- method_a and method_b name models; the contrasts of one training set are adjusted together (Holm)
    select
        *,
        count(p_value) over (partition by training_set) as tested_count,
        row_number() over (
            partition by training_set order by p_value nulls last, method_a, method_b, metric_id
        ) as place
    from configuration_contrast_estimate
)
select
    training_set, method_a, method_b, metric_id, operating_point, budget_cm3,
    estimate, estimate_low, estimate_high, p_value,
    case
        when p_value is not null then max(least(1, (tested_count - place + 1) * p_value)) over (
            partition by training_set order by place rows unbounded preceding
        )
    end as p_holm,
    p_value is not null and 2 * tested_count / (n_replicates + 1) <= 1 - interval_level as is_resolvable,
    n_subjects, n_replicates
from ranked
cross join protocol
