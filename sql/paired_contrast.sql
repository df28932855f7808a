-- One row per family, pair of methods and measure: the contrast with its interval, its own p-value, and Holm's.
-- key: family, method_a, method_b, metric_id, operating_point, budget_cm3?, aggregation_id
-- columns: estimate?, estimate_low?, estimate_high?, p_value?, p_holm?, is_resolvable, n_subjects, n_replicates
-- stop: (p_value is null) = (p_holm is null) | a p-value was lost in the adjustment; report this defect
-- stop: p_holm >= p_value | the adjusted p-value is below the one it adjusts; report this defect
with ranked as (
    -- a contrast without p-value was not tested: it counts for nobody's adjustment
    select
        *,
        count(p_value) over (partition by family) as tested_count,
        row_number() over (
            partition by family
            order by p_value nulls last, method_a, method_b, metric_id, operating_point, budget_cm3, aggregation_id
        ) as place
    from contrast_estimate
)
select
    family, method_a, method_b, metric_id, operating_point, budget_cm3, aggregation_id,
    estimate, estimate_low, estimate_high, p_value,
    case
        when p_value is not null then max(least(1, (tested_count - place + 1) * p_value)) over (
            partition by family order by place rows unbounded preceding
        )
    end as p_holm,
    p_value is not null and 2 * tested_count / (n_replicates + 1) <= 1 - interval_level as is_resolvable,
    n_subjects, n_replicates
from ranked
cross join protocol
