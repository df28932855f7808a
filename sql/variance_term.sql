-- One row per design, universe set, metric (each and `all`) and term: its part of the sum of squares over universes and
--   methods.
-- key: variance_design, universe_set, metric_id, term
-- columns: sum_of_squares, level_count?

-- primary: each method with its primary maps (see variance_share). configuration: the training set is one more axis, balanced
-- over those that every model has with a score in every universe (see configuration_level), at least two.
with level as (
    select universe_set, training_set
    from configuration_level
    where status = 'ok'
    qualify count(*) over (partition by universe_set) > 1
),
member as (
    select
        'primary' as variance_design, unnest(['all', 'defensible']) as universe_set,
        method_id as model_id, null as training_set, method_id
    from ranked_method
    where kind = 'method'
    union all
    select 'configuration' as variance_design, l.universe_set, c.model_id, c.training_set, c.method_id
    from configuration as c
    join level as l using (training_set)
    where c.is_ranked
),
placed as (
    select
        unnest(case when u.is_defensible then ['all', 'defensible'] else ['all'] end) as universe_set,
        u.cell_id, u.metric_id, u.reference_id, u.support_id, u.voxel_volume_id, u.threshold_rule_id,
        b.level_id as budget_level_id, u.postprocess_id, u.lesion_definition_id, u.hit_criterion_id, u.aggregation_id
    from universe as u
    join budget as b using (budget_cm3)
    where u.status = 'ok'
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
        variance_design, universe_set, unnest([metric_id, 'all']) as metric_group,
        model_id, training_set, axis_column, level_id, total, n
    from (
        select
            m.variance_design, w.universe_set, w.metric_id, m.model_id, m.training_set, w.axis_column, w.level_id,
            fsum(s.score * w.weight) as total,
            sum(w.weight) as n
        from member as m
        join cell_score as s using (method_id)
        join level_weight as w on w.cell_id = s.cell_id and w.universe_set = m.universe_set
        group by all
    )
),
method_mean as (
    select variance_design, universe_set, metric_group, model_id, fsum(total) / sum(n) as mean, sum(n) as n
    from level_sum
    where axis_column = 'metric_id'
    group by all
),
marginal as (
    select variance_design, universe_set, metric_group, model_id, axis_column, level_id, fsum(total) / sum(n) as mean
    from level_sum
    group by all
    union all
    select variance_design, universe_set, metric_group, model_id, 'configuration', training_set, fsum(total) / sum(n)
    from level_sum
    where axis_column = 'metric_id' and variance_design = 'configuration'
    group by all
),
grand as (
    -- the design is balanced, so a mean of means is the mean
    select variance_design, universe_set, metric_group, favg(mean) as mean, sum(n) as n, count(*) as methods
    from method_mean
    group by all
),
axis_mean as (
    select variance_design, universe_set, metric_group, axis_column, level_id, favg(mean) as mean
    from marginal
    group by all
),
axis_size as (
    select variance_design, universe_set, metric_group, axis_column, count(*) as levels
    from axis_mean
    group by all
),
total as (
    select
        m.variance_design, w.universe_set, w.metric_group, 'total' as term,
        fsum(w.weight * (s.score - g.mean) ** 2) as sum_of_squares
    from (select universe_set, cell_id, unnest([metric_id, 'all']) as metric_group, weight from cell_weight) as w
    join cell_score as s on s.cell_id = w.cell_id
    join member as m on m.method_id = s.method_id and m.universe_set = w.universe_set
    join grand as g
        on g.variance_design = m.variance_design and g.universe_set = w.universe_set and g.metric_group = w.metric_group
    group by all
),
method_term as (
    select
        m.variance_design, m.universe_set, m.metric_group, 'method' as term,
        fsum((m.mean - g.mean) ** 2) * any_value(g.n) / any_value(g.methods) as sum_of_squares
    from method_mean as m
    join grand as g using (variance_design, universe_set, metric_group)
    group by all
),
axis_term as (
    select
        a.variance_design, a.universe_set, a.metric_group, a.axis_column as term,
        fsum((a.mean - g.mean) ** 2) * any_value(g.n) / any_value(z.levels) as sum_of_squares
    from axis_mean as a
    join grand as g using (variance_design, universe_set, metric_group)
    join axis_size as z using (variance_design, universe_set, metric_group, axis_column)
    group by all
),
interaction_term as (
    select
        x.variance_design, x.universe_set, x.metric_group, 'method:' || x.axis_column as term,
        fsum((x.mean - a.mean - m.mean + g.mean) ** 2)
            * any_value(g.n) / (any_value(z.levels) * any_value(g.methods)) as sum_of_squares
    from marginal as x
    join axis_mean as a using (variance_design, universe_set, metric_group, axis_column, level_id)
    join method_mean as m using (variance_design, universe_set, metric_group, model_id)
    join grand as g using (variance_design, universe_set, metric_group)
    join axis_size as z using (variance_design, universe_set, metric_group, axis_column)
    group by x.variance_design, x.universe_set, x.metric_group, x.axis_column
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
    select variance_design, universe_set, metric_group, 'axes' as term, fsum(sum_of_squares) as sum_of_squares
    from terms
    where term not in ('total', 'method')
    group by all
),
remainder as (
    select
        t.variance_design, t.universe_set, t.metric_group, 'remainder' as term,
        t.sum_of_squares - m.sum_of_squares - a.sum_of_squares as sum_of_squares
    from total as t
    join method_term as m using (variance_design, universe_set, metric_group)
    join axes as a using (variance_design, universe_set, metric_group)
),
complete as (
    from terms
    union all by name
    from axes
    union all by name
    from remainder
)
select
    c.variance_design, c.universe_set, c.metric_group as metric_id, c.term, c.sum_of_squares, z.levels as level_count
from complete as c
left join axis_size as z
    on z.variance_design = c.variance_design and z.universe_set = c.universe_set and z.metric_group = c.metric_group
    and z.axis_column = replace(c.term, 'method:', '')
