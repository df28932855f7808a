-- One row per method and test subject with a second reference: how far the Jaccard bound is from being broken.
-- key: method_id, subject_id
-- columns: distance_difference, reference_distance, excess
-- stop: excess <= 1e-9 | the Jaccard distance is a metric, so the counts contradict each other; report this defect

-- |d_J(P, R_A) - d_J(P, R_B)| <= d_J(R_A, R_B) for the prediction P at the validation threshold and reference budget, the
--   canonical reference R_A and the mapped own reference R_B. The prediction lies in the brain; both references are taken
--   whole, also outside the brain, since the overlap of the two is measured so. Two empty sets have distance 0.
with operating as (
    select t.method_id, t.subject_id, t.level
    from subject_threshold as t
    join protocol on protocol.reference_budget_cm3 = t.budget_cm3
    where t.threshold_rule_id = 'validation'
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
),
predicted as (
    select
        c.method_id, c.subject_id,
        any_value(c.predicted_voxels)::double as predicted,
        (max(c.true_positive_voxels) filter (where c.reference_id = 'canonical'))::double as shared_canonical,
        (max(c.true_positive_voxels) filter (where c.reference_id = 'own_mapped'))::double as shared_own
    from threshold_curve as c
    join operating as o using (method_id, subject_id, level)
    join cohort_subject as s on s.subject_id = c.subject_id and s.is_included and s.split = 'test'
    where c.reference_id in ('canonical', 'own_mapped') and c.support_id = 'brain'
        and c.voxel_volume_id = 'true' and c.postprocess_id = 'plain'
    group by all
),
counted as (
    select
        p.*,
        s.reference_voxels + s.reference_outside_voxels as canonical,
        o.own_in_view_voxels as own,
        round(coalesce(a.dice, 0) * (o.own_in_view_voxels + o.in_view_voxels) / 2) as shared_references
    from predicted as p
    join subject as s using (subject_id)
    join gate_overlap as o using (method_id, subject_id)
    join gate_candidate as a on a.method_id = p.method_id and a.subject_id = p.subject_id and a.is_applied
),
distances as (
    select
        method_id, subject_id,
        coalesce(1 - shared_canonical / nullif(predicted + canonical - shared_canonical, 0), 0) as to_canonical,
        coalesce(1 - shared_own / nullif(predicted + own - shared_own, 0), 0) as to_own,
        coalesce(1 - shared_references / nullif(canonical + own - shared_references, 0), 0) as reference_distance
    from counted
)
select
    method_id, subject_id,
    abs(to_canonical - to_own) as distance_difference,
    reference_distance,
    abs(to_canonical - to_own) - reference_distance as excess
from distances
