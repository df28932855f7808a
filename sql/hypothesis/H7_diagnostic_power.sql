-- Diagnostic power: rank stability and the anti-location rate each show a flipped or transposed export in 60 subjects.
-- criterion: power at least 0.95 at n = 60, at the declared false-alarm rate, for flips and transposes
-- cases: every
-- needs: the diagnostics of geometry (`mirto rebuild --diagnostics`), which corrupt the maps and ask whether it shows

-- the diagnostics measure primary maps only
with unmeasured as (
    -- in a set with other maps than these, every case is undecided
    select configuration_set, string_agg(method_id, ', ' order by model_position) as method_ids
    from ledger_member
    where method_id <> model_id
    group by configuration_set
)
select
    m.configuration_set,
    format('{} of {} under {}', p.diagnostic_id, p.method_id, p.variant_id) as item,
    p.power as estimate,
    null as estimate_low, null as estimate_high,
    p.power - 0.95 as criterion_margin,
    p.power >= 0.95 as is_supported,
    case
        when p.power is null then p.reason
        else format(
            '{} shows {} of {} with power {:.3f} at n = 60{}', p.diagnostic_id, p.variant_id, p.method_id, p.power,
            coalesce(' (' || p.reason || ')', '')
        )
    end as reason
from diagnostic_power as p
join ledger_member as m on m.method_id = p.method_id
anti join unmeasured as u on u.configuration_set = m.configuration_set
where p.sample_id = '60' and p.variant_id in ('flip_left_right', 'flip_anterior_posterior', 'transpose')
union all
select
    configuration_set, 'all methods', null, null, null, null, null,
    'the diagnostics measure primary maps only, not those of ' || method_ids
from unmeasured
where exists (from diagnostic_power)
