"""Which axis levels leave the multiverse so that every remaining universe has a score for every method.

A level with a null cell is dropped for all methods, so that the design stays balanced (protocol sections 8 and 11).
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import polars as pl
from numpy.typing import NDArray

from expectations.protocol import Protocol
from transforms.catalog import Inputs, declared

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Drop:
    """A level that leaves: the axis and level positions, and why."""

    axis: int
    level: int
    is_unmeasured: bool


def drop_levels(scored: Flags, acting: Flags) -> list[Drop]:
    """Find the levels to drop.

    First every level that no universe scores among those in which its axis acts (not measured, or infeasible
    throughout); metrics come first, since the other axes act through them. Then, while a universe without a score is
    left, the level with a hole (of any axis but the metric) whose removal leaves the largest share of the remaining
    universes scored, among equals the most scored universes; ties go to the earlier axis, then the earlier level. The
    share comes first because the number alone gives up levels of long axes that mend nothing: four threshold rules
    before one level of aggregation. A metric is never given up for a hole that dropping another level can mend; it
    goes only when the search has left it without any score.

    Args:
        scored: One flag per universe, an array with one dimension per axis, the metric last.
        acting: For each metric (rows) and axis (columns), whether the axis changes the metric.

    Returns:
        The dropped levels in the order in which they were dropped; none for a complete design. A design in which
        nothing is scored loses every metric.
    """
    kept = [np.ones(size, np.bool_) for size in scored.shape]
    metric = scored.ndim - 1
    drops = [Drop(metric, level, True) for level in range(scored.shape[metric]) if not scored[..., level].any()]
    _forget(kept, drops)
    for axis in range(metric):
        metrics = kept[metric] & acting[:, axis]
        if metrics.any():
            seen = np.moveaxis(scored[..., metrics], axis, 0).reshape(scored.shape[axis], -1).any(axis=1)
            drops += [Drop(axis, level, True) for level in np.flatnonzero(~seen).tolist()]
    _forget(kept, drops)
    while (worst := _next_drop(scored, kept)) is not None:
        drops.append(worst)
        _forget(kept, [worst])
    return drops


def _forget(kept: list[Flags], drops: list[Drop]) -> None:
    for drop in drops:
        kept[drop.axis][drop.level] = False


def _next_drop(scored: Flags, kept: list[Flags]) -> Drop | None:
    """The next level that leaves; None where no hole is left."""
    left = scored[np.ix_(*kept)]
    if left.all():
        return None
    metrics = np.flatnonzero(kept[-1])
    silent = metrics[~left.reshape(-1, len(metrics)).any(axis=0)].tolist()
    return Drop(scored.ndim - 1, silent[0], False) if silent else _costliest_hole(left, kept)


def _costliest_hole(left: Flags, kept: list[Flags]) -> Drop:
    """The level with a hole without which the largest share, then the most, of the universes left are scored.

    There is one: where every metric has a score, a universe without one lies at a level of an axis that has others.
    """
    total, ranked = int(left.sum()), list[tuple[Fraction, int, int, int]]()
    for axis in range(left.ndim - 1):
        positions = np.flatnonzero(kept[axis])
        slices = np.moveaxis(left, axis, 0).reshape(len(positions), -1)
        for position, level in zip(positions.tolist(), slices, strict=True):
            remaining, size = total - int(level.sum()), left.size - level.size
            if size > 0 and not level.all():
                ranked.append((Fraction(remaining, size), remaining, -axis, -position))
    _, _, axis, position = max(ranked)
    return Drop(-axis, -position, False)


@declared(
    name="dropped_level",
    row="One row per axis level that leaves the multiverse, in the order of dropping.",
    key=("axis_column", "level_id"),
    columns=("position", "dropped_universes", "reason"),
    inputs=("universe_grid", "cell_score", "ranked_method", "metric_axis", "threshold_choice"),
)
def dropped_level(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Levels that leave, each with its reason."""
    methods = inputs["ranked_method"].filter(pl.col("is_ranked") & (pl.col("kind") == "method"))
    ranked = methods.get_column("method_id").to_list()
    scores = inputs["cell_score"].filter(pl.col("method_id").is_in(ranked) & pl.col("score").is_not_null())
    complete = scores.group_by("cell_id").len().filter(pl.col("len") == len(ranked)).get_column("cell_id")
    grid = inputs["universe_grid"].sort("universe_id")
    shape = tuple(len(axis.levels) for axis in protocol.axes)
    scored = grid.get_column("cell_id").is_in(complete.implode()).to_numpy().reshape(shape)
    columns = [axis.column for axis in protocol.axes]
    acts = set(inputs["metric_axis"].select("metric_id", "axis_column").iter_rows())
    acting = np.array([[(m, column) in acts for column in columns] for m in protocol.level_ids("metric_id")])
    choices = inputs["threshold_choice"].filter(pl.col("method_id").is_in(ranked))
    rows: list[tuple[object, ...]] = []
    for position, drop in enumerate(drop_levels(scored, acting)):
        axis = protocol.axes[drop.axis]
        level = axis.levels[drop.level].id
        count = int(np.prod([n for k, n in enumerate(shape) if k != drop.axis]))
        reason = _reason(axis.column, level, drop, choices)
        rows.append((axis.column, level, position, count, reason))
    return dropped_level.table.frame(rows)


def _reason(column: str, level: str, drop: Drop, choices: pl.DataFrame) -> str:
    """Why a level leaves: the reason of its thresholds where they are at fault, else what is missing."""
    if column == "threshold_rule_id":
        at_fault = choices.filter((pl.col("threshold_rule_id") == level) & (pl.col("status") == "infeasible"))
        reasons = at_fault.get_column("reason").unique(maintain_order=True).to_list()
        if len(reasons) == 1:
            return str(reasons[0])
        if reasons:
            return "; ".join(f"{m} at {b:g} cm3: {r}" for m, b, r in _first_of_each(at_fault))
    if drop.is_unmeasured:
        return "not measured for every method"
    return "some of its universes have no score for every method; dropping it leaves the most universes"


def _first_of_each(at_fault: pl.DataFrame) -> list[tuple[str, float, str]]:
    """The first budget without a threshold of each method."""
    first = at_fault.sort("method_id", "budget_cm3").unique("method_id", keep="first", maintain_order=True)
    return [(str(m), float(b), str(r)) for m, b, r in first.select("method_id", "budget_cm3", "reason").iter_rows()]
