-- One row per universe set, metric (each and `all`) and pair: in which share of universes it takes its minority order.
-- key: universe_set, metric_id, method_a, method_b
-- columns: greater_count, less_count, tie_count, flip_share, flip_share_low?, flip_share_high?, median_abs_difference,
--   median_lead_a?, median_lead_b?, significant_a?, significant_b?, is_baseline_pair
with pair as (
    select
        a.universe_set, a.metric_id, a.method_id as method_a, b.method_id as method_b, a.weight,
        a.score - b.score as difference,
        ma.kind = 'baseline' or mb.kind = 'baseline' as is_baseline_pair
    from method_cell as a
    join method_cell as b using (universe_set, metric_id, cell_id)
    join ranked_method as ma on ma.method_id = a.method_id
    join ranked_method as mb on mb.method_id = b.method_id
    where ma.position < mb.position
),
universes as (
    -- one row per universe, so that medians weigh every universe alike
    select pair.* exclude (weight), unnest(range(weight)) as copy
    from pair
),
counted as (
    select
        universe_set, metric_id, method_a, method_b,
        count(*) filter (difference >= tie_tolerance) as greater_count,
        count(*) filter (difference <= -tie_tolerance) as less_count,
        count(*) filter (abs(difference) < tie_tolerance) as tie_count,
        (least(greater_count, less_count) + tie_count / 2) / count(*) as flip_share,
        median(abs(difference)) as median_abs_difference,
        median(difference) filter (where difference >= tie_tolerance) as median_lead_a,
        median(-difference) filter (where difference <= -tie_tolerance) as median_lead_b,
        any_value(is_baseline_pair) as is_baseline_pair
    from universes
    cross join protocol
    group by universe_set, metric_id, method_a, method_b
),
-- how much a flip matters: Dice contrasts at validation thresholds that stand after adjustment, each way
significant as (
    select
        method_a, method_b,
        count(*) filter (p_holm <= 1 - interval_level and estimate > 0) as significant_a,
        count(*) filter (p_holm <= 1 - interval_level and estimate < 0) as significant_b
    from paired_contrast
    cross join protocol
    where metric_id = 'dice' and operating_point = 'validation'
    group by method_a, method_b
)
select
    c.universe_set, c.metric_id, c.method_a, c.method_b,
    c.greater_count, c.less_count, c.tie_count,
    c.flip_share, i.value_low as flip_share_low, i.value_high as flip_share_high,
    c.median_abs_difference, c.median_lead_a, c.median_lead_b,
    s.significant_a, s.significant_b,
    c.is_baseline_pair
from counted as c
left join significant as s using (method_a, method_b)
left join replicate_interval as i
    on i.configuration_set = 'primary' and i.statistic = 'flip_share' and i.universe_set = c.universe_set
    and i.metric_id = c.metric_id and i.item = c.method_a || '|' || c.method_b
