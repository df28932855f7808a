-- Evaluation dominance: pooled over metrics, evaluation choices explain more of the variance than the method does.
-- criterion: share of the axes above the method's, intervals apart
-- cases: every
-- needs: two methods that score in the same universes

-- read it beside the metric axis: its main effect is the metrics' scales, and reorders nothing
with share as (
    select
        configuration_set,
        max(share) filter (term = 'axes') as axes,
        max(share_low) filter (term = 'axes') as axes_low,
        max(share_high) filter (term = 'axes') as axes_high,
        max(share) filter (term = 'method') as method,
        max(share_low) filter (term = 'method') as method_low,
        max(share_high) filter (term = 'method') as method_high,
        max(share) filter (term = 'metric_id') as metric
    from configuration_share
    where metric_id = 'all'
    group by configuration_set
)
select
    s.configuration_set,
    'pooled over metrics' as item,
    axes as estimate, axes_low as estimate_low, axes_high as estimate_high,
    axes_low - method_high as criterion_margin,
    axes_low > method_high as is_supported,
    case
        when x.axes is null then s.reason
        else format(
            'axes {:.3f} against method {:.3f} [{:.3f}, {:.3f}]; {:.3f} of it is the metric axis, that is the scales of the metrics',
            axes, method, method_low, method_high, metric
        )
    end as reason
from ledger_set as s
left join share as x using (configuration_set)
where x.axes is not null or s.status <> 'ok'
