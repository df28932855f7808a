-- One row per universe set, metric (each and `all`) and term: its part of the sum of squares over universes, training sets
--   and methods, with the training set as an eleventh axis.
-- key: universe_set, metric_id, term
-- columns: sum_of_squares, share?, share_low?, share_high?, level_count?
with level as (
    -- balanced over the training sets that every model has with a score in every universe (see configuration_level): at
    -- least two; means are over all of them, so the method share is not that of the primary maps in variance_share
    select universe_set, training_set
    from configuration_level
    where status = 'ok'
    qualify count(*) over (partition by universe_set) > 1
),
member as (
    select l.universe_set, c.model_id, c.training_set, c.method_id
    from configuration as c
    join level as l using (training_set)
    where c.is_ranked
),
standing as (
    select u.*, b.level_id as budget_level_id
    from universe as u
    join budget as b using (budget_cm3)
    where u.status = 'ok' and exists (from member)
),
placed as (
    select
        unnest(case when is_defensible then ['all', 'defensible'] else ['all'] end) as universe_set,
        cell_id, metric_id, reference_id, support_id, voxel_volume_id, threshold_rule_id,
        budget_level_id, postprocess_id, lesion_definition_id, hit_criterion_id, aggregation_id
    from standing
),
cell_weight as (
    select universe_set, cell_id, metric_id, count(*) as weight
    from placed
    group by all
),
level_weight as (
    select universe_set, cell_id, metric_id, axis_column, level_id, count(*) as weight
    from (
        select
            universe_set, cell_id, metric_id,
            unnest([
                'reference_id', 'support_id', 'voxel_volume_id', 'threshold_rule_id', 'budget_cm3', 'postprocess_id',
                'lesion_definition_id', 'hit_criterion_id', 'aggregation_id', 'metric_id'
            ]) as axis_column,
            unnest([
                reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_level_id, postprocess_id,
                lesion_definition_id, hit_criterion_id, aggregation_id, metric_id
            ]) as level_id
        from placed
    )
    group by all
),
-- sums of each model with each training set at each level, by metric; over a metric's one level they are its totals
level_sum as (
    select
        universe_set, unnest([metric_id, 'all']) as metric_group, model_id, training_set, axis_column, level_id, total, n
    from (
        select
            w.universe_set, w.metric_id, m.model_id, m.training_set, w.axis_column, w.level_id,
            fsum(s.score * w.weight) as total,
            sum(w.weight) as n
        from member as m
        join cell_score as s using (method_id)
        join level_weight as w on w.cell_id = s.cell_id and w.universe_set = m.universe_set
        group by all
    )
),
method_mean as (
    select universe_set, metric_group, model_id, fsum(total) / sum(n) as mean, sum(n) as n
    from level_sum
    where axis_column = 'metric_id'
    group by all
),
marginal as (
    select universe_set, metric_group, model_id, axis_column, level_id, fsum(total) / sum(n) as mean
    from level_sum
    group by all
    union all
    select universe_set, metric_group, model_id, 'configuration', training_set, fsum(total) / sum(n)
    from level_sum
    where axis_column = 'metric_id'
    group by all
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
    group by all
),
axis_size as (
    select universe_set, metric_group, axis_column, count(*) as levels
    from axis_mean
    group by all
),
total as (
    select
        w.universe_set, w.metric_group, 'total' as term,
        fsum(w.weight * (s.score - g.mean) ** 2) as sum_of_squares
    from (select universe_set, cell_id, unnest([metric_id, 'all']) as metric_group, weight from cell_weight) as w
    join cell_score as s on s.cell_id = w.cell_id
    join member as m on m.method_id = s.method_id and m.universe_set = w.universe_set
    join grand as g on g.universe_set = w.universe_set and g.metric_group = w.metric_group
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
    join method_mean as m using (universe_set, metric_group, model_id)
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
    on i.statistic = 'configuration_variance' and i.universe_set = c.universe_set and i.metric_id = c.metric_group
    and i.item = c.term
