-- One row per method and candidate transform: mean voxel AUROC over test subjects of the maps read by that candidate.
-- key: method_id, transposed, flip_0, flip_1, dz
-- columns: candidate, is_applied, auroc_mean?, n_subjects

-- Canonical reference, brain. It warns, it never chooses: AUROC alone can prefer a wrong transform. Empty without
--   diagnostics.
select
    c.method_id, c.transposed, c.flip_0, c.flip_1, c.dz,
    case
        when c.is_applied then 'as declared'
        else concat_ws(
            ' + ',
            case when c.transposed then 'transpose' end,
            case when c.flip_0 then 'flip 0' end,
            case when c.flip_1 then 'flip 1' end,
            case when c.dz <> 0 then format('offset {:+d}', c.dz) end
        )
    end as candidate,
    c.is_applied,
    favg(c.auroc) as auroc_mean,
    count(c.auroc) as n_subjects
from candidate_ranking as c
join cohort_subject as s on s.subject_id = c.subject_id and s.is_included and s.split = 'test'
join ranked_method as m on m.method_id = c.method_id and m.is_ranked
group by c.method_id, c.transposed, c.flip_0, c.flip_1, c.dz, c.is_applied
