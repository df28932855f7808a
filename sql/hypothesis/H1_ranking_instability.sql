-- Ranking instability: some pair of methods takes its minority order in at least a fifth of the defensible universes.
-- criterion: lower end of the largest flip share, over all metrics, at least 0.20
-- cases: any
-- needs: two methods that score in the same universes

-- the size of the difference stands beside the share: near a half, two methods may also be merely close
select
    s.configuration_set,
    coalesce(p.method_a || ' vs ' || p.method_b, 'all methods') as item,
    p.value as estimate, p.value_low as estimate_low, p.value_high as estimate_high,
    p.value_low - 0.20 as criterion_margin,
    p.value_low >= 0.20 as is_supported,
    case
        when p.value is null then s.reason
        when s.same_as <> 'primary' then format('flips in {:.1f} % of universes', 100 * p.value)
        when d.flip_share is null then format('flips in {:.1f} % of universes, none of them of Dice', 100 * p.value)
        else format(
            'flips in {:.1f} % of universes; Dice: {:.1f} %, median |difference| {:.3f}, {} leads by {} (median), {} by {},'
            ' and {} and {} of their Dice contrasts at validation thresholds stand after Holm',
            100 * p.value, 100 * d.flip_share, d.median_abs_difference,
            p.method_a, coalesce(format('{:.3f}', d.median_lead_a), 'nothing'),
            p.method_b, coalesce(format('{:.3f}', d.median_lead_b), 'nothing'),
            coalesce(d.significant_a, 0), coalesce(d.significant_b, 0)
        )
    end as reason
from ledger_set as s
left join configuration_phi_max as p on p.configuration_set = s.configuration_set and p.metric_id = 'all'
left join flip_share as d
    on d.universe_set = 'defensible' and d.metric_id = 'dice'
    and d.method_a = p.method_a and d.method_b = p.method_b
where p.value is not null or s.status <> 'ok'
