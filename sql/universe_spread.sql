-- One row per universe set, metric and method: the spread of its score over universes, and how often it ranks first.
-- key: universe_set, metric_id, method_id
-- columns: score_median, score_q1, score_q3, first_share, universe_count
with scored as (
    select
        unnest(case when u.is_defensible then ['all', 'defensible'] else ['all'] end) as universe_set,
        u.universe_id, u.metric_id, s.method_id, s.score,
        max(s.score) over (partition by u.universe_id) as best_score
    from universe as u
    join cell_score as s using (cell_id)
    join ranked_method as m on m.method_id = s.method_id and m.kind = 'method'
    where u.status = 'ok' and s.score is not null
),
first as (
    select
        scored.*,
        best_score - score < protocol.tie_tolerance as is_first
    from scored
    cross join protocol
),
shared as (
    -- methods that tie for the first place share it
    select *, is_first::int / sum(is_first::int) over (partition by universe_set, universe_id) as first_part
    from first
)
select
    universe_set, metric_id, method_id,
    median(score) as score_median,
    quantile_cont(score, 0.25) as score_q1,
    quantile_cont(score, 0.75) as score_q3,
    fsum(first_part) / count(*) as first_share,
    count(*) as universe_count
from shared
group by all
