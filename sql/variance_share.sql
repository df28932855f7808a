-- One row per universe set, metric (each and `all`) and term: its part of the sum of squares over universes and methods.
-- key: universe_set, metric_id, term
-- columns: sum_of_squares, share?, share_low?, share_high?, level_count?
with universe_level as (
    select u.*, unnest(case when u.is_defensible then ['all', 'defensible'] else ['all'] end) as universe_set
    from universe as u
    where u.status = 'ok'
),
scored as materialized (
    select
        u.universe_set, unnest([u.metric_id, 'all']) as metric_group,
        s.method_id, s.score,
        u.reference_id, u.support_id, u.voxel_volume_id, u.threshold_rule_id, b.level_id as budget_cm3,
        u.postprocess_id, u.lesion_definition_id, u.hit_criterion_id, u.aggregation_id, u.metric_id
    from universe_level as u
    join cell_score as s using (cell_id)
    join budget as b on b.budget_cm3 = u.budget_cm3
    join ranked_method as m on m.method_id = s.method_id and m.kind = 'method'
),
marginal as (
    -- mean score of each method, and of each method at each level of each axis
    select
        universe_set, metric_group, method_id,
        case grouping_id(
            reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
            lesion_definition_id, hit_criterion_id, aggregation_id, metric_id
        )
            when 511 then 'reference_id'
            when 767 then 'support_id'
            when 895 then 'voxel_volume_id'
            when 959 then 'threshold_rule_id'
            when 991 then 'budget_cm3'
            when 1007 then 'postprocess_id'
            when 1015 then 'lesion_definition_id'
            when 1019 then 'hit_criterion_id'
            when 1021 then 'aggregation_id'
            when 1022 then 'metric_id'
        end as axis_column,
        coalesce(
            reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
            lesion_definition_id, hit_criterion_id, aggregation_id, metric_id
        ) as level_id,
        favg(score) as mean,
        count(*) as n
    from scored
    group by grouping sets (
        (universe_set, metric_group, method_id),
        (universe_set, metric_group, method_id, reference_id),
        (universe_set, metric_group, method_id, support_id),
        (universe_set, metric_group, method_id, voxel_volume_id),
        (universe_set, metric_group, method_id, threshold_rule_id),
        (universe_set, metric_group, method_id, budget_cm3),
        (universe_set, metric_group, method_id, postprocess_id),
        (universe_set, metric_group, method_id, lesion_definition_id),
        (universe_set, metric_group, method_id, hit_criterion_id),
        (universe_set, metric_group, method_id, aggregation_id),
        (universe_set, metric_group, method_id, metric_id)
    )
),
method_mean as (
    select universe_set, metric_group, method_id, mean, n
    from marginal
    where axis_column is null
),
grand as (
    -- the design is balanced, so a mean of means is the mean
    select universe_set, metric_group, favg(mean) as mean, sum(n) as n, count(*) as methods
    from method_mean
    group by all
),
axis_mean as (
    select universe_set, metric_group, axis_column, level_id, favg(mean) as mean
    from marginal
    where axis_column is not null
    group by all
),
axis_size as (
    select universe_set, metric_group, axis_column, count(*) as levels
    from axis_mean
    group by all
),
total as (
    select s.universe_set, s.metric_group, 'total' as term, fsum((s.score - g.mean) ** 2) as sum_of_squares
    from scored as s
    join grand as g using (universe_set, metric_group)
    group by all
),
method_term as (
    select
        m.universe_set, m.metric_group, 'method' as term,
        fsum((m.mean - g.mean) ** 2) * any_value(g.n) / any_value(g.methods) as sum_of_squares
    from method_mean as m
    join grand as g using (universe_set, metric_group)
    group by all
),
axis_term as (
    select
        a.universe_set, a.metric_group, a.axis_column as term,
        fsum((a.mean - g.mean) ** 2) * any_value(g.n) / any_value(z.levels) as sum_of_squares
    from axis_mean as a
    join grand as g using (universe_set, metric_group)
    join axis_size as z using (universe_set, metric_group, axis_column)
    group by all
),
interaction_term as (
    select
        x.universe_set, x.metric_group, 'method:' || x.axis_column as term,
        fsum((x.mean - a.mean - m.mean + g.mean) ** 2)
            * any_value(g.n) / (any_value(z.levels) * any_value(g.methods)) as sum_of_squares
    from marginal as x
    join axis_mean as a using (universe_set, metric_group, axis_column, level_id)
    join method_mean as m using (universe_set, metric_group, method_id)
    join grand as g using (universe_set, metric_group)
    join axis_size as z using (universe_set, metric_group, axis_column)
    group by x.universe_set, x.metric_group, x.axis_column
),
terms as (
    from total
    union all by name
    from method_term
    union all by name
    from axis_term
    union all by name
    from interaction_term
),
axes as (
    select universe_set, metric_group, 'axes' as term, fsum(sum_of_squares) as sum_of_squares
    from terms
    where term not in ('total', 'method')
    group by all
),
remainder as (
    select
        t.universe_set, t.metric_group, 'remainder' as term,
        t.sum_of_squares - m.sum_of_squares - a.sum_of_squares as sum_of_squares
    from total as t
    join method_term as m using (universe_set, metric_group)
    join axes as a using (universe_set, metric_group)
),
complete as (
    from terms
    union all by name
    from axes
    union all by name
    from remainder
)
select
    c.universe_set, c.metric_group as metric_id, c.term,
    c.sum_of_squares,
    c.sum_of_squares / nullif(t.sum_of_squares, 0) as share,
    i.value_low as share_low,
    i.value_high as share_high,
    z.levels as level_count
from complete as c
join total as t using (universe_set, metric_group)
left join axis_size as z
    on z.universe_set = c.universe_set and z.metric_group = c.metric_group
    and z.axis_column = replace(c.term, 'method:', '')
left join replicate_interval as i
    on i.statistic = 'variance_share' and i.universe_set = c.universe_set and i.metric_id = c.metric_group
    and i.item = c.term
