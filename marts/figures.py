"""Figures of a release, each drawn from marts alone: for the report and for notebooks.

A figure comes with its headline, a caption that says what is drawn and over how many, the marts that hold its numbers,
and words for those who cannot see it; a release that has nothing to draw gets the reason instead. A method keeps its
colour and its marker in every figure. Baselines are left out: their rows are in the same marts.
"""

import io
import textwrap
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import polars as pl
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Floats = NDArray[np.float64]

WIDTH = 7.1  # inches: two columns of a journal page
INK, SOFT, PALE = "#222222", "#767676", "#e8e8e8"
# From the palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), told apart in every kind of colour vision.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#b3a600")
MARKERS = "os^DvPX*"
STEPS = 24  # of a specification curve: as many as can be told apart in a column of a page
CONTRASTED = ("validation", "test_matched", "equal_burden")  # operating points of the forest plot, a column each
MOST_PAIRS = 10  # of a metric that the figure of flips shows
MOST_ORDERS = 5  # of a metric that are shown by name
NO_SHARE = 1e-12  # of a sum of squares: a term that does not act
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STYLE: dict[str, object] = {
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "text.parse_math": False,  # a name is no formula
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "path",  # a page looks the same whatever fonts its reader has
    "svg.hashsalt": "mirto",  # else identifiers inside are drawn at random
}


@dataclass(frozen=True)
class Drawn:
    """A figure, or the reason why there is none.

    Attributes:
        name: Short name, which can be a file name.
        title: What it shows, in a sentence with its main number; where there is no figure, why.
        caption: What is drawn, and over how many; empty where there is no figure.
        marts: The marts that hold its numbers.
        figure: The figure; None where the release has nothing to draw.
    """

    name: str
    title: str
    caption: str
    marts: tuple[str, ...]
    figure: "Figure | None"

    def svg(self) -> str:
        """The figure as SVG text without a date; the same release gives the same text. Empty without a figure."""
        return self._saved("svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))).decode()

    def save(self, file: Path) -> None:
        """Write the figure as PDF with its headline, without a date; nothing is written without a figure."""
        if self.figure is not None:
            with _look():
                headline = self.figure.suptitle(
                    textwrap.fill(self.title, 90), x=0.01, ha="left", fontsize=9, fontweight="bold"
                )
            headline.set_in_layout(True)
            file.write_bytes(self._saved("pdf", metadata={"CreationDate": None}))
            headline.set_text("")
            headline.set_in_layout(False)  # it would keep its place

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows."""
        return self._saved("png", dpi=150) or None

    def _saved(self, form: str, dpi: float | None = None, metadata: dict[str, None] | None = None) -> bytes:
        if self.figure is None:
            return b""
        buffer = io.BytesIO()
        with _look():
            self.figure.savefig(buffer, format=form, dpi=dpi or "figure", metadata=metadata)
        return buffer.getvalue()


@dataclass(frozen=True)
class Cast:
    """Who and what is drawn: ranked methods and scored metrics in declared order, and values of the protocol."""

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    budgets: tuple[float, ...]
    reference_budget_cm3: float
    interval_level: float
    tie_tolerance: float
    test_count: int
    universe_count: int

    def colour(self, method: str) -> str:
        """A method's colour."""
        return PALETTE[self.methods.index(method) % len(PALETTE)]

    def marker(self, method: str) -> str:
        """A method's marker."""
        place = self.methods.index(method)
        return MARKERS[(place + place // len(PALETTE)) % len(MARKERS)]  # no two of 64 share colour and marker


def figures(connection: duckdb.DuckDBPyConnection) -> Iterator[Drawn]:
    """Every figure of a release, in the order of the questions that they answer."""
    yield from curves(connection)
    yield flips(connection)
    yield orders(connection)
    yield variance(connection)
    yield variance_terms(connection)
    yield transfer(connection)
    yield contrasts(connection)


def in_words(identifier: str) -> str:
    """The name of an axis or a metric of the multiverse, for readers."""
    known = {"dice": "Dice", "auroc": "AUROC", "aroc": "AROC", "ap": "AP", "cm3": "(cm³)", "all": "all metrics"}
    return " ".join(known.get(word, word) for word in identifier.removesuffix("_id").split("_"))


def shortened(name: str, most: int) -> str:
    """A name of at most some characters, cut in its middle: names often differ at their ends."""
    if len(name) <= most:
        return name
    kept = most - 1
    return f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}"


def _pair(first: str, second: str) -> str:
    return f"{shortened(first, 18)} vs {shortened(second, 18)}"


def cast(connection: duckdb.DuckDBPyConnection) -> Cast:
    """Read who and what is drawn."""
    methods = connection.sql(
        "select method_id from ranked_method where is_ranked and kind = 'method' order by position"
    ).fetchall()
    metrics = connection.sql("""
        select a.level_id
        from axis_level as a
        where a.axis_column = 'metric_id'
            and a.level_id in (select metric_id from method_cell where universe_set = 'defensible')
        order by a.position
    """).fetchall()
    budgets = connection.sql("select budget_cm3 from budget order by position").fetchall()
    values = connection.sql("""
        select
            reference_budget_cm3, interval_level, tie_tolerance,
            (select count(*) from cohort_subject where is_included and split = 'test'),
            (select count(*) from universe where status = 'ok' and is_defensible)
        from protocol
    """).fetchall()[0]
    return Cast(
        tuple(str(name) for (name,) in methods),
        tuple(str(name) for (name,) in metrics),
        tuple(float(value) for (value,) in budgets),
        float(values[0]),
        float(values[1]),
        float(values[2]),
        int(values[3]),
        int(values[4]),
    )


@contextmanager
def _look() -> Generator[None]:
    """Matplotlib as these figures want it, whatever its settings are, and as it was afterwards."""
    from matplotlib import rc_context, rcdefaults, rcParams

    with rc_context():
        rcdefaults()
        rcParams.update(STYLE)
        yield


def _panels(
    down: int, across: int, height: float, *, sharex: bool = True, sharey: bool = True, **ratios: Sequence[float]
) -> tuple["Figure", list[list["Axes"]]]:
    """A figure of panels, by row and column, which share their axes unless said otherwise."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(down, across, squeeze=False, sharex=sharex, sharey=sharey, **ratios)
    return figure, [[axes[i, j] for j in range(across)] for i in range(down)]


def _grid(count: int, most: int = 3) -> tuple[int, int]:
    """Rows and columns that hold some panels."""
    across = min(most, count)
    return -(-count // across), across


def _trim(rows: Sequence[Sequence["Axes"]], count: int) -> list["Axes"]:
    """The first panels; the others are hidden, and the lowest that is left in each column keeps its labels."""
    panels = [ax for row in rows for ax in row]
    for ax in panels[count:]:
        ax.set_axis_off()
    for ax in panels[max(count - len(rows[0]), 0) : count]:
        ax.tick_params(labelbottom=True)
    return panels[:count]


def _patches(cast: Cast) -> list["Artist"]:
    from matplotlib.patches import Patch

    return [Patch(color=cast.colour(method), label=method) for method in cast.methods]


def _sign(label: str, colour: str, marker: str = "", *, line: bool = True, hollow: bool = False) -> "Artist":
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=colour,
        linewidth=0.9,
        linestyle="-" if line else "",
        marker=marker,
        markersize=3.8,
        markerfacecolor="white" if hollow else colour,
        label=label,
    )


def _spaced(starts: Sequence[bool], gap: float) -> Floats:
    """Heights of rows, with a gap before every group's first."""
    return np.arange(len(starts)) + gap * np.cumsum(np.asarray(starts, np.float64))


def _starts(groups: Sequence[str]) -> list[bool]:
    """Whether each is the first of its group."""
    return [i == 0 or group != groups[i - 1] for i, group in enumerate(groups)]


def _range(values: pl.Series) -> str:
    """Least and largest of some counts."""
    return " to ".join(dict.fromkeys(str(value) for value in (values.min(), values.max())))


# --- Specification curves


def curves(connection: duckdb.DuckDBPyConnection) -> list[Drawn]:
    """One figure per metric: a method's score over all defensible universes, and the choices that go with it."""
    marts, cast_ = ("method_cell", "cell", "cell_score"), cast(connection)
    if not cast_.metrics or not cast_.methods:
        return [Drawn("curves", "No metric is scored in any defensible universe.", "", marts, None)]
    choices = connection.sql("""
        with level_of_cell as (
            unpivot (select * replace (format('{:g}', budget_cm3) as budget_cm3) from cell)
            on columns(* exclude (cell_id, metric_id, multiplicity))
            into name axis_column value level_id
        )
        select l.cell_id, l.metric_id, l.axis_column, l.level_id
        from level_of_cell as l
        join metric_axis as x using (metric_id, axis_column)
        join axis_level as a using (axis_column, level_id)
        where l.cell_id in (from method_cell select cell_id where universe_set = 'defensible')
        order by a.axis_position, a.position, l.cell_id
    """).pl()
    scores = connection.sql("""
        select c.metric_id, c.cell_id, c.method_id, c.score, c.weight, s.n_subjects
        from method_cell as c
        join cell_score as s using (cell_id, method_id)
        join ranked_method as m on m.method_id = c.method_id and m.kind = 'method' and m.is_ranked
        where c.universe_set = 'defensible' and c.metric_id <> 'all'
        order by c.cell_id, m.position
    """).pl()
    return [
        _curve(cast_, metric, scores.filter(metric_id=metric), choices.filter(metric_id=metric), marts)
        for metric in cast_.metrics
    ]


@dataclass(frozen=True)
class _Cells:
    """The cells of a metric: a row of scores each, its weight in universes, and which cells take which level."""

    scores: Floats
    weight: Floats
    levels: dict[tuple[str, str], NDArray[np.bool_]]
    fixed: tuple[str, ...]

    def first(self, tolerance: float) -> Floats:
        """Per cell and method, its part of the first place: methods that tie there share it."""
        leads = (self.scores > self.scores.max(axis=1, keepdims=True) - tolerance).astype(np.float64)
        return leads / leads.sum(axis=1, keepdims=True)


def _cells(cast: Cast, scores: pl.DataFrame, choices: pl.DataFrame) -> _Cells:
    wide = scores.pivot("method_id", index=["cell_id", "weight"], values="score").sort("cell_id")
    cells = wide["cell_id"].to_numpy()
    taken = {
        (str(axis), str(level)): np.isin(cells, group["cell_id"].to_numpy())
        for (axis, level), group in choices.group_by("axis_column", "level_id", maintain_order=True)
    }
    axes = [axis for axis, _ in taken]
    return _Cells(
        wide.select(cast.methods).to_numpy().astype(np.float64),
        wide["weight"].to_numpy().astype(np.float64),
        {(axis, level): cells for (axis, level), cells in taken.items() if axes.count(axis) > 1},
        tuple(f"{in_words(axis)} {level}" for axis, level in taken if axes.count(axis) == 1),
    )


def steps(values: Floats, order: NDArray[np.intp], weight: Floats, most: int = STEPS) -> Floats:
    """Weighted means over steps of equal weight along an order.

    Args:
        values: One per cell.
        order: The cells from left to right.
        weight: One per cell, above 0.
        most: Steps; fewer where there are fewer cells.
    """
    edges = np.linspace(0, float(weight.sum()), min(most, len(order)) + 1)
    passed = np.concatenate([[0], np.cumsum(weight[order])])
    total = np.concatenate([[0], np.cumsum((values * weight)[order])])
    return np.diff(np.interp(edges, passed, total)) / np.diff(edges)


def _curve(cast: Cast, metric: str, scores: pl.DataFrame, choices: pl.DataFrame, marts: tuple[str, ...]) -> Drawn:
    cells = _cells(cast, scores, choices)
    axes_of = [axis for axis, _ in cells.levels]
    heights = [*(i + 0.6 * n for i, n in enumerate(np.cumsum(_starts(axes_of)) - 1))] if axes_of else []
    heights.append((heights[-1] if heights else -1.0) + 1.7)
    down, across = _grid(len(cast.methods), 4)
    tall = 0.14 * heights[-1] + 0.25
    with _look():
        figure, rows = _panels(
            2 * down, across, 0.6 + down * (1.7 + tall), sharey=False, height_ratios=[1.4, tall] * down
        )
        for place, method in enumerate(cast.methods):
            above, below = (rows[2 * (place // across) + part][place % across] for part in (0, 1))
            _curve_of_method(cast, cells, place, above, below, heights)
            above.set_title(
                f"{shortened(method, 24)}\n{cells.scores[:, place].min():.3f} to {cells.scores[:, place].max():.3f}",
                color=cast.colour(method),
            )
            if place % across:
                above.tick_params(labelleft=False)
                below.set_yticks([])
            else:
                above.set_ylabel(in_words(metric))
                names = [f"{level} cm³" if axis == "budget_cm3" else level for axis, level in cells.levels]
                below.set_yticks(heights, [*names, "ranks first"], fontsize=6)
        for place in range(len(cast.methods), down * across):
            rows[-1][place % across].set_axis_off()
            rows[-2][place % across].set_axis_off()
        for ax in rows[-3] if down > 1 else ():
            ax.tick_params(labelbottom=True)
        rows[0][0].set_xlim(-2, 102)
        figure.supxlabel("defensible universes, sorted by the method's own score (%)", fontsize=8)
    universes, count = int(cells.weight.sum()), len(cells.weight)
    spread = (cells.scores.max(axis=0) - cells.scores.min(axis=0)).max()
    fixed = f" The same everywhere: {', '.join(cells.fixed)}." if cells.fixed else ""
    return Drawn(
        f"curves_{metric}",
        f"Choices alone move the {in_words(metric)} of one and the same method by up to {spread:.3f}",
        f"Above, the {in_words(metric)} of each method in every distinct cell, from its lowest to its highest; each"
        f" score is a mean or a pooled value over {_range(scores['n_subjects'])} test subjects. Below, the same"
        f" universes in at most {STEPS} steps: the height of a bar is the share of a step's universes that use this"
        " level, so bars that grow towards the right mark a choice that lifts the score. Lowest row: the share in"
        f" which the method ranks first. n = {universes:,} defensible universes in {count:,} cells.{fixed}",
        marts,
        figure,
    )


def _curve_of_method(
    cast: Cast, cells: _Cells, place: int, above: "Axes", below: "Axes", heights: Sequence[float]
) -> None:
    """One column: the curve of a method, and below it the choices along the curve."""
    shade, score = cast.colour(cast.methods[place]), cells.scores[:, place]
    order = np.argsort(score, kind="stable")
    edges = 100 * np.concatenate([[0], np.cumsum(cells.weight[order])]) / cells.weight.sum()
    above.stairs(score[order], edges, baseline=None, color=shade, linewidth=1.6)
    low, high = cells.scores.min(), cells.scores.max()
    margin = 0.04 * (high - low) or 0.01
    above.set_ylim(low - margin, high + margin)
    ranks_first = cells.first(cast.tie_tolerance)[:, place]
    for height, share in zip(heights, [*cells.levels.values(), ranks_first], strict=True):
        bars = steps(share.astype(np.float64), order, cells.weight)
        ends = np.linspace(0, 100, len(bars) + 1)
        foot = height + 0.42  # rows grow downwards, bars upwards
        below.axhline(foot, color=SOFT, linewidth=0.3)
        colour = shade if height == heights[-1] else INK
        below.stairs(foot - 0.84 * bars, ends, baseline=foot, fill=True, color=colour, linewidth=0)
    below.set_ylim(heights[-1] + 0.6, -0.6)
    below.tick_params(axis="y", length=0)
    below.spines["left"].set_visible(False)


# --- Flips and orders


def flips(connection: duckdb.DuckDBPyConnection) -> Drawn:
    """The share of universes in which each pair takes its rarer order, beside the size of the differences."""
    marts, cast_ = ("flip_share",), cast(connection)
    rows = connection.sql(f"""
        select f.*, count(*) over (partition by f.metric_id) as pair_count
        from flip_share as f
        left join axis_level as a on a.axis_column = 'metric_id' and a.level_id = f.metric_id
        where f.universe_set = 'defensible' and not f.is_baseline_pair
        qualify row_number() over (
            partition by f.metric_id
            order by f.flip_share desc, f.median_abs_difference desc, f.method_a, f.method_b
        ) <= {MOST_PAIRS}
        order by a.position nulls last, f.flip_share desc, f.median_abs_difference desc, f.method_a, f.method_b
    """).pl()
    if rows.is_empty():
        return Drawn("flips", "There is no pair of methods with a common universe: nothing can flip.", "", marts, None)
    starts = _starts(rows["metric_id"].to_list())
    y = _spaced(starts, 1.4)
    pairs = rows.to_dicts()
    with _look():
        figure, ((share, size, lead),) = _panels(
            1, 3, 1.3 + 0.14 * float(y[-1]), sharex=False, width_ratios=[1, 0.8, 1.3]
        )
        _flip_shares(share, rows, y)
        share.set_xlabel(f"flip share\n({100 * cast_.interval_level:g} % interval)")
        size.barh(y, rows["median_abs_difference"].to_numpy(), 0.6, color="#b5b5b5")
        size.set_xlabel("median absolute difference\nof the two scores")
        _leads(cast_, lead, pairs, y)
        share.set_yticks(y, [_pair(row["method_a"], row["method_b"]) for row in pairs], fontsize=6)
        share.set_ylim(float(y[-1]) + 0.8, float(y[0]) - 1.8)
        for row, at, is_start in zip(pairs, y, starts, strict=True):
            if is_start:
                share.text(0, at - 0.95, in_words(row["metric_id"]), fontsize=7, fontweight="bold", va="center")
            if is_start and row["metric_id"] == "dice" and row["significant_a"] is not None:
                beside = ((1, at - 0.95), (4, 0), ("axes fraction", "data"), "offset points")
                lead.annotate("Holm", *beside, va="center", fontsize=6)
        for ax in (share, size, lead):
            ax.tick_params(axis="y", length=0)
        figure.legend(handles=_patches(cast_), loc="outside lower left", ncols=4, handlelength=1)
    return _told_flips(cast_, rows, marts, figure)


def _flip_shares(ax: "Axes", rows: pl.DataFrame, y: Floats) -> None:
    shares = rows.select("flip_share", "flip_share_low", "flip_share_high").cast(pl.Float64).fill_null(np.nan)
    ax.hlines(y, shares["flip_share_low"].to_numpy(), shares["flip_share_high"].to_numpy(), color=INK, linewidth=0.9)
    ax.plot(shares["flip_share"].to_numpy(), y, "o", color=INK, markersize=3)
    ax.axvline(0.5, color=SOFT, linewidth=0.6, linestyle=":")
    ax.set_xlim(-0.01, 0.52)


def _leads(cast: Cast, ax: "Axes", pairs: Sequence[Row], y: Floats) -> None:
    """How far each of a pair leads where it leads, the first to the left; for Dice, how many contrasts stand."""
    widest = 0.0
    for row, at in zip(pairs, y, strict=True):
        for method, value, sign in (
            (row["method_a"], row["median_lead_a"], -1),
            (row["method_b"], row["median_lead_b"], 1),
        ):
            if value is not None:  # a method that never leads has no lead
                ax.barh([at], [sign * value], 0.6, color=cast.colour(method))
                widest = max(widest, value)
        if row["significant_a"] is not None and row["metric_id"] == "dice":  # of Dice: the same for every metric
            text = f"{row['significant_a']} | {row['significant_b']}"
            ax.annotate(text, (1, at), (4, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=6)
    widest = widest or 1.0  # nothing but ties
    ax.set_xlim(-1.05 * widest, 1.05 * widest)
    ax.axvline(0, color=INK, linewidth=0.6)
    ax.xaxis.set_major_formatter(_absolute)
    ax.set_xlabel("median lead where it leads\nfirst of the pair (left), second (right)")


def _absolute(value: float, _place: int) -> str:
    return f"{abs(value):g}"


def _told_flips(cast: Cast, rows: pl.DataFrame, marts: tuple[str, ...], figure: "Figure") -> Drawn:
    one_metric = rows.filter(pl.col("metric_id") != "all") if (rows["metric_id"] != "all").any() else rows
    most = one_metric.sort("flip_share", "median_abs_difference", descending=True, maintain_order=True).row(
        0, named=True
    )
    title = f"The pair that flips most is {most['method_a']} vs {most['method_b']} in {in_words(most['metric_id'])}: "
    title += f"{most['flip_share']:.3f} of the universes, at a median difference of {most['median_abs_difference']:.4f}"
    if most["flip_share"] == 0:
        title = "No pair of methods flips: every defensible universe gives each pair the same order"
    counts = rows.select(pl.col("greater_count") + pl.col("less_count") + pl.col("tie_count")).to_series()
    shown, there = MOST_PAIRS, int(rows["pair_count"].to_numpy().max())
    left_out = f" Shown are the {shown} of {there} pairs per metric that flip most." if there > shown else ""
    return Drawn(
        "flips",
        title,
        "Left, the share of defensible universes that give a pair's rarer order, ties half (dotted: a coin toss), with"
        f" its {100 * cast.interval_level:g} % interval over resampled test subjects (n = {cast.test_count}); middle"
        " and right, how large the differences are. Read each row to its right before believing it: a large share with"
        " tiny differences says that the two are merely close, a large share with sizeable leads on both sides that the"
        " evaluation decides who wins. Numbers at the right: Dice contrasts that stand after Holm's adjustment, for the"
        f" first | the second. n = {_range(counts)} universes per metric.{left_out}",
        marts,
        figure,
    )


def orders(connection: duckdb.DuckDBPyConnection) -> Drawn:
    """The orders in which the methods come out, and how often."""
    marts, cast_ = ("order_share",), cast(connection)
    rows = connection.sql(f"""
        with placed as (
            select
                o.metric_id, o.method_order, o.share, o.universe_count,
                least(
                    {MOST_ORDERS + 1},
                    row_number() over (partition by o.metric_id order by o.share desc, o.method_order)
                ) as place
            from order_share as o
            where o.universe_set = 'defensible' and o.order_kind = 'weak'
        )
        select
            p.metric_id, p.place,
            if(p.place <= {MOST_ORDERS}, any_value(p.method_order), format('{{}} more', count(*))) as name,
            fsum(p.share) as share, sum(p.universe_count)::bigint as universe_count, count(*) as order_count
        from placed as p
        left join axis_level as a on a.axis_column = 'metric_id' and a.level_id = p.metric_id
        group by p.metric_id, a.position, p.place
        order by a.position nulls last, p.place
    """).pl()
    if len(cast_.methods) < 2 or rows.is_empty():
        why = "There is no order: fewer than two methods, or no universe that is scored for all of them."
        return Drawn("orders", why, "", marts, None)
    starts = _starts(rows["metric_id"].to_list())
    y = _spaced(starts, 1.2)
    with _look():
        figure, ((ax,),) = _panels(1, 1, 0.9 + 0.14 * float(y[-1]))
        for row, at in zip(rows.to_dicts(), y, strict=True):
            is_shared = row["place"] > MOST_ORDERS or _leader(row["name"]) is None
            shade = "#cccccc" if is_shared else cast_.colour(_leader(row["name"]) or "")
            percent = 100 * row["share"]
            ax.barh([at], [percent], 0.7, color=shade)
            ax.annotate(
                f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %",
                (percent, at),
                (3, 0),
                "data",
                "offset points",
                va="center",
                fontsize=6,
            )
            text = _order_in_words(row["name"])
            ax.annotate(text, (1, at), (26, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=6)
        groups = [(at, row) for at, row, is_start in zip(y, rows["metric_id"], starts, strict=True) if is_start]
        ax.set_yticks([at for at, _ in groups], [in_words(metric) for _, metric in groups])
        ax.set_ylim(float(y[-1]) + 0.8, float(y[0]) - 0.8)
        ax.set_xlim(0, 100)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("share of defensible universes (%)", loc="left")
    per_metric = rows.filter(pl.col("metric_id") != "all").group_by("metric_id").agg(pl.col("order_count").sum())
    universes = rows.group_by("metric_id").agg(pl.col("universe_count").sum())["universe_count"]
    return Drawn(
        "orders",
        f"Within a metric, {len(cast_.methods)} methods come out in {_range(per_metric['order_count'])} different"
        f" order{'' if per_metric['order_count'].max() == 1 else 's'}",
        f"Each bar is one order of the methods (= for a tie) and the share of defensible universes that give it, the"
        f" {MOST_ORDERS} commonest per metric. Colour: the method in front; grey: a tie in front, or all further"
        " orders. One long bar says that the order is the methods' own, many short ones that whoever chooses the"
        f" evaluation chooses the winner. n = {_range(universes)} universes per metric.",
        marts,
        figure,
    )


def _order_in_words(order: str, most: int = 84) -> str:
    """An order to stand beside its bar: where it is long its names are cut, and then its end."""
    spaced = order.replace(">", " > ").replace("=", " = ")
    if len(spaced) > most:
        spaced = " ".join(shortened(name, 12) for name in spaced.split(" "))
    return spaced if len(spaced) <= most else f"{spaced[: most - 2]} …"


def _leader(order: str) -> str | None:
    """The method in front of an order; None where methods tie there."""
    first = order.split(">")[0]
    return None if "=" in first else first


# --- Variance


def variance(connection: duckdb.DuckDBPyConnection) -> Drawn:
    """How the variance of each metric's scores splits into methods, axes, and combinations of axes."""
    marts, cast_ = ("variance_share",), cast(connection)
    shares = connection.sql("""
        select v.metric_id, v.term, v.share, v.share_low, v.share_high
        from variance_share as v
        left join axis_level as a on a.axis_column = 'metric_id' and a.level_id = v.metric_id
        where v.universe_set = 'defensible' and v.share is not null and v.term in ('method', 'axes', 'remainder')
        order by a.position nulls last, v.term
    """).pl()
    own = shares.filter((pl.col("term") == "method") & (pl.col("metric_id") != "all"))
    if own.is_empty():
        return Drawn("variance", "No metric has any variance to share out.", "", marts, None)
    names = shares["metric_id"].unique(maintain_order=True).to_list()
    parts = (("method", "#0072b2", "white"), ("axes", "#e69f00", INK), ("remainder", "#cccccc", INK))
    with _look():
        from matplotlib.patches import Patch

        figure, ((ax,),) = _panels(1, 1, 1.1 + 0.36 * len(names))
        for y, metric in enumerate(names):
            of = {row["term"]: row for row in shares.filter(metric_id=metric).to_dicts()}
            start = 0.0
            for term, fill, ink in parts:
                value = of[term]["share"]
                ax.barh([y], [100 * value], 0.62, [100 * start], color=fill, edgecolor="white", linewidth=0.5)
                if value > 0.035:
                    middle = 100 * (start + value / 2)
                    ax.text(middle, y, f"{100 * value:.0f}", ha="center", va="center", color=ink, fontsize=7)
                start += value
            _variance_intervals(ax, of, y)
        ax.set_yticks(range(len(names)), [in_words(name) for name in names])
        ax.set_xlim(0, 100)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("share of the sum of squares over defensible universes and methods (%)")
        words = {"method": "method", "axes": "axes", "remainder": "combinations of axes"}
        figure.legend(
            handles=[Patch(color=fill, label=words[term]) for term, fill, _ in parts],
            loc="outside lower left",
            ncols=3,
            handlelength=1,
        )
    values = own["share"].to_list()
    span = " to ".join(dict.fromkeys(f"{100 * value:.0f}" for value in (min(values), max(values))))
    return Drawn(
        "variance",
        f"Within a metric, {span} % of the variance belongs to the method",
        "Each bar splits the sum of squares of a metric's scores into the methods, the axes of the evaluation (alone"
        " and with the method), and what only combinations of axes explain. The lines at the two borders are"
        f" {100 * cast_.interval_level:g} % intervals over resampled test subjects (n = {cast_.test_count}): of the"
        " methods' part from the left, of the remainder from the right. The bar of all metrics mostly says that metrics"
        f" live on different scales: read the others first. n = {len(cast_.methods)} methods in"
        f" {cast_.universe_count:,} scored defensible universes, a part of them for each metric.",
        marts,
        figure,
    )


def _variance_intervals(ax: "Axes", of: Mapping[str, Row], y: float) -> None:
    """Lines at the two borders of a bar."""
    for term, sign in (("method", 1), ("remainder", -1)):
        low, high = of[term]["share_low"], of[term]["share_high"]
        if low is None:
            continue
        ends = [100 * value if sign > 0 else 100 * (1 - value) for value in (low, high)]
        ax.hlines([y + 0.38], [min(ends)], [max(ends)], color=INK, linewidth=1)


def variance_terms(connection: duckdb.DuckDBPyConnection) -> Drawn:
    """What each axis does to all methods alike, and to some more than to others."""
    marts, cast_ = ("variance_share",), cast(connection)
    terms = connection.sql(f"""
        select
            v.metric_id, replace(v.term, 'method:', '') as axis_column, v.term like 'method:%' as with_method,
            v.share, v.share_low, v.share_high
        from variance_share as v
        join (select distinct axis_column, axis_position from axis_level) as a
            on a.axis_column = replace(v.term, 'method:', '')
        where v.universe_set = 'defensible' and v.level_count > 1 and v.metric_id <> 'all' and v.share > {NO_SHARE}
        order by a.axis_position, v.metric_id, with_method
    """).pl()
    order = terms["axis_column"].unique(maintain_order=True).to_list()
    if not order:
        why = "No axis has two levels left that act: nothing but the methods can differ."
        return Drawn("variance_terms", why, "", marts, None)
    down, across = _grid(len(cast_.metrics))
    with _look():
        figure, panels = _panels(down, across, 0.9 + down * (0.4 + 0.2 * len(order)))
        for ax, metric in zip(_trim(panels, len(cast_.metrics)), cast_.metrics, strict=True):
            for row in terms.filter(metric_id=metric).to_dicts():
                y = order.index(row["axis_column"]) + (0.17 if row["with_method"] else -0.17)
                shade = "#d55e00" if row["with_method"] else INK
                if row["share_low"] is not None:
                    ax.hlines([y], [100 * row["share_low"]], [100 * row["share_high"]], color=shade, linewidth=0.9)
                face = shade if row["with_method"] else "white"
                ax.plot([100 * row["share"]], [y], "o", color=shade, markersize=3.5, markerfacecolor=face)
            ax.set_title(in_words(metric))
            ax.set_ylim(len(order) - 0.5, -0.5)
            ax.grid(axis="y", color=PALE, linewidth=0.5)
            ax.set_axisbelow(True)
        panels[0][0].set_yticks(range(len(order)), [in_words(axis) for axis in order])
        panels[0][0].set_xlim(left=-2)
        panels[-1][0].set_xlabel("share of the metric's sum of squares (%)", loc="left")
        signs = [_sign("axis alone", INK, "o", hollow=True), _sign("axis with the method", "#d55e00", "o")]
        figure.legend(handles=signs, loc="outside lower left", ncols=2)
    return Drawn(
        "variance_terms",
        _turning(terms, len(cast_.methods)),
        "The same, axis by axis. The hollow mark is what an axis does to all methods alike, the filled mark what it"
        " does to some more than to others: only filled marks can change an order. Lines:"
        f" {100 * cast_.interval_level:g} % intervals over resampled test subjects (n = {cast_.test_count}). An axis"
        " that does not act, or has a single level left, is not shown.",
        marts,
        figure,
    )


def _turning(terms: pl.DataFrame, method_count: int) -> str:
    """The axis that can turn a ranking most."""
    turning = terms.filter(pl.col("with_method")).sort("share", descending=True, maintain_order=True)
    if method_count < 2 or turning.is_empty():
        return "No axis moves the methods apart: what each axis alone does to them"
    most = turning.row(0, named=True)
    axis, metric = in_words(most["axis_column"]), in_words(most["metric_id"])
    return f"The axis that moves methods apart most is {axis} in {metric} ({100 * most['share']:.0f} %)"


# --- Thresholds and contrasts


def transfer(connection: duckdb.DuckDBPyConnection) -> Drawn:
    """The burden that thresholds realise on test subjects, against the budget that names them."""
    marts, cast_ = ("operating_point",), cast(connection)
    points = connection.sql("""
        select o.*
        from operating_point as o
        join calibration_rule as r on r.threshold_rule_id = o.threshold_rule_id and r.uses_budget
        join ranked_method as m on m.method_id = o.method_id and m.kind = 'method' and m.is_ranked
        where o.postprocess_id = 'plain'
        order by r.position, o.budget_cm3, m.position
    """).pl()
    if points.is_empty():
        return Drawn("transfer", "No rule with a budget has a threshold.", "", marts, None)
    rules = points["threshold_rule_id"].unique(maintain_order=True).to_list()
    down, across = _grid(len(rules))
    with _look():
        figure, panels = _panels(down, across, 0.9 + 1.8 * down)
        for ax, rule in zip(_trim(panels, len(rules)), rules, strict=True):
            rows = points.filter(threshold_rule_id=rule)
            _realised(cast_, ax, rows.to_dicts())
            ax.set_title(f"{rule}: above at {_above(rows)} of {len(rows)}")
        _burden_scales(cast_, panels[0][0], points)
        panels[-1][0].set_xlabel("nominal budget (cm³ of false positives per subject)", loc="left")
        figure.supylabel("realised on test: mean with interval (cm³)", fontsize=8)
        signs = [_sign(method, cast_.colour(method), cast_.marker(method)) for method in cast_.methods]
        signs.append(_sign("the budget", INK))
        figure.legend(handles=signs, loc="outside lower left", ncols=min(len(signs), 5))
    by_validation = points.filter(threshold_rule_id="validation")
    title = (
        f"Validation thresholds exceed their budget on test at {_above(by_validation)} of {len(by_validation)} points"
    )
    return Drawn(
        "transfer",
        title if len(by_validation) else "No threshold comes from validation subjects or from the cohort's own folds",
        "One panel per threshold rule: the mean false-positive volume that each method realised on the test subjects"
        f" (n = {_range(points['n_subjects'])}), with its {100 * cast_.interval_level:g} % interval, against the budget"
        " that the rule was asked to keep (black line); plain maps. A mark above the line exceeds the budget on"
        " average; the panel's title says at how many points. test_matched is chosen on the test subjects themselves:"
        " it shows what was possible. The vertical scale is logarithmic above 1 cm³ and linear below.",
        marts,
        figure,
    )


def _above(points: pl.DataFrame) -> int:
    """Operating points whose mean burden lies above the budget."""
    return points.filter(pl.col("burden_cm3_mean") > pl.col("budget_cm3")).height


def _realised(cast: Cast, ax: "Axes", points: Sequence[Row]) -> None:
    """One panel: the means of all methods and budgets, beside each other where their budgets coincide."""
    for budget in cast.budgets:  # a diagonal would be read at the wrong place by marks that stand beside each other
        ax.hlines([budget], [budget / 1.33], [budget * 1.33], color=INK, linewidth=0.9)
    dodge = np.exp(0.22 * np.linspace(-1, 1, len(cast.methods))) if len(cast.methods) > 1 else np.ones(1)
    for row in points:
        method = row["method_id"]
        x, shade = row["budget_cm3"] * float(dodge[cast.methods.index(method)]), cast.colour(method)
        if row["burden_cm3_mean_low"] is not None:
            ax.vlines([x], [row["burden_cm3_mean_low"]], [row["burden_cm3_mean_high"]], color=shade, linewidth=1)
        ax.plot([x], [row["burden_cm3_mean"]], cast.marker(method), color=shade, markersize=3.5)


def _burden_scales(cast: Cast, ax: "Axes", points: pl.DataFrame) -> None:
    from matplotlib.ticker import NullLocator

    highest = points.select(pl.max_horizontal("burden_cm3_mean", "burden_cm3_mean_high")).to_series().to_list()
    top = 1.3 * max(cast.budgets[-1], *highest)
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=1, linscale=0.4)
    ax.set_ylim(-0.1, top)
    ax.set_xticks(cast.budgets, [f"{budget:g}" for budget in cast.budgets])
    ticks = [0, *(tick for tick in TICKS if tick < top)]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())


def contrasts(connection: duckdb.DuckDBPyConnection) -> Drawn:
    """Paired differences in mean Dice with their intervals, and which of them stand after Holm's adjustment."""
    marts, cast_ = ("paired_contrast",), cast(connection)
    rows = connection.sql(f"""
        select c.*, c.p_holm <= 1 - p.interval_level as stands
        from paired_contrast as c
        cross join protocol as p
        join ranked_method as a on a.method_id = c.method_a and a.is_ranked
        join ranked_method as b on b.method_id = c.method_b and b.is_ranked and b.kind = 'method'
        where c.metric_id = 'dice' and c.aggregation_id = 'mean' and c.estimate is not null
            and c.operating_point in {CONTRASTED}
        order by a.position, b.position, c.budget_cm3, c.operating_point
    """).pl()
    if rows.is_empty():
        return Drawn("contrasts", "No pair of methods has a contrast in mean Dice.", "", marts, None)
    pairs = list(dict.fromkeys(rows.select("method_a", "method_b").iter_rows()))
    kept = cast_.budgets if len(pairs) <= MOST_PAIRS else (cast_.reference_budget_cm3,)
    shown = rows.filter(pl.col("budget_cm3").is_in(kept))
    points = [p for p in CONTRASTED if p in set(shown["operating_point"])]
    shades = _shades(cast_.budgets)
    with _look():
        figure, (panels,) = _panels(1, len(points), 1.2 + len(pairs) * (0.14 + 0.09 * len(kept)))
        for ax, point in zip(panels, points, strict=True):
            these = shown.filter(operating_point=point)
            ax.set_title(f"{in_words(point)}: {these['stands'].sum()} of {len(these)} stand")
            _forest(ax, these.to_dicts(), pairs, kept, shades)
        panels[0].set_yticks(range(len(pairs)), [_pair(first, second) for first, second in pairs])
        panels[0].set_ylim(len(pairs) - 0.5, -0.5)
        panels[0].set_xlabel("difference in mean Dice, first minus second", loc="left")
        signs = [_sign(f"{budget:g} cm³", shades[budget], "o") for budget in kept]
        signs.append(_sign("stands after Holm", SOFT, "o", line=False))
        signs.append(_sign("does not", SOFT, "o", line=False, hollow=True))
        figure.legend(handles=signs, loc="outside lower left", ncols=min(len(signs), 6))
    only = "" if len(kept) > 1 else f" Only the reference budget of {cast_.reference_budget_cm3:g} cm³ is shown."
    stand = "; ".join(f"{shown.filter(operating_point=p)['stands'].sum()} at {in_words(p)}" for p in points)
    return Drawn(
        "contrasts",
        f"Differences in mean Dice that stand after Holm's adjustment: {stand}"
        f" (of {_range(shown.group_by('operating_point').len()['len'])} each)",
        "Each mark is a paired difference in mean Dice, first minus second of the pair, with its"
        f" {100 * cast_.interval_level:g} % interval over resampled test subjects (n = {_range(shown['n_subjects'])});"
        " a filled mark stands after Holm's adjustment inside its family. Thresholds from validation carry the burden"
        " that each method happened to realise; at equal burden that advantage is taken away. A contrast that is filled"
        f" in one column only is a statement about thresholds, not about methods.{only}",
        marts,
        figure,
    )


def _shades(budgets: Sequence[float]) -> dict[float, str]:
    """A colour per budget, from dark to light in order, as grey print keeps it too."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    places = np.linspace(0.1, 0.8, len(budgets))
    return {b: to_hex(colormaps["viridis"](float(x))) for b, x in zip(budgets, places, strict=True)}


def _forest(
    ax: "Axes",
    rows: Sequence[Row],
    pairs: Sequence[tuple[Any, ...]],
    budgets: Sequence[float],
    shades: Mapping[float, str],
) -> None:
    """One panel of the forest: budgets of a pair below each other."""
    from matplotlib.ticker import MaxNLocator

    offsets = 0.7 * (np.arange(len(budgets)) + 0.5) / len(budgets) - 0.35
    ax.axvline(0, color=INK, linewidth=0.6)
    for i in range(1, len(pairs)):
        ax.axhline(i - 0.5, color=PALE, linewidth=0.5)
    for row in rows:
        y = pairs.index((row["method_a"], row["method_b"])) + float(offsets[budgets.index(row["budget_cm3"])])
        shade = shades[row["budget_cm3"]]
        if row["estimate_low"] is not None:
            ax.hlines([y], [row["estimate_low"]], [row["estimate_high"]], color=shade, linewidth=0.9)
        face = shade if row["stands"] else "white"
        ax.plot([row["estimate"]], [y], "o", color=shade, markersize=3.8, markerfacecolor=face, markeredgewidth=0.9)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.tick_params(axis="y", length=0)
