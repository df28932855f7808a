-- One row per subject: whether it takes part in the comparison, and if not, why.
-- key: subject_id
-- columns: split, voxel_mm3, reference_voxels, is_included, reason?
with misregistered as (
    select subject_id, string_agg(g.method_id, ', ' order by m.position) as methods
    from gate_subject as g
    join ranked_method as m using (method_id)
    where g.verdict = 'misregistered' and m.is_ranked
    group by subject_id
),
unmeasured as (
    select s.subject_id, string_agg(m.method_id, ', ' order by m.position) as methods
    from subject as s
    cross join ranked_method as m
    where m.is_ranked
        and not exists (
            select 1 from voxel_ranking as v where v.method_id = m.method_id and v.subject_id = s.subject_id
        )
    group by s.subject_id
)
select
    s.subject_id, s.split, s.voxel_mm3, s.reference_voxels,
    u.methods is null and (r.methods is null or protocol.misregistered = 'keep') as is_included,
    case
        when u.methods is not null then 'no measurement of ' || u.methods
        when r.methods is not null then 'misregistered for ' || r.methods
    end as reason
from subject as s
left join misregistered as r using (subject_id)
left join unmeasured as u using (subject_id)
cross join protocol
