-- Slices are blind to flips: voxel AUROC falls under an in-plane flip, slice AUROC does not.
-- criterion: mean voxel AUROC falls, and mean slice AUROC by no more than a tenth of it
-- cases: every
-- needs: the diagnostics of geometry (`mirto rebuild --diagnostics`), which flip the maps

-- the diagnostics measure primary maps only
with unmeasured as (
    -- in a set with other maps than these, every case is undecided
    select configuration_set, string_agg(method_id, ', ' order by model_position) as method_ids
    from ledger_member
    where method_id <> model_id
    group by configuration_set
),
fall as (
    select
        method_id, variant_id,
        max(-mean_difference) filter (where metric_id = 'voxel_auroc') as of_voxels,
        max(-mean_difference) filter (where metric_id = 'slice_auroc') as of_slices
    from corruption_effect
    where variant_id in ('flip_left_right', 'flip_anterior_posterior')
    group by method_id, variant_id
)
select
    m.configuration_set,
    format('{} under {}', f.method_id, f.variant_id) as item,
    f.of_slices as estimate,
    null as estimate_low, null as estimate_high,
    least(f.of_voxels, f.of_voxels / 10 - f.of_slices) as criterion_margin,
    f.of_voxels > 0 and f.of_slices <= f.of_voxels / 10 as is_supported,
    format(
        '{} under {}: voxel AUROC falls by {:.3f}, slice AUROC by {:.3f}', f.method_id, f.variant_id, f.of_voxels, f.of_slices
    ) as reason
from fall as f
join ledger_member as m on m.method_id = f.method_id
anti join unmeasured as u on u.configuration_set = m.configuration_set
where f.of_voxels is not null and f.of_slices is not null
union all
select
    configuration_set, 'all methods', null, null, null, null, null,
    'the diagnostics measure primary maps only, not those of ' || method_ids
from unmeasured
where exists (from corruption_effect)
