-- One row per method and size class: how far the scores of the test cohort's lesions stand out from the shells around them,
--   whatever the threshold.
-- key: method_id, size_class
-- columns: local_auroc_mean?, local_auroc_mean_low?, local_auroc_mean_high?, local_average_precision_mean?,
--   local_average_precision_mean_low?, local_average_precision_mean_high?, local_average_precision_chance?,
--   n_lesions, n_subjects, n_replicates?, n_short_shells, n_without_shell, size_limit_mm3?
-- stop: n_short_shells <= n_lesions | more shells are short than there are; report this defect
-- stop: n_short_shells > 0 or coalesce(abs(local_average_precision_chance - 0.5) < 1e-9, true) | whole shells hold as many
--   voxels as their lesions, so chance is one half; report this defect

-- Canonical lesions above the floor in the brain, each counted once; the intervals resample subjects with all their
-- lesions, so lesions of a single subject have none. A class without a test lesion has no row. A lesion without a shell is
-- left out of every mean, and counted.
with long as (
    select
        e.method_id, e.subject_id, e.local_auroc, e.local_average_precision, e.lesion_voxels, e.shell_voxels,
        unnest(['all', l.size_class]) as size_class,
        unnest([null, l.size_limit_mm3]) as size_limit_mm3
    from lesion_evidence as e
    join lesion_size as l using (subject_id, lesion_id)
    join ranked_method as m on m.method_id = e.method_id and m.is_ranked
),
counted as (
    select
        method_id, size_class,
        favg(local_auroc) as local_auroc_mean,
        favg(local_average_precision) as local_average_precision_mean,
        favg(lesion_voxels / (lesion_voxels + shell_voxels)) filter (shell_voxels > 0) as local_average_precision_chance,
        count(local_auroc) as n_lesions,
        count(distinct subject_id) filter (local_auroc is not null) as n_subjects,
        count(*) filter (shell_voxels > 0 and shell_voxels < lesion_voxels) as n_short_shells,
        count(*) filter (local_auroc is null) as n_without_shell,
        any_value(size_limit_mm3) as size_limit_mm3
    from long
    where size_class is not null
    group by method_id, size_class
)
select
    method_id, size_class,
    c.local_auroc_mean, i.local_auroc_mean_low, i.local_auroc_mean_high,
    c.local_average_precision_mean, i.local_average_precision_mean_low, i.local_average_precision_mean_high,
    c.local_average_precision_chance,
    c.n_lesions, c.n_subjects, i.n_replicates, c.n_short_shells, c.n_without_shell, c.size_limit_mm3
from counted as c
left join local_contrast_interval as i using (method_id, size_class)
