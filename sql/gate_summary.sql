-- One row per method: the geometry gate over the cohort, its verdict and what would mend it.
-- key: method_id
-- columns: n_subjects, passed_count, label_fidelity_count, misregistered_count, not_assessable_count,
--   centroid_mm_median?, dice_in_view_median?, dice_in_view_minimum?, in_view_fraction_median?, applied_mean_dice?,
--   best_candidate?, best_mean_dice?, margin?, verdict, suggestion?, study_lines?
with cohort_mean as (
    select
        c.method_id, c.transposed, c.flip_0, c.flip_1, c.dz, c.is_applied,
        favg(coalesce(c.dice, 0)) as mean_dice
    from gate_candidate as c
    join gate_overlap as o using (method_id, subject_id)
    where o.in_view_voxels > 0
    group by all
),
ranked as (
    select
        *,
        concat_ws(
            ', ',
            case when transposed then 'swap the first two entries of source_axis' end,
            case when flip_0 then 'toggle reversed[0]' end,
            case when flip_1 then 'toggle reversed[1]' end,
            case when dz <> 0 then format('subtract {:d} from start[2]', dz) end
        ) as mending,
        row_number() over (
            partition by method_id
            order by
                mean_dice desc, is_applied desc, abs(dz) + transposed::int + flip_0::int + flip_1::int,
                transposed, flip_0, flip_1, dz
        ) as place
    from cohort_mean
),
applied as (
    select method_id, mean_dice as applied_mean_dice
    from ranked
    where is_applied
),
best as (
    select
        r.method_id, c.candidate as best_name, r.mean_dice as best_mean_dice, r.mending,
        c.study_lines, c.reason as without_lines
    from ranked as r
    join gate_change as c using (method_id, transposed, flip_0, flip_1, dz)
    where r.place = 1
),
rival as (
    select method_id, max(mean_dice) as rival_mean_dice
    from ranked
    where not is_applied
    group by method_id
),
counted as (
    select
        method_id,
        count(*) as n_subjects,
        count(*) filter (verdict = 'passed') as passed_count,
        count(*) filter (verdict = 'label_fidelity') as label_fidelity_count,
        count(*) filter (verdict = 'misregistered') as misregistered_count,
        count(*) filter (verdict = 'not_assessable') as not_assessable_count,
        median(centroid_mm) as centroid_mm_median,
        median(dice_in_view) as dice_in_view_median,
        min(dice_in_view) as dice_in_view_minimum,
        median(in_view_fraction) as in_view_fraction_median,
        bool_or(coalesce(reason, '') <> 'no own reference') as has_own_reference
    from gate_subject
    group by method_id
),
judged as (
    select
        *,
        applied_mean_dice - rival_mean_dice as margin,
        case
            when applied_mean_dice is null then 'not_assessable'
            when applied_mean_dice >= best_mean_dice - protocol.maximiser_tolerance then 'passed'
            else 'failed'
        end as verdict
    from counted
    left join applied using (method_id)
    left join best using (method_id)
    left join rival using (method_id)
    cross join protocol
)
select
    method_id, n_subjects, passed_count, label_fidelity_count, misregistered_count, not_assessable_count,
    centroid_mm_median, dice_in_view_median, dice_in_view_minimum, in_view_fraction_median, applied_mean_dice,
    case when verdict = 'failed' then best_name when verdict = 'passed' then 'as declared' end as best_candidate,
    best_mean_dice, margin, verdict,
    case
        when verdict = 'failed' then format(
            '{} would give {:.2f} where the declared transform gives {:.2f}: {} in the transform of {}{}',
            best_name, best_mean_dice, applied_mean_dice, mending, method_id, concat(
                '; but ' || without_lines,
                case when best_mean_dice < overlap_floor
                    then format(
                        '; no candidate reaches {:.2f}: `mirto propose STUDY {}` tries other axis orders and crops too',
                        overlap_floor, method_id
                    ) end
            )
        )
        when verdict = 'not_assessable' and has_own_reference
            then 'no reference has a voxel in the field of view: mend start and extent in the transform of '
                || method_id || ', or see what `mirto propose STUDY ' || method_id || '` finds'
        when verdict = 'not_assessable'
            then 'declare own_reference: without it a wrong axis order can give a plausible table'
        when margin < margin_warning then format(
            'the declared transform beats the next candidate by {:.4f} only: the overlap can hardly tell them apart', margin
        )
    end as suggestion,
    case when verdict = 'failed' then study_lines end as study_lines
from judged
