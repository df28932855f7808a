"""The protocol as data: parameters, the ten axes of the multiverse, and the threshold rules.

The home of every value is `protocol.toml`; this module only types it, checks it and lets a study override it.
Source: MIRTO (Kafee Hernashki & Chatterjee, 2026), sections 2.2 to 2.9.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, ValidationError

DECLARATION = Path(__file__).with_name("protocol.toml")


class Parameters(BaseModel):
    """Every parameter of the protocol, typed; values, bounds and reasons stand in `protocol.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    level_count: int
    histogram_bins: int
    budgets_cm3: tuple[float, ...]
    reference_budget_cm3: float
    empty_dice: Literal["exclude", "one_if_both_empty"]
    centroid_limit_mm: float
    overlap_tolerance: float
    overlap_floor: float
    maximiser_tolerance: float
    margin_warning: float
    gate_failure: Literal["stop", "hold_out"]
    misregistered: Literal["exclude", "keep"]
    lesion_floor_mm3: float
    minimum_component_mm3: float
    guard_share: float
    conformal_alphas: tuple[float, ...]
    rcps_delta: float
    conformal_split_count: int
    conformal_split_sizes: tuple[int, ...]
    calibration_share: float
    crossfit_leave_one_out_limit: int
    crossfit_folds: int
    tie_tolerance: float
    baseline_quantiles: tuple[float, float]
    slice_calipers_sd: tuple[float, ...]
    borrowed_donor_count: int
    reference_dilation_share: float
    permuted_id_share: float
    diagnostic_sample_sizes: tuple[int, ...]
    false_alarm_rate: float
    target_power: float
    rank_stability_floor: float
    anti_location_limit: float
    transform_scan_margin: float
    offset_scan_count: int
    seed: int
    multiverse_replicates: int
    contrast_replicates: int
    stable_choice_share: float
    interval_level: float


class ParameterDeclaration(BaseModel):
    """What `protocol.toml` says of one parameter: its value, bounds, unit, and why it has that value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: object
    why: str
    fixed: bool = False
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""

    def problem(self, value: object) -> str | None:
        """Say what is wrong with a value under these bounds, or nothing."""
        numbers = [v for v in _items(value) if isinstance(v, (int, float))]
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        if any(not abs(v) <= sys.float_info.max for v in numbers):  # NaN keeps no bound and breaks none
            return "must be a finite number"
        if self.minimum is not None and any(v < self.minimum for v in numbers):
            return f"must be at least {self.minimum:g}"
        if self.maximum is not None and any(v > self.maximum for v in numbers):
            return f"must be at most {self.maximum:g}"
        return None


class Level(BaseModel):
    """One level of an axis."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    description: str
    defensible: bool = False
    uses_budget: bool = False
    uses_voxel_volume: bool = False
    acts: tuple[str, ...] = ()


class Axis(BaseModel):
    """One axis of the multiverse: the column that carries it and its levels in declared order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    column: str
    title: str
    levels: tuple[Level, ...] = ()
    parameter: str | None = None


class ThresholdRule(BaseModel):
    """A rule that chooses a threshold; `alpha` is an exact fraction where the rule is conformal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    kind: Literal["validation", "crc", "rcps", "crc_label_free", "test_matched", "fixed", "subject_optimum"]
    alpha: str | None = None

    @property
    def uses_budget(self) -> bool:
        """Whether the rule's threshold depends on the budget."""
        return self.kind not in ("fixed", "subject_optimum")

    @property
    def exact_alpha(self) -> Fraction | None:
        """The target exceedance as an exact fraction, or None for a rule without one."""
        return None if self.alpha is None else Fraction(self.alpha)


class Declaration(BaseModel):
    """The whole of `protocol.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    parameter: dict[str, ParameterDeclaration]
    axis: tuple[Axis, ...]
    threshold_rule: tuple[ThresholdRule, ...]


@dataclass(frozen=True)
class Protocol:
    """The parameters of one study with the axes they span."""

    parameters: Parameters
    axes: tuple[Axis, ...]
    threshold_rules: tuple[ThresholdRule, ...]

    def axis(self, column: str) -> Axis:
        """The axis that a column carries.

        Raises:
            KeyError: No axis has this column.
        """
        for axis in self.axes:
            if axis.column == column:
                return axis
        raise KeyError(column)

    def level_ids(self, column: str) -> tuple[str, ...]:
        """The level identifiers of an axis, in declared order."""
        return tuple(level.id for level in self.axis(column).levels)

    @property
    def universe_count(self) -> int:
        """How many universes the axes span: 155,520 for the default budgets."""
        count = 1
        for axis in self.axes:
            count *= len(axis.levels)
        return count


@cache
def declaration() -> Declaration:
    """Read `protocol.toml` once."""
    return Declaration.model_validate(tomllib.loads(DECLARATION.read_text()))


def override_problems(overrides: Mapping[str, object]) -> list[tuple[str, str]]:
    """Every problem of a study's [protocol] table as (parameter, what is wrong); empty when it is fine."""
    problems = [(name, problem) for name, value in overrides.items() if (problem := _problem(name, value))]
    problems += _type_problems(_without(overrides, problems))
    parameters = _parameters(_without(overrides, problems))
    at_fault = {name for name, _ in problems}
    if not at_fault & {"budgets_cm3", "reference_budget_cm3"}:
        problems += _budget_problems(parameters)
    low, high = parameters.baseline_quantiles
    if not low < high:
        problems.append(("baseline_quantiles", f"must rise; found {[low, high]}"))
    return problems


def _problem(name: str, value: object) -> str | None:
    declared = declaration().parameter
    if name not in declared:
        return f"is no parameter of the protocol; known: {', '.join(sorted(declared))}"
    if declared[name].fixed:
        return f"is fixed by the protocol: {declared[name].why}"
    problem = declared[name].problem(value)
    return f"{problem}, found {value!r}" if problem else None


def _without(overrides: Mapping[str, object], problems: Sequence[tuple[str, str]]) -> dict[str, object]:
    at_fault = {name for name, _ in problems}
    return {name: value for name, value in overrides.items() if name not in at_fault}


def _type_problems(overrides: Mapping[str, object]) -> list[tuple[str, str]]:
    try:
        _parameters(overrides)
    except ValidationError as error:
        return [(str(e["loc"][0]), f"{e['msg']}, found {e['input']!r}") for e in error.errors()]
    return []


def _budget_problems(parameters: Parameters) -> list[tuple[str, str]]:
    budgets = parameters.budgets_cm3
    if not budgets or len({_level_id(budget) for budget in budgets}) < len(budgets):
        return [("budgets_cm3", f"must hold different budgets, at least one; found {list(budgets)}")]
    if parameters.reference_budget_cm3 not in budgets:
        found = f"{parameters.reference_budget_cm3:g} is not in budgets_cm3 {list(budgets)}"
        return [("reference_budget_cm3", f"must be one of the budgets; {found}")]
    return []


def _level_id(budget: float) -> str:
    return f"{budget:g}"


def protocol(overrides: Mapping[str, object] | None = None) -> Protocol:
    """The protocol with a study's overrides.

    Args:
        overrides: Parameter values by name; nothing is overridden when absent.

    Returns:
        Parameters, axes (the budget axis filled from `budgets_cm3`) and threshold rules.

    Raises:
        ValueError: An override is unknown, fixed, of the wrong type or out of bounds.
    """
    overrides = overrides or {}
    if problems := override_problems(overrides):
        raise ValueError("; ".join(f"{name} {what}" for name, what in problems))
    parameters = _parameters(overrides)
    axes = tuple(_filled(axis, parameters) for axis in declaration().axis)
    return Protocol(parameters, axes, declaration().threshold_rule)


def _parameters(overrides: Mapping[str, object]) -> Parameters:
    values = {name: declared.value for name, declared in declaration().parameter.items()} | dict(overrides)
    as_declared = {name: _as_declared(value, declaration().parameter[name].value) for name, value in values.items()}
    return Parameters.model_validate(as_declared)


def _items(value: object) -> Sequence[object]:
    """The items of a list, or the value alone."""
    return cast(Sequence[object], value) if isinstance(value, (list, tuple)) else [value]


def _as_declared(value: object, default: object) -> object:
    """TOML writes 10 for 10.0 and lists for tuples; follow the declared value's type."""
    values, defaults = _items(value), _items(default)
    if isinstance(default, list) and isinstance(value, list):
        return tuple(_as_declared(v, defaults[0]) for v in values)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _filled(axis: Axis, parameters: Parameters) -> Axis:
    """Fill an axis whose levels are the values of a parameter (the budgets)."""
    if axis.parameter is None:
        return axis
    values: tuple[float, ...] = getattr(parameters, axis.parameter)
    levels = tuple(Level(id=_level_id(v), description=f"{v:g} cm3", defensible=True) for v in values)
    return axis.model_copy(update={"levels": levels})
