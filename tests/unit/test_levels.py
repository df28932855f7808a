import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from expectations.protocol import Protocol, protocol
from expectations.tables import breaches
from transforms.levels import Drop, drop_levels, dropped_level

Flags = NDArray[np.bool_]
Kept = list[set[int]]


def universes(kept: Kept) -> list[tuple[int, ...]]:
    return list(itertools.product(*(sorted(levels) for levels in kept)))


def left_after(scored: Flags, drops: list[Drop]) -> Kept:
    kept = [set(range(size)) for size in scored.shape]
    for drop in drops:
        kept[drop.axis].remove(drop.level)  # a level is dropped once
    return kept


def unmeasured(scored: Flags, acting: Flags) -> list[Drop]:
    """Metrics without any score, then levels without any score among the metrics on which their axis acts."""
    metric, every = scored.ndim - 1, universes([set(range(size)) for size in scored.shape])
    metrics = {m for m in range(scored.shape[metric]) if any(scored[u] for u in every if u[metric] == m)}
    drops = [Drop(metric, m, True) for m in range(scored.shape[metric]) if m not in metrics]
    for axis, size in enumerate(scored.shape[:metric]):
        acts = [u for u in every if u[metric] in metrics and acting[u[metric], axis]]
        for level in range(size):
            mine = [u for u in acts if u[axis] == level]
            drops += [Drop(axis, level, True)] if mine and not any(scored[u] for u in mine) else []
    return drops


def costliest(scored: Flags, kept: Kept) -> Drop | None:
    """The level with a hole without which the largest share, then the most, of the universes left are scored."""
    best, best_rank = None, (Fraction(-1), -1)
    for axis in range(scored.ndim - 1):
        for level in sorted(kept[axis]):
            rest = [bool(scored[u]) for u in universes(kept) if u[axis] != level]
            has_hole = any(not scored[u] for u in universes(kept) if u[axis] == level)
            rank = (Fraction(sum(rest), len(rest)), sum(rest)) if rest else (Fraction(-1), -1)
            if has_hole and rank > best_rank:
                best, best_rank = Drop(axis, level, False), rank
    return best


def dropped_one_by_one(scored: Flags, acting: Flags) -> list[Drop]:
    """The documented search with loops over universes."""
    metric, drops = scored.ndim - 1, unmeasured(scored, acting)
    while True:
        kept = left_after(scored, drops)
        if all(scored[u] for u in universes(kept)):
            return drops
        silent = [m for m in sorted(kept[metric]) if not any(scored[u] for u in universes(kept) if u[metric] == m)]
        found = Drop(metric, silent[0], False) if silent else costliest(scored, kept)
        assert found is not None
        drops.append(found)


@st.composite
def designs(draw: st.DrawFn) -> tuple[Flags, Flags]:
    """Scored universes of a tiny design, mostly full, and which axis acts on which metric."""
    shape = draw(st.tuples(*[st.integers(1, 3)] * draw(st.integers(1, 3)), st.integers(1, 3)))
    holes = draw(st.sets(st.tuples(*(st.integers(0, size - 1) for size in shape)), max_size=6))
    scored = np.ones(shape, np.bool_)
    for hole in holes:
        scored[hole] = False
    acting = draw(hnp.arrays(np.bool_, (shape[-1], len(shape)), fill=st.nothing()))
    return scored, acting


@st.composite
def sparse_designs(draw: st.DrawFn) -> tuple[Flags, Flags]:
    """Any pattern of scores."""
    shape = draw(st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 3)))
    scored = draw(hnp.arrays(np.bool_, shape, fill=st.nothing()))
    return scored, draw(hnp.arrays(np.bool_, (shape[-1], len(shape)), fill=st.nothing()))


DESIGNS = st.one_of(designs(), sparse_designs())


@settings(deadline=None, max_examples=60)
@given(DESIGNS)
def test_drops_equal_the_search_by_loops(design: tuple[Flags, Flags]) -> None:
    assert drop_levels(*design) == dropped_one_by_one(*design)


@settings(deadline=None, max_examples=60)
@given(DESIGNS)
def test_no_hole_is_left_and_the_search_repeats_itself(design: tuple[Flags, Flags]) -> None:
    scored, acting = design
    drops = drop_levels(scored, acting)
    assert all(scored[universe] for universe in universes(left_after(scored, drops)))
    assert drop_levels(scored.copy(), np.asfortranarray(acting)) == drops


@settings(deadline=None, max_examples=60)
@given(DESIGNS)
def test_a_level_that_is_not_dropped_for_want_of_measurement_had_a_hole(design: tuple[Flags, Flags]) -> None:
    scored, acting = design
    drops = drop_levels(scored, acting)
    assert [drop.is_unmeasured for drop in drops] == sorted((drop.is_unmeasured for drop in drops), reverse=True)
    for position, drop in enumerate(drops):
        if not drop.is_unmeasured:
            kept = left_after(scored, drops[:position])
            assert any(not scored[u] for u in universes(kept) if u[drop.axis] == drop.level)


@settings(deadline=None, max_examples=60)
@given(DESIGNS)
def test_a_complete_design_drops_nothing(design: tuple[Flags, Flags]) -> None:
    scored, acting = design
    assert drop_levels(np.ones_like(scored), acting) == []


@settings(deadline=None, max_examples=60)
@given(DESIGNS)
def test_what_is_left_is_complete_by_itself(design: tuple[Flags, Flags]) -> None:
    scored, acting = design
    kept = [sorted(levels) for levels in left_after(scored, drop_levels(scored, acting))]
    assert drop_levels(scored[np.ix_(*kept)], acting[kept[-1]]) == []


ACTS = np.ones((2, 3), np.bool_)


def test_a_metric_without_score_goes_first() -> None:
    scored = np.ones((2, 2, 2), np.bool_)
    scored[..., 1] = False
    scored[0, :, 0] = False
    assert drop_levels(scored, ACTS) == [Drop(2, 1, True), Drop(0, 0, True)]


def test_a_design_without_score_loses_every_metric_and_nothing_else() -> None:
    assert drop_levels(np.zeros((2, 3, 2), np.bool_), ACTS) == [Drop(2, 0, True), Drop(2, 1, True)]


def test_a_level_that_no_metric_on_which_its_axis_acts_has_measured_goes_though_others_replicate_a_value() -> None:
    scored = np.ones((2, 2, 2), np.bool_)
    scored[1, :, 0] = False  # only metric 0 is acted on by axis 0; metric 1 repeats its value over it
    acting = np.array([[True, True, True], [False, True, True]])
    assert drop_levels(scored, acting) == [Drop(0, 1, True)]


def test_a_tie_goes_to_the_earlier_axis() -> None:
    scored = np.ones((2, 2, 1), np.bool_)
    scored[1, 1] = False  # without either level two scored universes are left
    assert drop_levels(scored, ACTS[:1]) == [Drop(0, 1, False)]


def test_a_tie_goes_to_the_earlier_level() -> None:
    scored = np.ones((3, 1, 2), np.bool_)
    scored[1, 0, 0] = scored[2, 0, 1] = False
    assert drop_levels(scored, ACTS) == [Drop(0, 1, False), Drop(0, 2, False)]


def test_the_level_whose_removal_leaves_most_goes_first_whatever_its_axis() -> None:
    scored = np.ones((2, 4, 1), np.bool_)
    scored[0, 3] = False  # without axis 0's level 0 four are left, without axis 1's level 3 six
    assert drop_levels(scored, ACTS[:1]) == [Drop(1, 3, False)]


def test_a_level_of_many_does_not_pay_for_a_hole_that_it_cannot_mend() -> None:
    """The hole lies in level 1 of the short axis; giving up levels of the long one leaves more but mends nothing."""
    scored = np.ones((5, 2, 2), np.bool_)
    scored[:, 1, 0] = False
    scored[4, 1, 0] = True
    assert drop_levels(scored, ACTS) == [Drop(1, 1, False)]


def test_one_infeasible_budget_does_not_cost_a_metric() -> None:
    scored = np.ones((1, 4, 2), np.bool_)
    scored[0, 3, 0] = False
    assert drop_levels(scored, ACTS) == [Drop(1, 3, False)]


def test_two_metrics_that_share_no_universe_leave_one_of_them() -> None:
    """Dropping levels for one metric must not empty the design: a metric left without score goes instead."""
    scored = np.zeros((2, 2, 2), np.bool_)
    scored[0, 0, 1] = scored[1, 1, 0] = True
    kept = left_after(scored, drop_levels(scored, ACTS))
    assert all(kept)
    assert all(scored[universe] for universe in universes(kept))


SHAPE = tuple(len(axis.levels) for axis in protocol().axes)
COLUMNS = [axis.column for axis in protocol().axes]
METRIC_AXIS = pl.DataFrame(
    [(metric.id, column) for metric in protocol().axis("metric_id").levels for column in metric.acts],
    schema=["metric_id", "axis_column"],
    orient="row",
)
METHODS = [("z-image", "baseline", True), ("late", "method", True), ("early", "method", True), ("out", "method", False)]
CHOICE = pl.Schema(
    {
        "method_id": pl.String(),
        "threshold_rule_id": pl.String(),
        "budget_cm3": pl.Float64(),
        "status": pl.String(),
        "reason": pl.String(),
    }
)


def select(**levels: str) -> tuple[int | slice, ...]:
    """Universes at some levels, as an index of the ten axes."""
    study = protocol()
    return tuple(study.level_ids(c).index(levels[c]) if c in levels else slice(None) for c in COLUMNS)


def without(*selections: tuple[int | slice, ...]) -> Flags:
    """Every universe scored but some."""
    scored = np.ones(SHAPE, np.bool_)
    for selection in selections:
        scored[selection] = False
    return scored


def both(**levels: str) -> list[tuple[int | slice, ...]]:
    """The universes at some levels of the two metrics that have thresholds."""
    return [select(**levels, metric_id=metric) for metric in ("dice", "lesion_sensitivity")]


MENDED = {
    "a pooled metric": ([select(aggregation_id="pooled", metric_id="slice_aroc")], "aggregation_id", "pooled"),
    "a reference of Dice": ([select(reference_id="own_mapped", metric_id="dice")], "reference_id", "own_mapped"),
    "pruning by legacy volumes": (
        both(voxel_volume_id="legacy", postprocess_id="hysteresis_pruned"),
        "postprocess_id",
        "hysteresis_pruned",
    ),
    "a budget never reached": (
        both(threshold_rule_id="test_matched", budget_cm3="40"),
        "threshold_rule_id",
        "test_matched",
    ),
    "a budget that no rule keeps": (
        [u for rule in ("validation", "crc_10", "test_matched") for u in both(threshold_rule_id=rule, budget_cm3="5")],
        "budget_cm3",
        "5",
    ),
    "a criterion of one definition": (
        [select(hit_criterion_id="iou_50", lesion_definition_id="conn26_floor", metric_id="lesion_sensitivity")],
        "hit_criterion_id",
        "iou_50",
    ),
}


@pytest.mark.parametrize(("holes", "column", "level"), MENDED.values(), ids=MENDED)
def test_where_one_level_mends_every_hole_it_alone_is_dropped(
    holes: list[tuple[int | slice, ...]], column: str, level: str
) -> None:
    metrics = protocol().axis("metric_id").levels
    acting = np.array([[axis in metric.acts for axis in COLUMNS] for metric in metrics])
    found = [
        (COLUMNS[d.axis], protocol().level_ids(COLUMNS[d.axis])[d.level]) for d in drop_levels(without(*holes), acting)
    ]
    assert found == [(column, level)]


def rows_of(
    scores: Mapping[str, Flags], choices: Sequence[tuple[str, str, float, str, str | None]] = ()
) -> pl.DataFrame:
    """The rows of `dropped_level` where every universe is a cell of its own; a method not named has every score."""
    ids = np.arange(1, np.prod(SHAPE) + 1)
    cells: list[pl.DataFrame] = []
    for method_id, _, _ in METHODS:
        has_score = scores.get(method_id, np.ones(SHAPE, np.bool_)).ravel()
        score = pl.when(pl.col("has_score")).then(0.5).alias("score")
        frame = pl.DataFrame({"cell_id": ids, "has_score": has_score})
        cells.append(frame.select("cell_id", pl.lit(method_id).alias("method_id"), score))
    inputs = {
        "universe_grid": pl.DataFrame({"universe_id": ids[::-1], "cell_id": ids[::-1]}),
        "cell_score": pl.concat(cells),
        "ranked_method": pl.DataFrame(METHODS, schema=["method_id", "kind", "is_ranked"], orient="row"),
        "metric_axis": METRIC_AXIS,
        "threshold_choice": pl.DataFrame(choices, schema=CHOICE, orient="row"),
    }
    assert set(inputs) == set(dropped_level.inputs)
    rows = dropped_level.compute(protocol(), inputs)
    assert breaches(rows, dropped_level.table) == []
    return rows


def names(rows: pl.DataFrame) -> list[tuple[str, str]]:
    return rows.sort("position").select("axis_column", "level_id").rows()


def test_all_scored_keeps_every_level() -> None:
    assert rows_of({}).is_empty()


def test_a_level_that_one_method_lacks_leaves_for_all() -> None:
    rows = rows_of({"late": without(select(reference_id="own_mapped", metric_id="dice"))})
    assert names(rows) == [("reference_id", "own_mapped")]
    assert rows.row(0, named=True)["dropped_universes"] == 155_520 // 3


def test_baselines_and_methods_held_out_cost_no_level() -> None:
    lacking = without(select(voxel_volume_id="legacy"))
    assert rows_of({"z-image": lacking, "out": lacking}).is_empty()


def test_what_is_not_measured_says_so() -> None:
    lacking = without(select(metric_id="slice_aroc"), select(voxel_volume_id="legacy"))
    rows = rows_of({"early": lacking, "late": lacking})
    assert names(rows) == [("metric_id", "slice_aroc"), ("voxel_volume_id", "legacy")]
    assert rows["reason"].to_list() == ["not measured for every method"] * 2


def test_nothing_scored_drops_every_metric() -> None:
    rows = rows_of({"early": np.zeros(SHAPE, np.bool_)})
    assert names(rows) == [("metric_id", metric) for metric in protocol().level_ids("metric_id")]


@pytest.mark.parametrize("budgets", [(20.0,), (5.0, 20.0)])
def test_a_study_s_own_budgets(budgets: tuple[float, ...]) -> None:
    study: Protocol = protocol({"budgets_cm3": list(budgets)})
    ids = list(range(1, study.universe_count + 1))
    inputs = {
        "universe_grid": pl.DataFrame({"universe_id": ids, "cell_id": ids}),
        "cell_score": pl.DataFrame({"cell_id": ids, "method_id": ["m"] * len(ids), "score": [0.5] * len(ids)}),
        "ranked_method": pl.DataFrame({"method_id": ["m"], "kind": ["method"], "is_ranked": [True]}),
        "metric_axis": METRIC_AXIS,
        "threshold_choice": pl.DataFrame(schema=CHOICE),
    }
    assert dropped_level.compute(study, inputs).is_empty()


INFEASIBLE = "needs 9 validation subjects, the cohort has 4"


def test_a_rule_that_is_infeasible_gives_its_own_reason() -> None:
    choices = [("late", "crc_10", 20.0, "infeasible", INFEASIBLE), ("late", "validation", 20.0, "ok", None)]
    rows = rows_of({"late": without(*both(threshold_rule_id="crc_10"))}, choices)
    assert names(rows) == [("threshold_rule_id", "crc_10")]
    assert rows["reason"].to_list() == [INFEASIBLE]


def test_reasons_that_differ_name_their_methods_and_first_budgets() -> None:
    lacking = without(*both(threshold_rule_id="test_matched"))
    choices = [
        ("late", "test_matched", 40.0, "infeasible", "burden never reached: 12 cm3"),
        ("late", "test_matched", 20.0, "infeasible", "burden never reached: 12 cm3"),
        ("early", "test_matched", 40.0, "infeasible", "burden never reached: 30 cm3"),
    ]
    [reason] = rows_of({"late": lacking, "early": lacking}, choices)["reason"].to_list()
    assert reason == "early at 40 cm3: burden never reached: 30 cm3; late at 20 cm3: burden never reached: 12 cm3"


@pytest.mark.parametrize("bystander", ["z-image", "out"])
def test_the_reason_is_that_of_a_method_at_fault(bystander: str) -> None:
    """A baseline, or a method that is held out, costs no level: its infeasible thresholds are not the reason."""
    choices = [
        (bystander, "crc_10", 20.0, "infeasible", "burden never reached"),
        ("late", "crc_10", 20.0, "infeasible", INFEASIBLE),
    ]
    rows = rows_of({"late": without(*both(threshold_rule_id="crc_10"))}, choices)
    assert rows["reason"].to_list() == [INFEASIBLE]
