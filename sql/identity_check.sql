-- One row per identity and what it was checked on: two sides that must agree, from different marts or tables.
-- key: identity, item
-- columns: left_value, right_value, difference, tolerance, holds
-- stop: holds | two numbers that must agree do not; the lake or a mart is wrong, so report this defect
with dice_point as (
    select o.*, m.position
    from operating_point as o
    join ranked_method as m on m.method_id = o.method_id and m.kind = 'method'
    where o.postprocess_id = 'plain'
),
-- Identity 1: the contrast at validation thresholds is the contrast at equal burden minus the difference of transfer gaps
identity_1 as (
    select
        'identity_1' as identity,
        format('{} - {} at {:g} cm3', a.method_id, b.method_id, a.budget_cm3) as item,
        a.dice_mean - b.dice_mean as left_value,
        (ga.equal_burden_dice_mean - gb.equal_burden_dice_mean) - (ga.gap_interpolated - gb.gap_interpolated)
            as right_value,
        1e-9 as tolerance
    from dice_point as a
    join dice_point as b using (threshold_rule_id, budget_cm3)
    join transfer_gap as ga on ga.method_id = a.method_id and ga.budget_cm3 = a.budget_cm3
    join transfer_gap as gb on gb.method_id = b.method_id and gb.budget_cm3 = b.budget_cm3
    where a.threshold_rule_id = 'validation' and a.position < b.position
        and a.dice_mean is not null and b.dice_mean is not null
),
-- Identity 2: pooled minus mean Dice is n times the covariance of Dice with the share of predicted and reference voxels
with_reference as (
    select
        *,
        predicted_voxels + reference_voxels as size,
        count(*) over point as n,
        sum(predicted_voxels + reference_voxels) over point as total_size,
        sum(true_positive_voxels) over point as total_hits
    from operating_subject
    where reference_voxels > 0
    window point as (partition by method_id, threshold_rule_id, budget_cm3, postprocess_id)
),
covariance as (
    select
        method_id, threshold_rule_id, budget_cm3, postprocess_id,
        fsum((size / total_size - 1 / n) * dice) as n_covariance,
        any_value(n) as n
    from with_reference
    group by all
),
curve_point as (
    -- the other side from the subjects' curves at one level for all; an empty reference has no Dice to covary
    select
        t.method_id, t.threshold_rule_id, t.budget_cm3, c.postprocess_id,
        2 * sum(c.true_positive_voxels)::double / sum(c.predicted_voxels + c.reference_voxels)
            - favg(2 * c.true_positive_voxels / (c.predicted_voxels + c.reference_voxels)) as pooled_minus_mean
    from threshold_choice as t
    join subject_curve as c using (method_id, reference_id, support_id, voxel_volume_id, level)
    where c.split = 'test' and c.reference_voxels > 0
        and t.reference_id = 'canonical' and t.support_id = 'brain' and t.voxel_volume_id = 'true'
    group by all
    union all
    -- where the validation rule is cross-fitted, every fold at the level chosen without it
    select
        x.method_id, 'validation' as threshold_rule_id, x.budget_cm3, c.postprocess_id,
        2 * sum(c.true_positive_voxels)::double / sum(c.predicted_voxels + c.reference_voxels)
            - favg(2 * c.true_positive_voxels / (c.predicted_voxels + c.reference_voxels)) as pooled_minus_mean
    from crossfit_threshold as x
    join crossfit_fold as f using (fold)
    join subject_curve as c
        on c.method_id = x.method_id and c.reference_id = x.reference_id and c.support_id = x.support_id
        and c.voxel_volume_id = x.voxel_volume_id and c.level = x.level and c.subject_id = f.subject_id
    where c.reference_voxels > 0
        and x.reference_id = 'canonical' and x.support_id = 'brain' and x.voxel_volume_id = 'true'
    group by all
),
identity_2 as (
    select
        'identity_2' as identity,
        format('{} {} {} at {:g} cm3', v.method_id, v.threshold_rule_id, v.postprocess_id, v.budget_cm3) as item,
        p.pooled_minus_mean as left_value,
        v.n_covariance as right_value,
        1e-9 as tolerance
    from covariance as v
    join curve_point as p using (method_id, threshold_rule_id, budget_cm3, postprocess_id)
    where p.pooled_minus_mean is not null
),
-- predicted voxels are true and false positives: the histogram's voxels above zero are those predicted at level 0
histogram_total as (
    select
        method_id, split, reference_id, support_id,
        sum(positive_voxels + negative_voxels) as predicted_voxels, sum(positive_voxels) as true_positive_voxels
    from pooled_histogram
    where bin > 0
    group by all
),
predicted as (
    select
        'true_and_false_positives' as identity,
        format('{} {} {} {}', c.method_id, c.split, c.reference_id, c.support_id) as item,
        (c.predicted_voxels_total + c.true_positive_voxels_total)::double as left_value,
        coalesce(h.predicted_voxels + h.true_positive_voxels, 0)::double as right_value,
        0 as tolerance
    from cohort_curve as c
    left join histogram_total as h using (method_id, split, reference_id, support_id)
    where c.level = 0 and c.voxel_volume_id = 'true' and c.postprocess_id = 'plain'
),
-- the support's voxels are the brain's
counted as (
    select
        'support_voxels' as identity,
        format('{} {}', v.method_id, v.reference_id) as item,
        sum(v.positive_voxels + v.negative_voxels)::double as left_value,
        sum(s.brain_voxels)::double as right_value,
        0 as tolerance
    from voxel_ranking as v
    join subject as s using (subject_id)
    where v.support_id = 'brain'
    group by v.method_id, v.reference_id
),
-- Identity 5: a gain at equal burden is the effect at the same threshold plus what the relaxed threshold brings
identity_5 as (
    select
        'identity_5' as identity,
        format('{} {} at {:g} cm3', g.method_id, g.postprocess_id, g.budget_cm3) as item,
        g.total_gain as left_value,
        p.dice_mean - q.dice_mean + g.relaxation as right_value,
        1e-9 as tolerance
    from postprocess_gain as g
    join operating_point as p using (method_id, budget_cm3, postprocess_id)
    join operating_point as q
        on q.method_id = g.method_id and q.budget_cm3 = g.budget_cm3 and q.threshold_rule_id = p.threshold_rule_id
        and q.postprocess_id = 'plain'
    where p.threshold_rule_id = 'validation'
),
-- floor identity: where no lesion below the floor is hit, sensitivities differ by their denominators alone
lesion_number as (
    select l.lesion_definition_id, count(*) as lesions
    from lesion as l
    join cohort_subject as s on s.subject_id = l.subject_id and s.is_included and s.split = 'test'
    where l.method_id is null
    group by all
),
floor_pair as (
    select
        a.method_id, a.threshold_rule_id, a.budget_cm3, a.postprocess_id, a.hit_criterion_id,
        a.sensitivity_pooled as of_all, a.lesion_total as all_total,
        f.sensitivity_pooled as above_floor, f.lesion_total as floor_total
    from lesion_score as a
    join lesion_score as f using (
        method_id, reference_id, support_id, voxel_volume_id, threshold_rule_id, budget_cm3, postprocess_id,
        hit_criterion_id
    )
    where a.reference_id = 'canonical' and a.support_id = 'brain' and a.voxel_volume_id = 'true'
        and a.lesion_definition_id = 'conn6_all' and f.lesion_definition_id = 'conn6_floor'
        and round(a.sensitivity_pooled * a.lesion_total) = round(f.sensitivity_pooled * f.lesion_total)
),
floor_identity as (
    select
        'floor_identity' as identity,
        format('{} {} {} {} at {:g} cm3', method_id, threshold_rule_id, postprocess_id, hit_criterion_id, budget_cm3)
            as item,
        of_all as left_value,
        above_floor * f.lesions / a.lesions as right_value,
        1e-9 as tolerance
    from floor_pair
    cross join (select lesions from lesion_number where lesion_definition_id = 'conn6_floor') as f
    cross join (select lesions from lesion_number where lesion_definition_id = 'conn6_all') as a
),
-- classes of lesion size, counted lesion by lesion, add up to the sensitivity that hits per subject give
size_class_sum as (
    select
        method_id, threshold_rule_id, budget_cm3, postprocess_id, lesion_definition_id, hit_criterion_id,
        sum(hit_count)::double / sum(n_lesions) as sensitivity
    from lesion_sensitivity
    where size_class <> 'all'
    group by all
),
size_classes as (
    select
        'lesion_size_classes' as identity,
        format('{} {} {} {} at {:g} cm3', method_id, threshold_rule_id, postprocess_id, hit_criterion_id, budget_cm3)
            as item,
        c.sensitivity as left_value,
        s.sensitivity_pooled as right_value,
        1e-9 as tolerance
    from size_class_sum as c
    join lesion_score as s using (
        method_id, threshold_rule_id, budget_cm3, postprocess_id, lesion_definition_id, hit_criterion_id
    )
    where s.reference_id = 'canonical' and s.support_id = 'brain' and s.voxel_volume_id = 'true'
),
-- coverage identity: a prediction inside the reference has Dice 2 r / (1 + r), r being the share it covers
covered as (
    select c.method_id, c.dice, c.predicted_voxels / v.positive_voxels as coverage
    from subject_curve as c
    join voxel_ranking as v using (method_id, subject_id, reference_id, support_id)
    where c.reference_id = 'canonical' and c.support_id = 'brain' and c.voxel_volume_id = 'true'
        and c.false_positive_voxels = 0 and c.predicted_voxels > 0
),
coverage_identity as (
    select
        'coverage_identity' as identity,
        format('{}, {} predictions inside the reference', method_id, count(*)) as item,
        fsum(dice) as left_value,
        fsum(2 * coverage / (1 + coverage)) as right_value,
        1e-9 as tolerance
    from covered
    group by method_id
),
-- pooled AUROC: the block within subjects, exact, against the same block from histograms, within the bins' error bound
bin as (
    -- one number stands for a subject's histogram, and rows are narrow: millions are sorted here. A sum of whole doubles
    -- is exact and fast
    select
        histogram, positive_voxels, negative_voxels,
        sum(negative_voxels::double) over (partition by histogram order by bin rows unbounded preceding)
            - negative_voxels as negative_below
    from (
        select
            hash(h.method_id, h.subject_id) as histogram, h.bin,
            h.positive_voxels::uinteger as positive_voxels, h.negative_voxels::uinteger as negative_voxels
        from score_histogram as h
        join cohort_subject as s on s.subject_id = h.subject_id and s.is_included and s.split = 'test'
        where h.reference_id = 'canonical' and h.support_id = 'brain'
    )
),
subject_block as (
    select
        histogram,
        fsum(positive_voxels * (2 * negative_below + negative_voxels)) / 2 as outranked,
        fsum(positive_voxels::double * negative_voxels) / 2 as undecided
    from bin
    group by all
),
block as (
    select
        v.method_id, v.reference_id, v.support_id,
        fsum(b.outranked) as outranked, fsum(b.undecided) as undecided
    from subject_block as b
    join voxel_ranking as v on hash(v.method_id, v.subject_id) = b.histogram
    where v.reference_id = 'canonical' and v.support_id = 'brain'
    group by all
),
pooled_blocks as (
    select
        'pooled_auroc_block' as identity,
        format('{} {} {}', p.method_id, p.reference_id, p.support_id) as item,
        p.auroc_within as left_value,
        b.outranked / (p.positive_voxels::double * p.negative_voxels) as right_value,
        1e-9 + b.undecided / (p.positive_voxels::double * p.negative_voxels) as tolerance
    from pooled_ranking as p
    join block as b using (method_id, reference_id, support_id)
    where p.positive_voxels > 0 and p.negative_voxels > 0
),
plain_curve as (
    from reference_curve
    where postprocess_id = 'plain'
),
-- diagnostics: the declared variant is the map as it is measured otherwise, and a corruption is a candidate transform
declared_variant as (
    select
        'declared_variant' as identity,
        v.method_id as item,
        fsum(v.auroc) as left_value,
        fsum(r.auroc) as right_value,
        1e-9 as tolerance
    from variant_ranking as v
    join voxel_ranking as r using (method_id, subject_id)
    where v.variant_id = 'declared' and r.reference_id = 'canonical' and r.support_id = 'brain' and v.auroc is not null
    group by v.method_id
),
declared_count as (
    select
        'declared_variant_count' as identity,
        v.method_id as item,
        sum(v.predicted_voxels + v.true_positive_voxels)::double as left_value,
        sum(c.predicted_voxels + c.true_positive_voxels)::double as right_value,
        0 as tolerance
    from variant_curve as v
    join plain_curve as c using (method_id, subject_id, level)
    where v.variant_id = 'declared'
    group by v.method_id
),
declared_hit as (
    select
        'declared_variant_hit' as identity,
        v.method_id as item,
        sum(v.hit_iou_10 + v.lesion_count)::double as left_value,
        sum(c.hit_iou_10 + c.lesion_count)::double as right_value,
        0 as tolerance
    from variant_curve as v
    join plain_curve as c using (method_id, subject_id, level)
    where v.variant_id = 'declared' and c.lesion_count is not null
    group by v.method_id
),
candidate_variant as (
    select
        'candidate_variant' as identity,
        format('{} {}', v.method_id, v.variant_id) as item,
        fsum(c.auroc) as left_value,
        fsum(v.auroc) as right_value,
        1e-9 as tolerance
    from variant_ranking as v
    join candidate_ranking as c
        on c.method_id = v.method_id and c.subject_id = v.subject_id
        and c.transposed = (v.variant_id = 'transpose')
        and c.flip_0 = (v.variant_id = 'flip_left_right')
        and c.flip_1 = (v.variant_id = 'flip_anterior_posterior')
        and c.dz = case v.variant_id when 'shift_minus_2' then -2 when 'shift_plus_2' then 2 else 0 end
    where v.auroc is not null and v.variant_id in (
        'declared', 'transpose', 'flip_left_right', 'flip_anterior_posterior', 'shift_minus_2', 'shift_plus_2'
    )
    group by v.method_id, v.variant_id
),
-- what is predicted of the lesions' regions, and of the components that hold reference voxels, is what the curve says
region_total as (
    select
        method_id,
        sum(region_predicted_voxels + overlap_voxels)::double as voxels,
        list(distinct subject_id) as subjects
    from region_curve
    group by method_id
),
component_total as (
    select
        method_id,
        sum(component_true_positive_voxels * component_count)::double as voxels,
        list(distinct subject_id) as subjects
    from component_overlap
    group by method_id
),
region_sum as (
    select
        'region_sum' as identity,
        c.method_id as item,
        any_value(r.voxels) as left_value,
        sum(c.predicted_voxels + c.true_positive_voxels)::double as right_value,
        0 as tolerance
    from region_total as r
    cross join unnest(r.subjects) as s(subject_id)
    join plain_curve as c on c.method_id = r.method_id and c.subject_id = s.subject_id
    group by c.method_id
),
component_sum as (
    select
        'component_sum' as identity,
        c.method_id as item,
        any_value(o.voxels) as left_value,
        sum(c.true_positive_voxels)::double as right_value,
        0 as tolerance
    from component_total as o
    cross join unnest(o.subjects) as s(subject_id)
    join plain_curve as c on c.method_id = o.method_id and c.subject_id = s.subject_id
    group by c.method_id
),
every_side as (
    from identity_1
    union all by name
    from identity_2
    union all by name
    from identity_5
    union all by name
    from floor_identity
    union all by name
    from size_classes
    union all by name
    from coverage_identity
    union all by name
    from pooled_blocks
    union all by name
    from predicted
    union all by name
    from counted
    union all by name
    from declared_variant
    union all by name
    from declared_count
    union all by name
    from declared_hit
    union all by name
    from candidate_variant
    union all by name
    from region_sum
    union all by name
    from component_sum
)
select
    identity, item, left_value, right_value,
    left_value - right_value as difference,
    tolerance::double as tolerance,
    abs(left_value - right_value) <= tolerance as holds
from every_side
