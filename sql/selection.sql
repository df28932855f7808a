-- One row per selection rule and model with several training sets: its choice, how often resamples repeat it, what it costs.
-- key: selection_rule_id, model_id
-- columns: split, position, method_id?, training_set?, choice_share?, is_stable?, test_regret?, regret_mean?, regret_low?,
--   regret_high?, n_subjects, n_replicates, status, reason?
-- stop: (method_id is null) = (status = 'unavailable') | a choice without a criterion, or none with one; report this defect
with chosen as (
    -- regrets over resamples are those of the training sets that they choose, each on the whole test cohort
    select
        selection_rule_id, model_id,
        any_value(split) as split,
        any_value(position) as position,
        any_value(method_id) filter (is_chosen) as method_id,
        any_value(training_set) filter (is_chosen) as training_set,
        any_value(chosen_count) filter (is_chosen) as chosen_count,
        any_value(test_regret) filter (is_chosen) as test_regret,
        bool_and(test_regret is not null or chosen_count = 0) as has_regrets,
        any_value(n_subjects) as n_subjects,
        any_value(n_replicates) as n_replicates,
        count(value) as valued_count,
        string_agg(
            case when reason is not null then training_set || ': ' || reason end, '; ' order by training_set
        ) as reasons,
        any_value(reason) as reason,
        count(distinct reason) as reason_count
    from configuration_criterion
    group by selection_rule_id, model_id
),
resampled as (
    select
        selection_rule_id, model_id,
        list(test_regret order by test_regret) as ordered,
        fsum(test_regret) / count(*) as regret_mean
    from (
        select selection_rule_id, model_id, test_regret, unnest(range(chosen_count)) as copy
        from configuration_criterion
    )
    group by all
),
-- linear quantiles: DuckDB's own takes no level from a table
placed as (
    select
        resampled.*,
        (len(ordered) - 1) * (1 - interval_level) / 2 as place_low,
        (len(ordered) - 1) * (1 + interval_level) / 2 as place_high
    from resampled
    cross join protocol
)
select
    c.selection_rule_id, c.model_id, c.split, c.position, c.method_id, c.training_set,
    c.chosen_count / nullif(c.n_replicates, 0) as choice_share,
    c.chosen_count / nullif(c.n_replicates, 0) >= stable_choice_share as is_stable,
    c.test_regret,
    case when has_regrets then p.regret_mean end as regret_mean,
    case
        when has_regrets then ordered[floor(place_low)::bigint + 1]
            + (place_low - floor(place_low))
            * (ordered[ceil(place_low)::bigint + 1] - ordered[floor(place_low)::bigint + 1])
    end as regret_low,
    case
        when has_regrets then ordered[floor(place_high)::bigint + 1]
            + (place_high - floor(place_high))
            * (ordered[ceil(place_high)::bigint + 1] - ordered[floor(place_high)::bigint + 1])
    end as regret_high,
    c.n_subjects, c.n_replicates,
    case when c.valued_count = 0 then 'unavailable' when c.reasons is not null then 'degraded' else 'ok' end as status,
    case when c.valued_count = 0 and c.reason_count = 1 then c.reason else c.reasons end as reason
from chosen as c
cross join protocol
left join placed as p using (selection_rule_id, model_id)
