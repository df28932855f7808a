-- One row per method and candidate transform: its name, and the lines of the study file that would declare it.
-- A transpose swaps what canonical axes 0 and 1 read, a flip toggles a reversal; start and extent stay. An offset moves
-- start[2], and with it the field of view, which a candidate leaves where it is. Where start[2] is "centre" and the
-- subjects' grids differ, no one number of voxels moves them all: then there are no lines, and the reason says so.
-- key: method_id, transposed, flip_0, flip_1, dz
-- columns: candidate, study_lines?, reason?
-- kind: view
with declared as (
    select
        method_id,
        from_json(transform, '{
            "source_axis": ["INTEGER"], "source_size": ["INTEGER"], "reversed": ["BOOLEAN"],
            "start": ["VARCHAR"], "extent": ["VARCHAR"]
        }') as t
    from method
    where kind <> 'baseline'
),
grid as (
    select min(shape_2) as slices, count(distinct shape_2) = 1 as is_shared
    from subject
),
placed as (
    select
        method_id, t,
        case
            when t.start[3] <> 'centre' then t.start[3]::int
            when t.extent[3] = 'full' then 0
            when is_shared then floor((slices - t.extent[3]::int) / 2)::int
        end as start_2,
        [if(word = 'centre', '"centre"', word) for word in t.start] as start
    from declared
    cross join grid
),
member as (
    select transposed, flip_0, flip_1, dz
    from (values (false), (true)) as a (transposed)
    cross join (values (false), (true)) as b (flip_0)
    cross join (values (false), (true)) as c (flip_1)
    cross join (select unnest(range(-3, 4)) as dz)
),
changed as (
    select
        method_id, transposed, flip_0, flip_1, dz,
        dz <> 0 and start_2 is null as is_unsayable,
        concat_ws(
            ' + ',
            case when transposed then 'transpose' end,
            case when flip_0 then 'flip 0' end,
            case when flip_1 then 'flip 1' end,
            case when dz <> 0 then format('offset {:+d}', dz) end
        ) as name,
        concat_ws(
            chr(10),
            case when transposed
                then format('source_axis = [{}, {}, {}]', t.source_axis[2], t.source_axis[1], t.source_axis[3]) end,
            case when transposed and t.source_size is not null
                then format('source_size = [{}, {}, {}]', t.source_size[2], t.source_size[1], t.source_size[3]) end,
            case when dz <> 0
                then format('start = [{}, {}, {}]  # moves the field of view too', start[1], start[2], start_2 - dz) end,
            case when flip_0 or flip_1
                then format('reversed = [{}, {}, {}]', t.reversed[1] <> flip_0, t.reversed[2] <> flip_1, t.reversed[3]) end
        ) as lines
    from placed
    cross join member
)
select
    method_id, transposed, flip_0, flip_1, dz,
    case when name = '' then 'as declared' else name end as candidate,
    case when not is_unsayable and lines <> '' then lines end as study_lines,
    case when is_unsayable
        then 'start[2] is "centre" and the grids of the subjects differ, so no one number of voxels moves them all' end as reason
from changed
