import itertools
import math
import tomllib
from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expectations.protocol import (
    DECLARATION,
    Axis,
    Level,
    Parameters,
    Protocol,
    declaration,
    override_problems,
    protocol,
)

REFERENCE_UNIVERSE = {
    "metric_id": "dice",
    "budget_cm3": "20",
    "threshold_rule_id": "validation",
    "aggregation_id": "mean",
    "reference_id": "canonical",
    "support_id": "brain",
    "voxel_volume_id": "true",
    "postprocess_id": "plain",
    "lesion_definition_id": "conn6_floor",
    "hit_criterion_id": "iou_10",
}
AXES = [
    "reference_id",
    "support_id",
    "voxel_volume_id",
    "threshold_rule_id",
    "budget_cm3",
    "postprocess_id",
    "lesion_definition_id",
    "hit_criterion_id",
    "aggregation_id",
    "metric_id",
]
LEVELS = [(axis.column, level) for axis in protocol().axes for level in axis.levels]
OVERRIDABLE = {name: p for name, p in declaration().parameter.items() if not p.fixed}


def defensible(axis: Axis) -> list[Level]:
    return [level for level in axis.levels if level.defensible]


def distinct_cells(metric: Level, levels: Mapping[str, list[Level]]) -> int:
    """Cells of one metric by enumeration: a level that does not act stands for its whole axis."""
    cells: set[tuple[str, ...]] = set()
    columns = [column for column in AXES if column != "metric_id"]
    for combination in itertools.product(*(levels[column] for column in columns)):
        chosen = dict(zip(columns, combination, strict=True))
        acting = {column: level for column, level in chosen.items() if column in metric.acts}
        if not chosen["threshold_rule_id"].uses_budget:
            acting.pop("budget_cm3", None)
        if "budget_cm3" not in acting and not any(level.uses_voxel_volume for level in acting.values()):
            acting.pop("voxel_volume_id", None)
        cells.add(tuple(level.id for level in acting.values()))
    return len(cells)


def test_axes_are_the_ten_of_the_design() -> None:
    assert [axis.column for axis in protocol().axes] == AXES
    assert all(axis.title for axis in protocol().axes)


def test_universe_counts() -> None:
    axes = protocol().axes
    assert protocol().universe_count == math.prod(len(axis.levels) for axis in axes) == 155_520
    assert math.prod(len(defensible(axis)) for axis in axes) == 15_552
    assert math.prod(len(defensible(axis)) for axis in axes if axis.column != "metric_id") == 2_592


def test_distinct_defensible_cells() -> None:
    levels = {axis.column: defensible(axis) for axis in protocol().axes}
    cells = {metric.id: distinct_cells(metric, levels) for metric in levels["metric_id"]}
    assert cells.pop("dice") == 216
    assert cells.pop("lesion_sensitivity") == 2_592
    assert cells == dict.fromkeys(["voxel_auroc", "voxel_ap", "slice_auroc", "slice_aroc"], 6)


def test_distinct_cells_of_the_full_set() -> None:
    levels = {axis.column: list(axis.levels) for axis in protocol().axes}
    assert sum(distinct_cells(metric, levels) for metric in levels["metric_id"]) == 19_368


@pytest.mark.parametrize(("column", "level"), LEVELS, ids=lambda value: value.id if isinstance(value, Level) else value)
def test_every_level_is_described(column: str, level: Level) -> None:
    assert level.id
    assert level.description.strip() == level.description != ""
    assert level.id in protocol().level_ids(column)


def test_level_ids_are_distinct_within_an_axis() -> None:
    for axis in protocol().axes:
        ids = protocol().level_ids(axis.column)
        assert len(set(ids)) == len(ids) > 1


def test_acting_axes_exist_and_only_metrics_name_them() -> None:
    columns = set(AXES) - {"metric_id"}
    for axis in protocol().axes:
        for level in axis.levels:
            if axis.column == "metric_id":
                assert len(set(level.acts)) == len(level.acts) > 0
                assert set(level.acts) <= columns
            else:
                assert level.acts == ()


def test_metrics_without_threshold_ignore_whatever_acts_through_one() -> None:
    through = {"threshold_rule_id", "budget_cm3", "postprocess_id", "voxel_volume_id", "hit_criterion_id"}
    by_id = {metric.id: set(metric.acts) for metric in protocol().axis("metric_id").levels}
    for metric in ("voxel_auroc", "voxel_ap", "slice_auroc", "slice_aroc"):
        assert by_id[metric] == {"reference_id", "support_id", "aggregation_id"}
        assert not by_id[metric] & through
    assert set(AXES) - by_id["dice"] == {"lesion_definition_id", "hit_criterion_id", "metric_id"}
    assert set(AXES) - by_id["lesion_sensitivity"] == {"metric_id"}


@pytest.mark.parametrize(("column", "level_id"), REFERENCE_UNIVERSE.items())
def test_the_reference_universe_is_defensible(column: str, level_id: str) -> None:
    level = next(level for level in protocol().axis(column).levels if level.id == level_id)
    assert level.defensible


def test_an_unknown_axis_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no_such_axis"):
        protocol().axis("no_such_axis")
    with pytest.raises(KeyError, match="no_such_axis"):
        protocol().level_ids("no_such_axis")


def test_threshold_rules_of_the_axis_are_declared() -> None:
    rules = [rule.id for rule in protocol().threshold_rules]
    assert len(set(rules)) == len(rules)
    assert set(protocol().level_ids("threshold_rule_id")) <= set(rules)
    conformal = {f"{kind}_{level}" for kind in ("crc", "rcps", "crc_label_free") for level in ("05", "10", "20")}
    assert set(rules) - set(protocol().level_ids("threshold_rule_id")) == conformal - {"crc_10"}


def test_a_conformal_rule_carries_its_alpha_in_its_name() -> None:
    alphas: dict[str, list[Fraction]] = {}
    for rule in protocol().threshold_rules:
        alpha = rule.exact_alpha
        assert (alpha is None) == (rule.kind in ("validation", "test_matched", "fixed", "subject_optimum"))
        if alpha is not None:
            assert rule.id == f"{rule.kind}_{int(alpha * 100):02d}"
            alphas.setdefault(rule.kind, []).append(alpha)
    for found in alphas.values():
        assert [float(alpha) for alpha in found] == list(protocol().parameters.conformal_alphas)


def test_levels_that_use_the_budget_are_the_rules_that_do() -> None:
    kinds = {rule.id: rule.kind for rule in protocol().threshold_rules}
    for level in protocol().axis("threshold_rule_id").levels:
        assert level.uses_budget == (kinds[level.id] not in ("fixed", "subject_optimum"))


def test_parameters_of_the_file_are_those_of_the_model() -> None:
    declared = tomllib.loads(DECLARATION.read_text(encoding="utf-8"))["parameter"]
    assert list(declared) == list(Parameters.model_fields)


@pytest.mark.parametrize("name", declaration().parameter)
def test_every_parameter_says_why(name: str) -> None:
    why = declaration().parameter[name].why
    assert len(why) > 20
    assert why.endswith((".", ")"))


@pytest.mark.parametrize("name", declaration().parameter)
def test_defaults_keep_their_own_bounds(name: str) -> None:
    declared = declaration().parameter[name]
    assert declared.problem(declared.value) is None


@pytest.mark.parametrize("name", OVERRIDABLE)
def test_every_default_can_be_written_out(name: str) -> None:
    assert override_problems({name: OVERRIDABLE[name].value}) == []
    assert protocol({name: OVERRIDABLE[name].value}) == protocol()


def test_units_in_parameter_names_agree_with_the_declared_unit() -> None:
    for name, declared in declaration().parameter.items():
        tokens = set(name.split("_"))
        for unit in ("mm3", "cm3", "mm", "s"):
            assert (unit in tokens) == (declared.unit == unit), name


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    changed = protocol({"minimum_component_mm3": 2000.0, "gate_failure": "hold_out"}).parameters
    kept = protocol().parameters.model_dump() | {"minimum_component_mm3": 2000.0, "gate_failure": "hold_out"}
    assert changed.model_dump() == kept


def test_whole_numbers_are_taken_for_floats() -> None:
    found = protocol({"budgets_cm3": [5, 20.0], "lesion_floor_mm3": 10, "baseline_quantiles": [0, 1]}).parameters
    assert found.budgets_cm3 == (5.0, 20.0)
    assert [type(budget) for budget in found.budgets_cm3] == [float, float]
    assert (type(found.lesion_floor_mm3), found.lesion_floor_mm3) == (float, 10.0)
    assert found.baseline_quantiles == (0.0, 1.0)


def test_budgets_fill_their_axis_in_declared_order() -> None:
    found = protocol({"budgets_cm3": [20, 2.5, 7]})
    assert found.level_ids("budget_cm3") == ("20", "2.5", "7")
    assert all(level.defensible for level in found.axis("budget_cm3").levels)
    assert found.universe_count == 155_520 // 4 * 3


def test_an_override_leaves_the_defaults_alone() -> None:
    before = protocol()
    protocol({"budgets_cm3": [20.0], "seed": 7})
    assert protocol() == before
    assert protocol({}) == before


def refusal(overrides: Mapping[str, object]) -> list[str]:
    """Names at fault; each finding says something, and `protocol` refuses with the same words."""
    problems = override_problems(overrides)
    with pytest.raises(ValueError) as refused:
        protocol(overrides)
    for name, what in problems:
        assert what
        assert f"{name} {what}" in str(refused.value)
    return [name for name, _ in problems]


def test_an_unknown_parameter_is_refused_with_the_known_ones() -> None:
    assert refusal({"budget_cm3": [20.0]}) == ["budget_cm3"]
    [(_, what)] = override_problems({"budget_cm3": [20.0]})
    assert "is no parameter" in what
    assert all(name in what for name in Parameters.model_fields)


@pytest.mark.parametrize("name", [name for name, p in declaration().parameter.items() if p.fixed])
def test_a_fixed_parameter_is_refused_with_its_reason(name: str) -> None:
    assert refusal({name: declaration().parameter[name].value}) == [name]
    [(_, what)] = override_problems({name: 1})
    assert "is fixed" in what
    assert declaration().parameter[name].why in what


OUT_OF_BOUNDS: list[tuple[str, object, str]] = [
    ("seed", -1, "at least 0"),
    ("overlap_floor", 1.5, "at most 1"),
    ("overlap_floor", -0.1, "at least 0"),
    ("budgets_cm3", [5.0, -1.0, 20.0], "at least 0"),
    ("baseline_quantiles", [0.5, 1.5], "at most 1"),
    ("baseline_quantiles", [-0.5, 0.5], "at least 0"),
    ("gate_failure", "ignore", "stop, hold_out"),
    ("gate_failure", "Stop", "stop, hold_out"),
    ("gate_failure", ["stop"], "stop, hold_out"),
    ("misregistered", True, "exclude, keep"),
    ("empty_dice", 0, "exclude, one_if_both_empty"),
]


@pytest.mark.parametrize(("name", "value", "bound"), OUT_OF_BOUNDS)
def test_a_value_out_of_bounds_is_refused_with_the_bound(name: str, value: object, bound: str) -> None:
    assert refusal({name: value}) == [name]
    [(_, what)] = override_problems({name: value})
    assert bound in what
    assert repr(value) in what


WRONG_TYPES: list[tuple[str, object]] = [
    ("seed", 1.5),
    ("seed", True),
    ("seed", "7"),
    ("seed", [7]),
    ("overlap_floor", True),
    ("overlap_floor", "0.9"),
    ("overlap_floor", [0.9]),
    ("lesion_floor_mm3", {"value": 50.0}),
    ("budgets_cm3", 20.0),
    ("budgets_cm3", "20"),
    ("budgets_cm3", ["20"]),
    ("budgets_cm3", [[20.0]]),
    ("budgets_cm3", [True, 20.0]),
    ("baseline_quantiles", [0.5]),
    ("baseline_quantiles", [0.1, 0.5, 0.9]),
    ("baseline_quantiles", 0.5),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused(name: str, value: object) -> None:
    assert set(refusal({name: value})) == {name}
    assert all("found" in what for _, what in override_problems({name: value}))


def test_the_reference_budget_must_be_a_budget() -> None:
    assert refusal({"budgets_cm3": [5, 10]}) == ["reference_budget_cm3"]
    assert refusal({"reference_budget_cm3": 15}) == ["reference_budget_cm3"]
    assert override_problems({"budgets_cm3": [5, 10], "reference_budget_cm3": 10}) == []


@pytest.mark.parametrize("budgets", [[], [20, 20], [20, 20.0, 5]])
def test_budgets_are_different_and_at_least_one(budgets: list[float]) -> None:
    assert refusal({"budgets_cm3": budgets}) == ["budgets_cm3"]


@pytest.mark.parametrize("quantiles", [[0.5, 0.5], [0.9, 0.1]])
def test_baseline_quantiles_must_rise(quantiles: list[float]) -> None:
    assert refusal({"baseline_quantiles": quantiles}) == ["baseline_quantiles"]


NUMERIC = [name for name, p in OVERRIDABLE.items() if isinstance(p.value, (float, list))]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NUMERIC)
def test_no_parameter_is_nan_or_infinite(name: str, value: float) -> None:
    default = OVERRIDABLE[name].value
    assert name in refusal({name: [value, 20.0] if isinstance(default, list) else value})


def test_a_whole_number_beyond_every_float_is_refused() -> None:
    assert refusal({"lesion_floor_mm3": 10**400}) == ["lesion_floor_mm3"]


def test_a_seed_fits_the_integer_column_of_the_protocol_table() -> None:
    assert refusal({"seed": 2**63}) == ["seed"]


@pytest.mark.parametrize("delta", [0, 1])
def test_rcps_needs_a_confidence_between_zero_and_one(delta: float) -> None:
    assert refusal({"rcps_delta": delta}) == ["rcps_delta"]


def test_budgets_that_would_share_a_level_id_are_refused() -> None:
    assert "budgets_cm3" in refusal({"budgets_cm3": [20.0, 20.0000001]})


@pytest.mark.parametrize(
    "overrides",
    [
        {"seed": -1, "no_such": 1, "level_count": 100},
        {"no_such": 1, "tie_tolerance": "x"},
        {"seed": -1, "tie_tolerance": "x"},
        {"tie_tolerance": "x", "budgets_cm3": []},
        {"budgets_cm3": [20, 20], "baseline_quantiles": [0.9, 0.1]},
        {"reference_budget_cm3": 15, "baseline_quantiles": [0.9, 0.1]},
    ],
)
def test_all_problems_are_listed_at_once(overrides: dict[str, object]) -> None:
    assert {name for name, _ in override_problems(overrides)} == set(overrides)


VALUES = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.lists(st.one_of(st.integers(-5, 50), st.floats(-5, 50), st.sampled_from(["5", "x"])), max_size=4),
    st.sampled_from(["stop", "keep", "exclude", "hold_out", "", "20"]),
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*Parameters.model_fields, "no_such"]), VALUES, max_size=3))
def test_overrides_are_either_refused_or_applied(overrides: dict[str, object]) -> None:
    if override_problems(overrides):
        with pytest.raises(ValueError):
            protocol(overrides)
    else:
        found = protocol(overrides)
        assert isinstance(found, Protocol)
        stored = found.parameters.model_dump(mode="json")
        assert {name: stored[name] for name in overrides} == overrides
