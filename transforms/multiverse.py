"""The multiverse over resampled cohorts: which pairs flip, and whose the variance is, in every replicate.

Nothing is expanded over universes: the distinct cells of one reference, support and voxel volume are scored for every
method in all replicates at once, then added to weighted counts of orders and to marginal sums, from which flip shares
and sums of squares follow. Thresholds matched on test are chosen anew in every replicate; all others stay (protocol,
sections 8 and 9).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from expectations.protocol import Protocol
from ingest.compiled import compiled
from transforms.catalog import Inputs, declared
from transforms.replicates import (
    CRITERIA,
    HISTOGRAM_COLUMNS,
    SUBJECT_QUERY,
    TEST_SUBJECT,
    aggregated_dice,
    aggregated_sensitivity,
    dense,
    free_scores,
    numbers,
    voxel_volume,
)
from transforms.resampling import (
    INFEASIBLE,
    Floats,
    Integers,
    Resample,
    divided,
    draw,
    in_threads,
    matched_levels,
    mean_burdens,
)

# points that stand where a level would: each subject's own level of best Dice; and, where the validation rule is
# cross-fitted, the level of its fold, one point for each budget from here on
OPTIMUM, CROSSFIT = 255, 256
UNIVERSE_SETS = ("defensible", "all")
SERIES_KEY = ("method_id", "reference_id", "support_id", "voxel_volume_id")

STANDING = """
    standing as (
        select cell_id, count(*) filter (is_defensible)::integer as weight_defensible, count(*)::integer as weight_all
        from universe
        where status = 'ok'
        group by cell_id
    )"""
PRIMARIES = "select method_id, position from ranked_method where is_ranked and kind = 'method'"
# with the other maps that stand for a model in some configuration set
DESIGN = """
    select method_id, position
    from ranked_method
    where method_id in (select method_id from ledger_member)"""


def series_cte(members: str) -> str:
    """SQL that numbers the series of some methods, given as a SELECT of their ids and positions."""
    return f"""{STANDING},
    series as (
        select
            m.method_id, c.reference_id, c.support_id, c.voxel_volume_id, c.reads_curves, m.legacy_voxel_mm3,
            (row_number() over (
                order by c.reference_id, c.support_id, c.voxel_volume_id, m.position
            ) - 1)::usmallint as series
        from (
            select
                reference_id, support_id, voxel_volume_id,
                bool_or(metric_id in ('dice', 'lesion_sensitivity')) as reads_curves
            from standing join cell using (cell_id)
            group by all
        ) as c
        cross join (
            select method_id, r.position, m.legacy_voxel_mm3
            from ({members}) as r join method as m using (method_id)
        ) as m
    )"""


def visited_cte(members: str) -> str:
    """SQL of the levels that some point of some methods reads."""
    return f"""{series_cte(members)}, {TEST_SUBJECT},
    visited as (
        select s.series, {", ".join(f"p.{name}" for name in SERIES_KEY)}, p.level
        from (
            select {", ".join(SERIES_KEY)}, level
            from threshold_choice
            where level is not null
                and threshold_rule_id in (select threshold_rule_id from standing join cell using (cell_id))
            union
            select {", ".join(SERIES_KEY)}, level
            from replicate_level
            where level is not null
        ) as p
        join series as s using ({", ".join(SERIES_KEY)})
        where s.reads_curves
    ),
    own_point as (
        select distinct
            s.series, {", ".join(f"o.{name}" for name in SERIES_KEY)}, t.subject, o.subject_id, o.level,
            case c.status when 'degraded' then {CROSSFIT} + b.position else {OPTIMUM} end::usmallint as point
        from own_level as o
        join threshold_choice as c using ({", ".join(SERIES_KEY)}, threshold_rule_id, budget_cm3)
        join budget as b using (budget_cm3)
        join series as s using ({", ".join(SERIES_KEY)})
        join test_subject as t using (subject_id)
        where s.reads_curves
            and o.threshold_rule_id in (select threshold_rule_id from standing join cell using (cell_id))
    )"""


def visited_query(members: str, table: str, columns: str, condition: str = "true") -> str:
    """SQL of a curve table's rows of the test cohort at every level that some point reads.

    The two joins are on the few levels of a series and on the own levels of each subject: one join on every subject's
    levels makes DuckDB hash the whole curve.
    """
    keys = ", ".join(SERIES_KEY)
    return f"""
        with {visited_cte(members)},
        level_read as (
            select v.series, t.subject, v.level::usmallint as point, c.* exclude ({keys}, subject_id, level)
            from {table} as c
            join visited as v using ({keys}, level)
            join test_subject as t using (subject_id)
            where {condition}
        ),
        own_read as (
            select o.series, o.subject, o.point, c.* exclude ({keys}, subject_id, level)
            from {table} as c
            join own_point as o using ({keys}, subject_id, level)
            where {condition}
        )
        select p.series, p.subject, p.point, x.position::utinyint as postprocess, {columns}
        from (from level_read union all from own_read) as p
        join axis_level as x on x.axis_column = 'postprocess_id' and x.level_id = p.postprocess_id"""


AXIS_COLUMNS = (
    *("reference_id", "support_id", "voxel_volume_id", "threshold_rule_id", "budget_cm3", "postprocess_id"),
    *("lesion_definition_id", "hit_criterion_id", "aggregation_id", "metric_id"),
)
LEVEL_COLUMNS = tuple("b.level_id" if name == "budget_cm3" else f"u.{name}" for name in AXIS_COLUMNS)


def series_query(members: str) -> str:
    """SQL of the series of some methods."""
    return f"with {series_cte(members)} from series order by series"


FALSE_POSITIVE_QUERY = f"""
    with {series_cte(DESIGN)}, {TEST_SUBJECT}
    select
        s.series, t.subject, c.level,
        c.predicted_voxels - c.true_positive_voxels as false_positive_voxels
    from threshold_curve as c
    join series as s using (method_id, reference_id, support_id, voxel_volume_id)
    join test_subject as t using (subject_id)
    where s.reads_curves and c.postprocess_id = 'plain'
        and 'test_matched' in (select threshold_rule_id from standing join cell using (cell_id))"""


def multiverse_queries(members: str) -> dict[str, str]:
    """All that the replicates of some methods read, by name.

    Args:
        members: A SELECT of the methods' `method_id` and `position`.
    """
    return {
        "series": series_query(members),
        "test_subject": SUBJECT_QUERY,
        "primary_score": """
            select s.cell_id, s.method_id, s.metric_id, s.score
            from cell_score as s
            join ranked_method as m on m.method_id = s.method_id and m.kind <> 'configuration'""",
        "standing_cell": f"with {STANDING} select * exclude (multiplicity) from standing join cell using (cell_id)",
        "cell_level": f"""
            with entry as (
                select
                    u.cell_id, u.is_defensible,
                    unnest({list(AXIS_COLUMNS)}) as axis_column,
                    unnest([{", ".join(LEVEL_COLUMNS)}]) as level_id
                from universe as u
                join budget as b using (budget_cm3)
                where u.status = 'ok'
            )
            select
                cell_id, axis_column, level_id,
                count(*) filter (is_defensible)::integer as weight_defensible, count(*)::integer as weight_all
            from entry
            group by all""",
        "curve_point": visited_query(
            members, "threshold_curve", "p.predicted_voxels, p.true_positive_voxels, p.reference_voxels"
        ),
        "lesion_point": visited_query(
            members,
            "lesion_curve",
            f"""
                (select position from axis_level as d
                    where d.axis_column = 'lesion_definition_id' and d.level_id = p.lesion_definition_id)::utinyint
                    as definition,
                {", ".join(f"p.hit_{criterion}" for criterion in CRITERIA)}, p.lesion_count""",
            "c.lesion_count > 0 and c.lesion_definition_id in"
            " (select level_id from axis_level where axis_column = 'lesion_definition_id')",
        ),
        "ranking": f"""
            with {series_cte(members)}, {TEST_SUBJECT}
            select
                s.series, t.subject, v.auroc, v.average_precision, r.auroc as slice_auroc,
                1 - r.placement_sum / nullif(r.matched_count, 0) as slice_aroc,
                r.placement_sum, r.matched_count
            from series as s
            cross join test_subject as t
            left join voxel_ranking as v using (method_id, subject_id, reference_id, support_id)
            left join slice_ranking as r using (method_id, subject_id, reference_id, support_id)
            where s.voxel_volume_id = 'true'""",
        **{
            f"histogram {reference} {support}": histogram_query(members, reference, support)
            for reference in ("canonical", "own_mapped", "round_trip")
            for support in ("brain", "brain_in_view")
        },
        **{
            f"slice {reference}": slice_query(members, reference)
            for reference in ("canonical", "own_mapped", "round_trip")
        },
    }


def histogram_query(members: str, reference_id: str, support_id: str) -> str:
    """SQL of the score histograms of the test cohort for one reference and support: the largest rows of all."""
    return f"""
        with {series_cte(members)}, {TEST_SUBJECT}
        select s.series, t.subject, {HISTOGRAM_COLUMNS}
        from score_histogram as h
        join series as s using (method_id, reference_id, support_id)
        join test_subject as t using (subject_id)
        where h.reference_id = '{reference_id}' and h.support_id = '{support_id}' and s.voxel_volume_id = 'true'"""


def slice_query(members: str, reference_id: str) -> str:
    """SQL of the slices of the test cohort for one reference."""
    return f"""
        with {series_cte(members)}, {TEST_SUBJECT}
        select s.series, t.subject, x.score_max, x.reference_voxels_{reference_id} > 0 as is_positive
        from slice_score as x
        join series as s using (method_id, support_id)
        join test_subject as t using (subject_id)
        where s.reference_id = '{reference_id}' and s.voxel_volume_id = 'true'
            and x.reference_voxels_{reference_id} is not null"""


def by_series(frame: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """Rows of each series."""
    return {int(str(key[0])): part for key, part in frame.partition_by("series", as_dict=True).items()}


@declared(
    name="replicate_level",
    row="One row per method, reference, support, voxel volume, budget and replicate: the level matched on resampled "
    "test subjects, none where even level 0 keeps the budget.",
    key=("method_id", "reference_id", "support_id", "voxel_volume_id", "budget_cm3", "replicate"),
    columns=("level?",),
    inputs=(
        *("universe", "cell", "ranked_method", "method", "cohort_subject", "subject", "threshold_curve"),
        "ledger_member",
    ),
    queries={"series": series_query(DESIGN), "test_subject": SUBJECT_QUERY, "false_positive": FALSE_POSITIVE_QUERY},
)
def replicate_level(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Test-matched levels of every replicate, replicate 0 (every subject once) first."""
    series = inputs["series"]
    subjects = inputs["test_subject"].height
    resample = draw(subjects, protocol.parameters.multiverse_replicates, protocol.parameters.seed)
    budgets = np.array(protocol.parameters.budgets_cm3)
    frames = [replicate_level.table.frame()]
    true_mm3 = voxel_volume(inputs["cohort_subject"])
    for number, rows in sorted(by_series(inputs["false_positive"]).items()):
        one = series.row(number, named=True)
        voxel_mm3 = one["legacy_voxel_mm3"] if one["voxel_volume_id"] == "legacy" else true_mm3
        levels = _levels(resample, rows, protocol.parameters.level_count, voxel_mm3, budgets)
        frames.append(_level_rows({name: str(one[name]) for name in SERIES_KEY}, budgets, levels))
    return pl.concat(frames)


def _levels(resample: Resample, rows: pl.DataFrame, level_count: int, voxel_mm3: float, budgets: Floats) -> Integers:
    places = [numbers(rows, "level").astype(np.int64), numbers(rows, "subject").astype(np.int64)]
    shape = (level_count + 1, resample.shape[1])
    measured = np.zeros(shape[1], np.bool_)
    measured[places[1]] = True
    false_positives = dense(rows, places, shape, "false_positive_voxels")[:, measured]
    return matched_levels(mean_burdens(resample.among(measured), false_positives, voxel_mm3), budgets)


def _level_rows(key: Mapping[str, str], budgets: Floats, levels: Integers) -> pl.DataFrame:
    replicates = levels.shape[1]
    columns: dict[str, NDArray[Any]] = {
        "budget_cm3": np.repeat(budgets, replicates),
        "replicate": np.tile(np.arange(replicates, dtype=np.int64), len(budgets)),
        "level": levels.ravel(),
    }
    level = pl.when(pl.col("level") != INFEASIBLE).then(pl.col("level")).cast(pl.UInt8)
    names = [pl.lit(value).alias(name) for name, value in key.items()]
    return pl.DataFrame(columns).select(*names, "budget_cm3", "replicate", level)


@dataclass(frozen=True)
class _Cells:
    """Distinct cells of one reference, support and voxel volume, each metric's together.

    Attributes:
        rows: The cells with their axis columns and weights.
        level: Axis level (position in `levels` of the whole multiverse) of each entry of the marginal weights.
        start: Where each cell's entries begin.
        weight: Universes of each entry, universe sets x entries.
    """

    rows: pl.DataFrame
    level: Integers
    start: Integers
    weight: Floats

    @cached_property
    def metric(self) -> Integers:
        """Position of each cell's metric."""
        return numbers(self.rows, "metric").astype(np.int64)

    @cached_property
    def weights(self) -> Floats:
        """Universes of each cell, universe sets x cells."""
        return np.stack([numbers(self.rows, f"weight_{one}").astype(np.float64) for one in UNIVERSE_SETS])


class Multiverse:
    """The multiverse of one release as the replicates need it: cells, series, and their measurements.

    Args:
        protocol: The protocol under the study's overrides.
        inputs: The results of `multiverse_queries`, with `threshold_choice` and `replicate_level`.
        methods: Ids of the methods, in order.
    """

    def __init__(self, protocol: Protocol, inputs: Inputs, methods: Sequence[str]) -> None:
        self.protocol, self.inputs = protocol, inputs
        self.resample = draw(
            inputs["test_subject"].height, protocol.parameters.multiverse_replicates, protocol.parameters.seed
        )
        series = inputs["series"].select(*SERIES_KEY, "series").iter_rows()
        self.series_number = {(str(m), str(r), str(s), str(v)): int(number) for m, r, s, v, number in series}
        self.methods = list(methods)
        self.levels = [(axis.column, level.id) for axis in protocol.axes for level in axis.levels]
        self.curves = by_series(inputs["curve_point"])
        self.lesions = by_series(inputs["lesion_point"])
        self.rankings = by_series(inputs["ranking"])
        self.choices = _fixed(inputs["threshold_choice"], protocol.parameters.budgets_cm3)
        drawn = pl.col("replicate") < len(self.resample.counts)
        self.reference: str | None = None
        self.slices: dict[int, pl.DataFrame] = {}
        self.matched = _matched(inputs["replicate_level"].filter(drawn))

    def groups(self) -> Iterator[tuple[tuple[str, str, str], _Cells]]:
        """Cells by reference, support and voxel volume."""
        level_numbers = pl.DataFrame(
            [(column, level, number) for number, (column, level) in enumerate(self.levels)],
            schema={"axis_column": pl.String, "level_id": pl.String, "number": pl.Int64},
            orient="row",
        )
        metrics = {name: place for place, name in enumerate(self.protocol.level_ids("metric_id"))}
        cells = self.inputs["standing_cell"].with_columns(
            pl.col("metric_id").replace_strict(metrics, return_dtype=pl.Int64).alias("metric")
        )
        entries = self.inputs["cell_level"].join(level_numbers, on=["axis_column", "level_id"])
        for key in sorted(cells.select("reference_id", "support_id", "voxel_volume_id").unique().iter_rows()):
            reference, support, volume = key
            inside = cells.filter(reference_id=reference, support_id=support, voxel_volume_id=volume)
            inside = inside.sort("metric", "cell_id").with_row_index("place")
            own = entries.join(inside.select("cell_id", "place"), on="cell_id").sort("place", "number")
            start = np.searchsorted(numbers(own, "place"), np.arange(inside.height + 1)).astype(np.int64)
            weight = np.stack([numbers(own, f"weight_{one}").astype(np.float64) for one in UNIVERSE_SETS])
            yield (str(reference), str(support), str(volume)), _Cells(inside, numbers(own, "number"), start, weight)

    def scores(self, key: tuple[str, str, str], cells: _Cells) -> Floats:
        """Scores of all methods, methods x cells x replicates; NaN where undefined."""
        result = np.full((len(self.methods), cells.rows.height, len(self.resample.counts)), np.nan)
        free = self._threshold_free(key, cells)

        def fill(place: int) -> None:
            one = _Series(self, self.methods[place], key)
            one.fill_dice(cells.rows, result[place])
            one.fill_sensitivity(cells.rows, result[place])
            _fill_threshold_free(cells.rows, result[place], free.get(self.methods[place], {}))

        in_threads(fill, range(len(self.methods)))
        return result

    def number(self, method: str, key: tuple[str, str, str]) -> int:
        """Number of a series."""
        return self.series_number[method, *key]

    def _slices(self, reference: str) -> dict[int, pl.DataFrame]:
        """Slices of every series of a reference, both supports; those of the last reference are kept."""
        if reference != self.reference:
            self.reference, self.slices = reference, by_series(self.inputs[f"slice {reference}"])
        return self.slices

    def _threshold_free(self, key: tuple[str, str, str], cells: _Cells) -> dict[str, dict[tuple[str, str], Floats]]:
        """Threshold-free scores by method, then metric and aggregation."""
        wanted = set(cells.rows.get_column("metric_id"))
        if not wanted & {"voxel_auroc", "voxel_ap", "slice_auroc", "slice_aroc"}:
            return {}
        reference, support, _ = key
        histograms, slices = self.inputs[f"histogram {reference} {support}"], self._slices(reference)
        scores: dict[str, dict[tuple[str, str], Floats]] = {}
        for method in self.methods:
            number = self.number(method, key)
            histogram = histograms.filter(pl.col("series") == number)  # one at a time: a copy of all takes gigabytes
            scores[method] = free_scores(
                self.resample, self.rankings[number], histogram, slices.get(number), self.protocol
            )
        return scores


def _fixed(choices: pl.DataFrame, budgets: Sequence[float]) -> dict[tuple[str, ...], dict[tuple[str, float], int]]:
    """Level, or the point of subjects' own levels, of every rule and budget that has a threshold, by series."""
    levels: dict[tuple[str, ...], dict[tuple[str, float], int]] = {}
    crossfit = {budget: CROSSFIT + place for place, budget in enumerate(budgets)}
    columns = (*SERIES_KEY, "threshold_rule_id", "budget_cm3", "status", "level")
    for *key, rule, budget, status, level in choices.select(columns).iter_rows():
        if status != "infeasible":
            own_levels = crossfit[budget] if status == "degraded" else OPTIMUM
            point = own_levels if level is None else int(level)
            levels.setdefault(tuple(map(str, key)), {})[str(rule), float(budget)] = point
    return levels


def _matched(frame: pl.DataFrame) -> dict[tuple[str, ...], Integers]:
    """Test-matched levels of every series (and budget), by replicate."""
    parts = frame.sort("replicate").partition_by(*SERIES_KEY, "budget_cm3", as_dict=True)
    return {
        tuple(map(str, key)): part.get_column("level").cast(pl.Int64).fill_null(INFEASIBLE).to_numpy()
        for key, part in parts.items()
    }


def _fill_threshold_free(cells: pl.DataFrame, result: Floats, scores: Mapping[tuple[str, str], Floats]) -> None:
    for place, metric, aggregation in cells.select("place", "metric_id", "aggregation_id").iter_rows():
        if (metric, aggregation) in scores:
            result[place] = scores[metric, aggregation]


class _Series:
    """One method under one reference, support and voxel volume: its points, and scores at them."""

    def __init__(self, multiverse: Multiverse, method: str, key: tuple[str, str, str]) -> None:
        self.multiverse, self.key = multiverse, (method, *key)
        self.number = multiverse.number(method, key)

    @cached_property
    def curve(self) -> pl.DataFrame | None:
        """Its curve at the points, or None where no cell reads it."""
        return self.multiverse.curves.get(self.number)

    @cached_property
    def points(self) -> Integers:
        """Levels that some point reads, in order."""
        return np.array([]) if self.curve is None else np.unique(numbers(self.curve, "point")).astype(np.int64)

    def choices(self, cells: pl.DataFrame) -> tuple[Integers, Integers]:
        """What the points of some cells read.

        Returns:
            Distinct points x replicates, positions in `points`; and the point of each cell.
        """
        fixed = self.multiverse.choices.get(self.key, {})
        names: dict[int | tuple[str, ...], int] = {}
        read: list[Integers] = []
        of_cell: list[int] = []
        replicates = len(self.multiverse.resample.counts)
        for rule, budget in cells.select("threshold_rule_id", "budget_cm3").iter_rows():
            name = self._point(str(rule), float(budget), fixed)
            if name not in names:
                names[name] = len(read)
                read.append(np.full(replicates, name) if isinstance(name, int) else self.multiverse.matched[name])
            of_cell.append(names[name])
        levels = np.stack(read)
        position = np.searchsorted(self.points, np.maximum(levels, 0))
        return np.where(levels == INFEASIBLE, INFEASIBLE, position), np.array(of_cell)

    def _point(self, rule: str, budget: float, fixed: Mapping[tuple[str, float], int]) -> int | tuple[str, ...]:
        """The level that a rule reads, or where the replicates' own levels are kept."""
        if rule == "test_matched":
            return (*self.key, str(budget))
        return fixed.get((rule, budget), INFEASIBLE)

    def _places(self, rows: pl.DataFrame, *axes: str) -> list[Integers]:
        point = np.searchsorted(self.points, numbers(rows, "point"))
        return [
            *(numbers(rows, axis).astype(np.int64) for axis in axes),
            point,
            numbers(rows, "subject").astype(np.int64),
        ]

    def _size(self, column: str) -> int:
        return len(self.multiverse.protocol.axis(column).levels)

    def _positions(self, cells: pl.DataFrame, column: str) -> Integers:
        order = {level: place for place, level in enumerate(self.multiverse.protocol.level_ids(column))}
        return np.array([order[str(level)] for level in cells.get_column(column)])

    def fill_dice(self, cells: pl.DataFrame, result: Floats) -> None:
        """Write the scores of the Dice cells into their rows of `result` (cells x replicates)."""
        cells = cells.filter(metric_id="dice")
        if self.curve is None or cells.is_empty():
            return
        resample = self.multiverse.resample
        places = self._places(self.curve, "postprocess")
        shape = (self._size("postprocess_id"), len(self.points), resample.shape[1])
        measured = np.zeros(shape[-1], np.bool_)
        measured[places[-1]] = True
        voxels = [
            dense(self.curve, places, shape, f"{name}_voxels")[..., measured].astype(np.float64)
            for name in ("predicted", "true_positive", "reference")
        ]
        choice, point = self.choices(cells)
        policy = self.multiverse.protocol.parameters.empty_dice
        scores = aggregated_dice(resample.among(measured), voxels[0], voxels[1], voxels[2], choice, policy)
        aggregation, postprocess = (self._positions(cells, c) for c in ("aggregation_id", "postprocess_id"))
        result[numbers(cells, "place")] = scores[aggregation, postprocess, point]

    def fill_sensitivity(self, cells: pl.DataFrame, result: Floats) -> None:
        """Write the scores of the lesion sensitivity cells into their rows of `result` (cells x replicates)."""
        cells = cells.filter(metric_id="lesion_sensitivity")
        rows = self.multiverse.lesions.get(self.number)
        if rows is None or cells.is_empty():
            return
        choice, point = self.choices(cells)
        definition, postprocess = (self._positions(cells, c) for c in ("lesion_definition_id", "postprocess_id"))
        aggregation, criterion = (self._positions(cells, c) for c in ("aggregation_id", "hit_criterion_id"))
        for (one, done), own in rows.partition_by("definition", "postprocess", as_dict=True).items():
            here = np.flatnonzero((definition == one) & (postprocess == done))
            if len(here):
                scores = self._sensitivity(own, choice)
                result[numbers(cells, "place")[here]] = scores[aggregation[here], criterion[here], point[here]]

    def _sensitivity(self, rows: pl.DataFrame, choice: Integers) -> Floats:
        """Aggregations x criteria x points x replicates of one lesion definition and post-processing."""
        resample = self.multiverse.resample
        places = self._places(rows)
        shape = (len(self.points), resample.shape[1])
        hits = np.stack([dense(rows, places, shape, f"hit_{criterion}") for criterion in CRITERIA]).astype(np.float64)
        lesions = np.zeros(shape[1])
        lesions[places[-1]] = numbers(rows, "lesion_count")
        return aggregated_sensitivity(resample, hits, lesions, choice)


@compiled
def count_orders(
    scores: Floats, weights: Floats, metric: Integers, tolerance: float, pairs: Integers, counts: Floats
) -> None:
    """Add cells to the weighted counts of a > b, a < b, ties, and pairs without a score.

    Args:
        scores: Methods x cells x replicates.
        weights: Universes of each cell, universe sets x cells.
        metric: Metric of each cell.
        tolerance: Smaller differences are ties.
        pairs: Positions of the two methods, pairs x 2.
        counts: Sets x metrics x pairs x 4 x replicates, added to in place.
    """
    for cell in range(scores.shape[1]):
        for pair in range(pairs.shape[0]):
            first, second = scores[pairs[pair, 0], cell], scores[pairs[pair, 1], cell]
            for one in range(weights.shape[0]):
                weight = weights[one, cell]
                if weight == 0:
                    continue
                target = counts[one, metric[cell], pair]
                for replicate in range(scores.shape[2]):
                    difference = first[replicate] - second[replicate]
                    if difference >= tolerance:
                        target[0, replicate] += weight
                    elif difference <= -tolerance:
                        target[1, replicate] += weight
                    elif difference == difference:
                        target[2, replicate] += weight
                    else:
                        target[3, replicate] += weight


@compiled
def add_marginals(
    scores: Floats,
    centres: Floats,
    metric: Integers,
    level: Integers,
    start: Integers,
    weight: Floats,
    sums: Floats,
    squares: Floats,
    weights: Floats,
) -> None:
    """Add cells to the marginal sums of scores by axis level, and to the sums of squares.

    Args:
        scores: Cells x replicates of one method.
        centres: What is subtracted from a score, by metric: keeps the sums of squares from cancelling.
        metric: Metric of each cell.
        level: Axis level of each entry.
        start: Where each cell's entries begin.
        weight: Universes of each entry, universe sets x entries.
        sums: Sets x metrics x levels x replicates, added to in place.
        squares: Sets x metrics x replicates, added to in place.
        weights: Universes of each cell, universe sets x cells.
    """
    replicates = scores.shape[1]
    for cell in range(scores.shape[0]):
        centred = scores[cell] - centres[metric[cell]]
        for one in range(weights.shape[0]):
            if weights[one, cell] == 0:
                continue
            square = squares[one, metric[cell]]
            for replicate in range(replicates):
                square[replicate] += weights[one, cell] * centred[replicate] * centred[replicate]
            for entry in range(start[cell], start[cell + 1]):
                target = sums[one, metric[cell], level[entry]]
                for replicate in range(replicates):
                    target[replicate] += weight[one, entry] * centred[replicate]


@dataclass(frozen=True)
class Marginals:
    """Sums over the universes of one set and some metrics, of scores less a constant.

    Attributes:
        sums: Methods x levels of all axes x replicates.
        squares: Sum of squares over universes and methods, by replicate.
        counts: Universes at each level.
    """

    sums: Floats
    squares: Floats
    counts: Floats

    def shares(self, axes: Mapping[str, slice]) -> dict[str, Floats]:
        """Share of every term in the total sum of squares, by replicate; NaN where undefined.

        Args:
            axes: Where each axis's levels lie.
        """
        first = next(iter(axes.values()))
        universes, methods = self.counts[first].sum(), len(self.sums)
        method = self.sums[:, first].sum(axis=1) / universes
        grand = method.mean(axis=0)
        total = self.squares - universes * methods * grand**2
        terms = {"total": total, "method": universes * ((method - grand) ** 2).sum(axis=0)}
        interactions: dict[str, Floats] = {}
        for column, place in axes.items():
            present = self.counts[place] > 0
            means = self.sums[:, place][:, present] / self.counts[place][present][:, None]
            level = means.mean(axis=0)
            per_level = universes / present.sum()
            terms[column] = per_level * methods * ((level - grand) ** 2).sum(axis=0)
            rest = means - level - method[:, None] + grand
            interactions[f"method:{column}"] = per_level * (rest**2).sum(axis=(0, 1))
        terms |= interactions
        terms["axes"] = np.sum([value for name, value in terms.items() if name not in ("total", "method")], axis=0)
        terms["remainder"] = total - terms["method"] - terms["axes"]
        return {name: divided(value, total) for name, value in terms.items()}


class Tally:
    """Counts of orders and marginal sums, added to group by group.

    Args:
        multiverse: Whose cells will be added.
        centres: What is subtracted from the scores of each metric.
        pairs: Positions of the methods whose orders are counted.
    """

    def __init__(self, multiverse: Multiverse, centres: Floats, pairs: Sequence[tuple[int, int]]) -> None:
        protocol, methods = multiverse.protocol, len(multiverse.methods)
        self.tolerance, self.centres = protocol.parameters.tie_tolerance, centres
        self.metrics = protocol.level_ids("metric_id")
        self.pairs = np.array(pairs, np.int64).reshape(-1, 2)
        sets, metrics, levels = len(UNIVERSE_SETS), len(self.metrics), len(multiverse.levels)
        replicates = len(multiverse.resample.counts)
        self.orders = np.zeros((sets, metrics, len(self.pairs), 4, replicates))
        self.sums = np.zeros((methods, sets, metrics, levels, replicates))
        self.squares = np.zeros((sets, metrics, replicates))
        self.counts = np.zeros((sets, metrics, levels))
        self.axes = _axis_places(protocol)

    @staticmethod
    def of(multiverse: Multiverse, centres: Floats, pairs: Sequence[tuple[int, int]]) -> "Tally":
        """The tally of a whole multiverse."""
        tally = Tally(multiverse, centres, pairs)
        for key, cells in multiverse.groups():
            tally.add(cells, multiverse.scores(key, cells))
        return tally

    def groups(self, universe_set: int) -> dict[str, list[int]]:
        """Metrics that have a universe, each and `all`, by name; empty without any."""
        present: list[int] = np.flatnonzero(self.counts[universe_set].sum(axis=1)).tolist()
        return {self.metrics[metric]: [metric] for metric in present} | {"all": present} if present else {}

    def add(self, cells: _Cells, scores: Floats) -> None:
        """Add the cells of a group, scored as methods x cells x replicates."""
        count_orders(scores, cells.weights, cells.metric, self.tolerance, self.pairs, self.orders)
        for place, own in enumerate(scores):
            add_marginals(
                own,
                self.centres,
                cells.metric,
                cells.level,
                cells.start,
                cells.weight,
                self.sums[place],
                self.squares,
                cells.weights,
            )
        metric = np.repeat(cells.metric, np.diff(cells.start))
        for one, weight in enumerate(cells.weight):
            np.add.at(self.counts[one], (metric, cells.level), weight)

    def flips(self, universe_set: int, metrics: Sequence[int]) -> Floats:
        """Flip shares, pairs x replicates; NaN where a score is undefined."""
        greater, less, tied, undefined = np.moveaxis(self.orders[universe_set, metrics].sum(axis=0), 1, 0)
        share = divided(np.minimum(greater, less) + tied / 2, greater + less + tied)
        return np.where(undefined > 0, np.nan, share)

    def marginals(self, universe_set: int, metrics: Sequence[int]) -> Marginals:
        """Marginal sums over some metrics, about the mean of their centres."""
        counts = self.counts[universe_set, metrics]
        universes = counts[:, next(iter(self.axes.values()))].sum(axis=1)
        shift = self.centres[metrics] - np.average(self.centres[metrics], weights=universes)
        sums = self.sums[:, universe_set, metrics]
        by_metric = sums[:, :, next(iter(self.axes.values()))].sum(axis=(0, 2))
        squares = self.squares[universe_set, metrics] + 2 * shift[:, None] * by_metric
        squares = squares + (len(sums) * universes * shift**2)[:, None]
        moved = sums + (shift[:, None] * counts)[None, :, :, None]
        return Marginals(moved.sum(axis=1), squares.sum(axis=0), counts.sum(axis=0))


def _axis_places(protocol: Protocol) -> dict[str, slice]:
    places: dict[str, slice] = {}
    start = 0
    for axis in protocol.axes:
        places[axis.column] = slice(start, start + len(axis.levels))
        start += len(axis.levels)
    return places


@declared(
    name="replicate_statistic",
    row="One row per universe set, statistic, metric (each and `all`), pair or term, and replicate that defines it; "
    "replicate 0 takes every subject once.",
    key=("universe_set", "statistic", "metric_id", "item", "replicate"),
    columns=("value",),
    inputs=(
        *("universe", "cell", "budget", "axis_level", "ranked_method", "method", "cohort_subject", "cell_score"),
        *("threshold_choice", "own_level", "replicate_level", "threshold_curve", "lesion_curve"),
        *("voxel_ranking", "slice_ranking", "score_histogram", "slice_score"),
    ),
    queries=multiverse_queries(PRIMARIES),
)
def replicate_statistic(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Flip shares, the largest of them, and variance shares of every replicate."""
    empty = replicate_statistic.table.frame()
    ranked = inputs["ranked_method"].filter(pl.col("is_ranked") & (pl.col("kind") == "method"))
    methods = [str(m) for m in ranked.sort("position").get_column("method_id")]
    multiverse = Multiverse(protocol, inputs, methods)
    if not methods or multiverse.resample.shape[1] == 0:
        return empty
    pairs = list(combinations(range(len(methods)), 2))
    tally = Tally.of(multiverse, metric_centres(protocol, inputs["primary_score"]), pairs)
    return pl.concat([empty, *tallied_statistics(tally, methods)])


def metric_centres(protocol: Protocol, scores: pl.DataFrame) -> Floats:
    """Mean score of each metric over its cells, 0 for a metric without scores."""
    means = dict(scores.sort("cell_id", "method_id").group_by("metric_id").agg(pl.col("score").mean()).iter_rows())
    return np.round([means.get(metric) or 0.0 for metric in protocol.level_ids("metric_id")], 6)


def tallied_statistics(
    tally: Tally, methods: Sequence[str], universe_sets: Sequence[str] = UNIVERSE_SETS
) -> Iterator[pl.DataFrame]:
    """Flip shares, the largest of them, and variance shares of every replicate in some universe sets."""
    for universe_set in universe_sets:
        place = UNIVERSE_SETS.index(universe_set)
        for name, metrics in tally.groups(place).items():
            flips = tally.flips(place, metrics)
            for pair, share in zip(tally.pairs.tolist(), flips, strict=True):
                yield statistic_rows(universe_set, "flip_share", name, f"{methods[pair[0]]}|{methods[pair[1]]}", share)
            if len(flips):
                yield statistic_rows(universe_set, "phi_max", name, "", flips.max(axis=0))
            for term, share in tally.marginals(place, metrics).shares(tally.axes).items():
                yield statistic_rows(universe_set, "variance_share", name, term, share)


def statistic_rows(universe_set: str, statistic: str, metric_id: str, item: str, value: Floats) -> pl.DataFrame:
    """Replicates of one statistic; where it is undefined it is left out."""
    frame = pl.DataFrame({"replicate": np.arange(len(value)), "value": value}).filter(pl.col("value").is_finite())
    names = {"universe_set": universe_set, "statistic": statistic, "metric_id": metric_id, "item": item}
    return frame.select(*(pl.lit(text).alias(name) for name, text in names.items()), "replicate", "value")
