-- One row per configuration set, metric (each and `all`) and term: its share of the sum of squares over defensible universes
--   and models.
-- key: configuration_set, metric_id, term
-- columns: share, share_low?, share_high?

-- A set whose maps lack a score in a defensible universe has no row (see ledger_set): its design is not balanced.
with found as (
    select 'primary' as configuration_set, metric_id, term, share, share_low, share_high
    from variance_share
    where universe_set = 'defensible' and share is not null
    union all
    -- replicate 0 takes every subject once: the share itself
    select s.configuration_set, s.metric_id, s.item, s.value, i.value_low, i.value_high
    from configuration_statistic as s
    left join replicate_interval as i using (configuration_set, universe_set, statistic, metric_id, item)
    where s.statistic = 'variance_share' and s.replicate = 0
)
select s.configuration_set, f.* exclude (configuration_set)
from ledger_set as s
join found as f on f.configuration_set = s.same_as
