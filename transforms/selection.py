"""Which training set a rule would choose for each model, and how often resampled cohorts repeat the choice.

Every rule compares a model's training sets by one criterion on one cohort, on plain maps against the canonical
reference in the brain under the true voxel volume; the highest value wins, ties go to the primary training set, then to
declared order. Source: Tables 60 and 61 of MIRTO (Kafee Hernashki & Chatterjee, 2026). The paper names the criteria
without their thresholds; its values (pooled and median Dice far above Dice at 20 cm3) fit the best over all thresholds,
without a budget, which is what stands here. In a resampled cohort everything that the rule does is done anew, the
choice of the threshold included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from expectations.protocol import Parameters, Protocol
from transforms.catalog import Inputs, declared
from transforms.contrasts import REFERENCE_SETTING, Curve
from transforms.replicates import dense, dice_values, mean_and_median, numbers
from transforms.resampling import (
    Flags,
    Floats,
    Integers,
    Resample,
    by_block,
    divided,
    draw,
    exact,
    mean_burdens,
    medians,
)

COHORT = """
    cohort as (
        select subject_id, (row_number() over (order by subject_id) - 1)::usmallint as subject
        from cohort_subject
        where is_included and split = '$value'
    ),
    candidate as (select method_id from configuration where is_ranked)"""


@dataclass(frozen=True)
class Candidate:
    """One configuration's measurements on a cohort.

    Attributes:
        curve: Voxel counts, levels x subjects.
        hits: Lesions hit at IoU 0.10, levels x subjects.
        lesions: Lesions above the floor, by subject.
        precision: Average precision by subject; NaN without reference voxels.
        parameters: Of the protocol.
        voxel_mm3: Volume of a voxel.
    """

    curve: Curve
    hits: Floats
    lesions: Floats
    precision: Floats
    parameters: Parameters
    voxel_mm3: float

    @cached_property
    def dice(self) -> Floats:
        """Dice of the subjects that have one, levels x subjects, rounded so that its sums are exact."""
        values = self._dice[:, self.has_dice]
        return exact(values, values.shape[1])

    @cached_property
    def has_dice(self) -> Flags:
        """Whether each subject has a Dice."""
        return ~np.isnan(self._dice[0])

    @cached_property
    def _dice(self) -> Floats:
        curve = self.curve
        return dice_values(curve.predicted, curve.true_positive, curve.reference, self.parameters.empty_dice)


Criterion = Callable[[Candidate, Resample], Floats]


def pooled_dice(candidate: Candidate, resample: Resample) -> Floats:
    """Best pooled Dice over all thresholds, by replicate; NaN without a voxel."""
    curve = candidate.curve
    size = resample.sums(curve.predicted + curve.reference)
    return highest(divided(2 * resample.sums(curve.true_positive), size))


def median_dice(candidate: Candidate, resample: Resample) -> Floats:
    """Best median Dice over all thresholds, by replicate; NaN where no subject has a Dice."""
    values, inside = candidate.dice, resample.among(candidate.has_dice)
    levels, replicates = len(values), len(resample.counts)
    if values.shape[1] == 0:
        return np.full(replicates, np.nan)
    choice = np.repeat(np.arange(levels)[:, None], replicates, axis=1)
    return highest(medians(inside, values[None], choice)[0])


def budget_dice(candidate: Candidate, resample: Resample) -> Floats:
    """Mean Dice at the threshold that the cohort itself would choose at the reference budget, by replicate.

    The rule is the validation rule (protocol, section 6): levels whose mean burden keeps the budget, of these the ones
    that hit nearly as many lesions as the best of them, of these the highest mean Dice.
    """
    curve, parameters = candidate.curve, candidate.parameters
    inside = resample.among(candidate.has_dice)
    dice = divided(inside.sums(candidate.dice), inside.sizes)
    burdens = mean_burdens(resample, curve.predicted - curve.true_positive, candidate.voxel_mm3)
    is_feasible = burdens <= parameters.reference_budget_cm3
    hits = np.where(is_feasible, resample.sums(candidate.hits), -np.inf)
    tolerated = np.maximum(1, np.floor(parameters.guard_share * resample.sums(candidate.lesions)))
    is_guarded = is_feasible & (hits >= hits.max(axis=0) - tolerated)
    return highest(np.where(is_guarded, dice, np.nan))


def mean_precision(candidate: Candidate, resample: Resample) -> Floats:
    """Mean average precision, by replicate; NaN where no subject has one."""
    return mean_and_median(resample, candidate.precision)[0]


def highest(values: Floats) -> Floats:
    """Highest value over the first axis, NaN left out; NaN where all are."""
    best = np.where(np.isnan(values), -np.inf, values).max(axis=0)
    return np.where(best == -np.inf, np.nan, best)


@dataclass(frozen=True)
class Rule:
    """A selection rule; one without a criterion is unavailable, for a reason."""

    selection_rule_id: str
    split: str
    criterion: Criterion | None
    reason: str | None = None


# In the paper's order. Its diagnostic on test takes the criterion that comes first: here the first that is available.
RULES = (
    Rule("validation_slice_dice_median", "validation", None, "Dice by slice is not measured"),
    Rule("validation_dice_pooled", "validation", pooled_dice),
    Rule("validation_dice_median", "validation", median_dice),
    Rule("validation_dice_budget", "validation", budget_dice),
    Rule("validation_voxel_ap", "validation", mean_precision),
    Rule("test_dice_pooled", "test", pooled_dice),
)


@declared(
    name="configuration_choice",
    row="One row per selection rule and training set of a model that has several: the criterion, whether the rule "
    "chooses it, and in how many resampled cohorts.",
    key=("selection_rule_id", "method_id"),
    columns=(
        *("model_id", "split", "position", "value?", "n_subjects", "is_chosen", "chosen_count", "n_replicates"),
        *("status", "reason?"),
    ),
    inputs=("configuration", "cohort_subject", "threshold_curve", "lesion_curve", "voxel_ranking"),
    queries={
        "subject": f"with {COHORT} from cohort order by subject",
        "curve": f"""
            with {COHORT}
            select c.method_id, s.subject, c.level, c.predicted_voxels, c.true_positive_voxels, c.reference_voxels
            from threshold_curve as c
            join candidate using (method_id)
            join cohort as s using (subject_id)
            where {REFERENCE_SETTING} and c.postprocess_id = 'plain'""",
        "lesion": f"""
            with {COHORT}
            select c.method_id, s.subject, c.level, c.hit_iou_10, c.lesion_count
            from lesion_curve as c
            join candidate using (method_id)
            join cohort as s using (subject_id)
            where {REFERENCE_SETTING} and c.postprocess_id = 'plain' and c.lesion_definition_id = 'conn6_floor'""",
        "precision": f"""
            with {COHORT}
            select v.method_id, s.subject, v.average_precision
            from voxel_ranking as v
            join candidate using (method_id)
            join cohort as s using (subject_id)
            where v.reference_id = 'canonical' and v.support_id = 'brain' and v.average_precision is not null""",
    },
)
def configuration_choice(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Choices of training sets by every rule, over `contrast_replicates` resampled cohorts."""
    ranked = inputs["configuration"].filter("is_ranked").sort("model_position", "position")
    several = ranked.filter(pl.col("method_id").count().over("model_id") > 1)
    models = {
        str(key[0]): part.get_column("method_id").to_list()
        for key, part in several.partition_by("model_id", as_dict=True, maintain_order=True).items()
    }
    rows: list[tuple[object, ...]] = []
    for split in ("validation", "test") if models else ():
        rules = [(position, rule) for position, rule in enumerate(RULES) if rule.split == split]
        rows += _split_rows(protocol, inputs, models, rules)
    return configuration_choice.table.frame(rows)


def _split_rows(
    protocol: Protocol, inputs: Inputs, models: Mapping[str, Sequence[str]], rules: Sequence[tuple[int, Rule]]
) -> list[tuple[object, ...]]:
    """The rows of one cohort's rules."""
    parameters, split = protocol.parameters, rules[0][1].split
    subjects = inputs[f"subject:{split}"].height
    resample = draw(subjects, parameters.contrast_replicates, parameters.seed)
    methods = [method for ids in models.values() for method in ids]
    candidates = _candidates(inputs, split, methods, parameters) if subjects else {}
    rows: list[tuple[object, ...]] = []
    for position, rule in rules:
        reason = rule.reason if subjects else f"the cohort has no {split} subject"
        for model, ids in models.items():
            about = [(rule.selection_rule_id, method, model, split, position) for method in ids]
            if rule.criterion is None or reason is not None:
                rows += [(*key, None, subjects, False, 0, 0, "unavailable", reason) for key in about]
                continue
            values = np.stack([_replicated(rule.criterion, candidates[m], resample) for m in ids])
            counted = [_subjects(rule.criterion, candidates[method]) for method in ids]
            found = chosen_rows(values, parameters.tie_tolerance)
            rows += [(*key, v, n, *rest) for key, n, (v, *rest) in zip(about, counted, found, strict=True)]
    return rows


def _candidates(inputs: Inputs, split: str, methods: Sequence[str], parameters: Parameters) -> dict[str, Candidate]:
    """Measurements of every configuration on a cohort that has a subject."""
    shape = (parameters.level_count + 1, inputs[f"subject:{split}"].height)
    voxel_mm3 = float(inputs["cohort_subject"].filter("is_included").get_column("voxel_mm3")[0])
    parts = {name: inputs[f"{name}:{split}"] for name in ("curve", "lesion", "precision")}
    candidates: dict[str, Candidate] = {}
    for method in methods:
        curve, lesion, precision = (parts[name].filter(method_id=method) for name in ("curve", "lesion", "precision"))
        places = [numbers(lesion, "level").astype(np.int64), numbers(lesion, "subject").astype(np.int64)]
        by_subject = np.full(shape[1], np.nan)
        by_subject[numbers(precision, "subject").astype(np.int64)] = numbers(precision, "average_precision")
        candidates[method] = Candidate(
            Curve.of(curve, *shape),
            dense(lesion, places, shape, "hit_iou_10").astype(np.float64),
            dense(lesion, places, shape, "lesion_count").astype(np.float64)[0],
            by_subject,
            parameters,
            voxel_mm3,
        )
    return candidates


def _replicated(criterion: Criterion, candidate: Candidate, resample: Resample) -> Floats:
    """A criterion in every replicate, replicate 0 (every subject once) first."""
    return by_block(resample, lambda block: criterion(candidate, block))


def _subjects(criterion: Criterion, candidate: Candidate) -> int:
    """Subjects behind a criterion: those that define it; all of them where voxels are pooled."""
    if criterion is pooled_dice:
        return len(candidate.lesions)
    if criterion is mean_precision:
        return int((~np.isnan(candidate.precision)).sum())
    return int(candidate.has_dice.sum())


def chosen_rows(values: Floats, tolerance: float) -> list[tuple[float | None, bool, int, int, str, str | None]]:
    """What a rule makes of the criterion.

    Args:
        values: Training sets in order of preference x replicates, replicate 0 the point estimate; NaN where undefined.
        tolerance: Smaller differences are ties, which go to the earlier training set.

    Returns:
        For each training set: value, whether it is chosen, in how many replicates, of how many that have a choice,
        status and reason. A training set without a value is never chosen.
    """
    choices = choose(values, tolerance)
    defined = int((choices[1:] >= 0).sum())
    rows: list[tuple[float | None, bool, int, int, str, str | None]] = []
    for place, value in enumerate(values[:, 0].tolist()):
        count = int((choices[1:] == place).sum())
        if np.isnan(value):
            rows.append((None, False, count, defined, "unavailable", "no subject of the cohort defines the criterion"))
        else:
            rows.append((value, bool(choices[0] == place), count, defined, "ok", None))
    return rows


def choose(values: Floats, tolerance: float) -> Integers:
    """The first training set (rows) within `tolerance` of the highest value, by replicate; -1 where none has any."""
    best = highest(values)
    is_best = values >= best - tolerance
    return np.where(is_best.any(axis=0), is_best.argmax(axis=0), -1)
