-- One row per method and subject: the geometry gate's three criteria and their verdict.
-- key: method_id, subject_id
-- columns: centroid_mm?, dice_in_view?, best_candidate?, best_candidate_dice?, in_view_fraction?, round_trip_dice?,
--   passes_i?, passes_ii_b?, passes_iii?, verdict, reason?, study_lines?
-- stop: best_candidate_dice is null or dice_in_view <= best_candidate_dice | the declared transform cannot beat the best
--   candidate, since it is one; report this defect
with pair as (
    select m.method_id, s.subject_id
    from method as m
    cross join subject as s
    where m.kind <> 'baseline'
),
leader as (
    select method_id, subject_id, transposed, flip_0, flip_1, dz, dice as best_candidate_dice
    from gate_candidate
    where dice is not null
    qualify row_number() over (
        partition by method_id, subject_id
        order by
            dice desc, is_applied desc, abs(dz) + transposed::int + flip_0::int + flip_1::int,
            transposed, flip_0, flip_1, dz
    ) = 1
),
best as (
    select method_id, subject_id, candidate as best_candidate, best_candidate_dice, study_lines
    from leader
    join gate_change using (method_id, transposed, flip_0, flip_1, dz)
),
assessed as (
    select
        p.method_id, p.subject_id,
        a.centroid_mm,
        a.dice as dice_in_view,
        b.best_candidate,
        b.best_candidate_dice,
        b.study_lines,
        o.in_view_fraction,
        o.round_trip_dice,
        case
            when a.dice is null then null
            else coalesce(a.centroid_mm <= protocol.centroid_limit_mm, false)
        end as passes_i,
        a.dice >= b.best_candidate_dice - protocol.overlap_tolerance as passes_ii_b,
        a.dice >= protocol.overlap_floor as passes_iii,
        coalesce(o.round_trip_dice, 0) >= protocol.overlap_floor as keeps_round_trip,
        a.method_id is null as has_no_own_reference
    from pair as p
    left join gate_candidate as a on a.method_id = p.method_id and a.subject_id = p.subject_id and a.is_applied
    left join best as b on b.method_id = p.method_id and b.subject_id = p.subject_id
    left join gate_overlap as o on o.method_id = p.method_id and o.subject_id = p.subject_id
    cross join protocol
),
judged as (
    select
        *,
        case
            when dice_in_view is null then 'not_assessable'
            when not passes_ii_b or (not passes_i and not keeps_round_trip) then 'misregistered'
            when not passes_i or not passes_iii then 'label_fidelity'
            else 'passed'
        end as verdict
    from assessed
)
select
    method_id, subject_id, centroid_mm, dice_in_view, best_candidate, best_candidate_dice, in_view_fraction,
    round_trip_dice, passes_i, passes_ii_b, passes_iii, verdict,
    case
        when has_no_own_reference then 'no own reference'
        when dice_in_view is null then 'no reference voxel in view on either side'
        when not passes_ii_b
            then format('{} would give {:.3f}, the declared transform {:.3f}', best_candidate, best_candidate_dice, dice_in_view)
        when not passes_i and centroid_mm is null then 'one of the two references is empty in view'
        when not passes_i then format('centroids are {:.2f} mm apart', centroid_mm)
        when not passes_iii then format('overlap {:.3f} is below the floor', dice_in_view)
    end as reason,
    case when verdict = 'misregistered' then study_lines end as study_lines
from judged
