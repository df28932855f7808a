-- One row per method, post-processing and error mode: what becomes of test lesions at the reference operating point.
-- key: method_id, postprocess_id, error_mode
-- columns: mode_count, n_lesions, share
-- stop: mode_count <= n_lesions | more lesions are in a mode than there are; report this defect

-- Validation threshold at the reference budget, canonical lesions above the floor in the brain. A lesion that no predicted
-- voxel touches has evidence where its scores rank above those of the shell around it (local AUROC above 0.5, its chance
-- level: a constant map has none). Where that was not measured, or no shell is to be had, its mode is not assessable.
with judged as (
    select
        t.method_id, m.postprocess_id,
        case
            when m.matched_iou >= 0.10 then 'detected'
            when m.overlap_voxels > 0 then 'poorly_delineated'
            when e.local_auroc > 0.5 then 'evidence_not_selected'
            when e.local_auroc <= 0.5 then 'no_evidence'
            else 'not_assessable'
        end as error_mode
    from subject_threshold as t
    join lesion_match as m using (method_id, subject_id, level)
    left join lesion_evidence as e using (method_id, subject_id, lesion_id)
    cross join protocol
    where t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
        and t.threshold_rule_id = 'validation' and t.budget_cm3 = protocol.reference_budget_cm3
),
counted as (
    select method_id, postprocess_id, count(*) as n_lesions, histogram(error_mode) as modes
    from judged
    group by all
),
long as (
    select
        method_id, postprocess_id, n_lesions, modes,
        unnest([
            'detected', 'poorly_delineated', 'evidence_not_selected', 'no_evidence', 'not_assessable'
        ]) as error_mode
    from counted
)
select
    method_id, postprocess_id, error_mode,
    coalesce(modes[error_mode], 0) as mode_count,
    n_lesions,
    mode_count / n_lesions as share
from long
