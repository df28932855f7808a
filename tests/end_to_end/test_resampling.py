"""The resampled marts against a slow twin: every universe written out, every subject repeated as a replicate takes it.

The twin starts from the lake tables and the declared draws; it knows no cells, no multiplicities and no weights. Eleven
validation and four test subjects (one without a reference) give replicates in which scores are undefined or budgets
cannot be matched.
"""

import itertools
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from scipy import stats

from expectations.protocol import Protocol, protocol
from ingest.manifest import read_manifest
from transforms import TRANSFORMS, resampling
from transforms.gains import GAINS

sklearn_metrics: Any = import_module("sklearn.metrics")

Array = NDArray[Any]
Key = tuple[Any, ...]

REPLICATES = 30
CHECKED = (1, 3)  # replicates that the twin repeats in full; replicate 0 is compared with the SQL
AXES = (
    *("reference_id", "support_id", "voxel_volume_id", "threshold_rule_id", "budget_cm3", "postprocess_id"),
    *("lesion_definition_id", "hit_criterion_id", "aggregation_id", "metric_id"),
)
SETTING = ("canonical", "brain", "true")
TIE = 1e-9


@pytest.fixture(scope="module")
def few(phantom_lake: Path) -> Protocol:
    """The phantom's protocol, with few replicates: they are the first of the many."""
    overrides = read_manifest(phantom_lake).overrides
    return protocol({**overrides, "multiverse_replicates": REPLICATES, "contrast_replicates": REPLICATES})


def resampled(connection: duckdb.DuckDBPyConnection, study: Protocol, name: str) -> pl.DataFrame:
    return TRANSFORMS[name].run(study, lambda query: connection.sql(query).pl())


class Twin:
    """Scores of methods on repeated subjects, from the lake tables alone."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, study: Protocol) -> None:
        self.connection, self.protocol = connection, study
        cohort = "select subject_id from cohort_subject where is_included and split = 'test' order by subject_id"
        self.subjects = [str(row[0]) for row in connection.sql(cohort).fetchall()]
        generator = np.random.Generator(np.random.PCG64(study.parameters.seed))
        index = generator.integers(0, len(self.subjects), (REPLICATES, len(self.subjects)))
        self.taken = [np.arange(len(self.subjects)), *np.sort(index, axis=1)]
        self.methods = self.ids("kind = 'method'")
        self.baselines = self.ids("kind = 'baseline'")
        self.mm3 = float(self.rows("select any_value(voxel_mm3) from cohort_subject")[0][0])
        self.legacy = dict(self.rows("select method_id, legacy_voxel_mm3 from method"))
        series = "method_id, reference_id, support_id, voxel_volume_id"
        self.curves = self.arrays("threshold_curve", f"{series}, postprocess_id", 5)
        self.lesions = self.arrays("lesion_curve", f"{series}, postprocess_id, lesion_definition_id", 6)
        self.fixed = {
            tuple(row[:-1]): row[-1]
            for row in self.rows(f"select {series}, threshold_rule_id, budget_cm3, level from threshold_choice")
        }
        short = "method_id, reference_id, support_id"
        self.voxels = self.arrays("voxel_ranking", short, 3)
        self.slices = self.arrays("slice_ranking", short, 3)
        self.levels = cache(self.levels_read)
        self.histogram = cache(self.histogram_rows)

    def rows(self, query: str) -> list[Any]:
        return self.connection.sql(query).fetchall()

    def ids(self, condition: str) -> list[str]:
        query = f"select method_id from ranked_method where is_ranked and {condition} order by position"
        return [row[0] for row in self.rows(query)]

    def arrays(self, table: str, key: str, width: int) -> dict[Key, dict[str, Array]]:
        """Columns of a table by key, each level (where there are levels) x subject."""
        level = ", level" if table.endswith("curve") else ""
        frame = self.connection.sql(
            f"select {key}{level}, * exclude ({key}{level}) from {table} join cohort_subject using (subject_id)"
            f" where is_included and split = 'test' order by {key}{level}, subject_id"
        ).pl()
        parts = frame.partition_by(frame.columns[:width], as_dict=True)
        size = len(self.subjects)
        return {
            one: {
                name: part.get_column(name).to_numpy().reshape(-1, size)
                for name, kind in part.schema.items()
                if kind.is_numeric()
            }
            for one, part in parts.items()
        }

    def levels_read(self, method: str, setting: Key, rule: str, budget: float, replicate: int) -> list[int] | None:
        """The level that each subject is read at, None where the rule has no threshold."""
        curve = self.curves[(method, *setting, "plain")]
        predicted, hits = (curve[name].astype(np.int64) for name in ("predicted_voxels", "true_positive_voxels"))
        if rule == "subject_optimum":
            reference = curve["reference_voxels"].astype(np.int64)
            dice = np.where(reference > 0, 2 * hits / np.maximum(predicted + reference, 1), 0)
            return [max(k for k in range(201) if d[k] == d.max()) for d in dice.T]
        if rule == "test_matched":
            mm3 = self.legacy[method] if setting[2] == "legacy" else self.mm3
            taken = self.taken[replicate]
            burden = [int(row[taken].sum()) * mm3 / 1000 / len(taken) for row in predicted - hits]
            level = next(k for k in range(201) if burden[k] <= budget)
            return [level] * len(taken) if level else None
        level = self.fixed[(method, *setting, rule, budget)]
        return None if level is None else [level] * len(self.subjects)

    def universes(self, method: str, replicate: int) -> Array:
        """Scores of a method over all universes, one dimension per axis; NaN where there is none."""
        levels: list[tuple[Any, ...]] = [self.protocol.level_ids(axis) for axis in AXES]
        levels[4] = self.protocol.parameters.budgets_cm3
        scores = np.full([len(axis) for axis in levels], np.nan)
        for at in np.ndindex(scores.shape[:6]):
            reference, support, volume, rule, budget, postprocess = (levels[k][at[k]] for k in range(6))
            if rule in ("fixed_50", "subject_optimum") and at[4] > 0:
                scores[at] = scores[(*at[:4], 0, at[5])]  # these rules know no budget
                continue
            setting, point = (reference, support, volume), (rule, budget)
            for a, aggregation in enumerate(levels[8]):
                scores[(*at, slice(None), slice(None), a, 0)] = self.dice(
                    method, setting, point, postprocess, aggregation, replicate
                )
                for d, c in itertools.product(range(3), range(4)):
                    what = (postprocess, levels[6][d], levels[7][c])
                    scores[(*at, d, c, a, 1)] = self.sensitivity(method, setting, point, what, aggregation, replicate)
        for r, s, a, m in itertools.product(range(3), range(2), range(3), range(2, 6)):
            value = self.free(method, levels[0][r], levels[1][s], levels[9][m], levels[8][a], replicate)
            scores[r, s, ..., a, m] = value
        return scores

    def dice(
        self, method: str, setting: Key, rule: tuple[str, float], postprocess: str, aggregation: str, replicate: int
    ) -> float:
        levels = self.levels(method, setting, *rule, replicate)
        if levels is None:
            return np.nan
        curve = self.curves[(method, *setting, postprocess)]
        names = ("predicted_voxels", "true_positive_voxels", "reference_voxels")
        p, tp, g = (np.array([curve[n][levels[i], i] for i in self.taken[replicate]], np.int64) for n in names)
        if aggregation == "pooled":
            return 2 * int(tp.sum()) / int((p + g).sum()) if (p + g).sum() else np.nan
        return aggregate(2 * tp[g > 0] / (p + g)[g > 0], aggregation)

    def sensitivity(
        self, method: str, setting: Key, rule: tuple[str, float], what: Key, aggregation: str, replicate: int
    ) -> float:
        levels = self.levels(method, setting, *rule, replicate)
        if levels is None:
            return np.nan
        postprocess, definition, criterion = what
        curve = self.lesions[(method, *setting, postprocess, definition)]
        names = (f"hit_{criterion}", "lesion_count")
        hits, lesions = (np.array([curve[n][levels[i], i] for i in self.taken[replicate]], np.int64) for n in names)
        if aggregation == "pooled":
            return int(hits.sum()) / int(lesions.sum()) if lesions.sum() else np.nan
        return aggregate(hits[lesions > 0] / lesions[lesions > 0], aggregation)

    def free(self, method: str, reference: str, support: str, metric: str, aggregation: str, replicate: int) -> float:
        key, taken = (method, reference, support), self.taken[replicate]
        if aggregation == "pooled" and metric.startswith("voxel"):
            return self.pooled_voxels(key, metric, replicate)
        if aggregation == "pooled" and metric == "slice_auroc":
            return self.pooled_slices(key, replicate)
        table = self.voxels[key] if metric.startswith("voxel") else self.slices[key]
        if metric == "slice_aroc":
            matched, placement = (table[name][0][taken] for name in ("matched_count", "placement_sum"))
            if aggregation == "pooled":
                return 1 - placement.sum() / matched.sum() if matched.sum() else np.nan
            return aggregate(1 - placement[matched > 0] / matched[matched > 0], aggregation)
        values = table["average_precision" if metric == "voxel_ap" else "auroc"].astype(np.float64)[0][taken]
        return aggregate(values[~np.isnan(values)], aggregation)

    def pooled_voxels(self, key: Key, metric: str, replicate: int) -> float:
        weight = np.zeros((2, 4096))
        for subject in self.taken[replicate]:
            for bin_, positive, negative in self.histogram(key, self.subjects[subject]):
                weight[:, bin_] += (positive, negative)
        rank = sklearn_metrics.roc_auc_score if metric == "voxel_auroc" else sklearn_metrics.average_precision_score
        label, score = np.repeat([1, 0], 4096), np.tile(np.arange(4096), 2)
        return float(rank(label, score, sample_weight=weight.ravel())) if weight[0].any() else np.nan

    def histogram_rows(self, key: Key, subject: str) -> list[Any]:
        return self.connection.execute(
            "select bin, positive_voxels, negative_voxels from score_histogram"
            " where method_id = ? and reference_id = ? and support_id = ? and subject_id = ?",
            [*key, subject],
        ).fetchall()

    def pooled_slices(self, key: Key, replicate: int) -> float:
        method, reference, support = key
        found = [
            row
            for subject in self.taken[replicate]
            for row in self.connection.execute(
                f"select reference_voxels_{reference} > 0, score_max from slice_score"
                " where method_id = ? and support_id = ? and subject_id = ?",
                [method, support, self.subjects[subject]],
            ).fetchall()
        ]
        labels = [row[0] for row in found]
        return float(sklearn_metrics.roc_auc_score(labels, [row[1] for row in found])) if any(labels) else np.nan


def aggregate(values: Array, aggregation: str) -> float:
    if len(values) == 0:
        return np.nan
    return float(np.median(values) if aggregation == "median" else np.mean(values))


@pytest.fixture(scope="module")
def twin(phantom_marts: duckdb.DuckDBPyConnection, few: Protocol) -> Twin:
    return Twin(phantom_marts, few)


def sums_of_squares(scores: Array, kept: Array) -> dict[str, float]:
    """Shares of the terms from their definition: methods x universes, every universe written out."""
    universes = np.argwhere(kept)
    y = np.ascontiguousarray(scores[:, kept])  # rows in memory order, so that NumPy sums them in pairs
    grand, methods, count = y.mean(), len(y), y.shape[1]
    total = ((y - grand) ** 2).sum()
    terms = {"total": total, "method": count * ((y.mean(axis=1) - grand) ** 2).sum()}
    for k, column in enumerate(AXES):
        present = np.unique(universes[:, k])
        main = interaction = 0.0
        for level in present:
            here = y[:, universes[:, k] == level]
            main += (here.mean() - grand) ** 2
            interaction += ((here.mean(axis=1) - here.mean() - y.mean(axis=1) + grand) ** 2).sum()
        terms[column] = count * methods / len(present) * main
        terms[f"method:{column}"] = count / len(present) * interaction
    terms["axes"] = sum(value for name, value in terms.items() if name not in ("total", "method"))
    terms["remainder"] = total - terms["method"] - terms["axes"]
    return {name: value / total for name, value in terms.items()}


def flip_shares(scores: Array, kept: Array, methods: list[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for a, b in itertools.combinations(range(len(methods)), 2):
        difference = scores[a][kept] - scores[b][kept]
        greater, less = int((difference >= TIE).sum()), int((difference <= -TIE).sum())
        ties = len(difference) - greater - less
        shares[f"{methods[a]}|{methods[b]}"] = (min(greater, less) + ties / 2) / len(difference)
    return shares


@pytest.mark.parametrize("replicate", CHECKED)
def test_replicates_are_those_of_the_written_out_multiverse(
    phantom_marts: duckdb.DuckDBPyConnection, twin: Twin, replicate: int
) -> None:
    scores = np.stack([twin.universes(method, replicate) for method in twin.methods])
    shape = scores.shape[1:]
    marked = phantom_marts.sql("select status = 'ok' as ok, is_defensible from universe order by universe_id").pl()
    ok, defensible = (marked.get_column(name).to_numpy().reshape(shape) for name in ("ok", "is_defensible"))
    expected: dict[Key, float] = {}
    for universe_set, inside in (("all", ok), ("defensible", ok & defensible)):
        metrics = {name: np.arange(6) == m for m, name in enumerate(twin.protocol.level_ids("metric_id"))}
        for metric, among in (metrics | {"all": np.ones(6, np.bool_)}).items():
            kept = inside & among
            if not kept.any() or np.isnan(scores[:, kept]).any():
                continue
            flips = flip_shares(scores, kept, twin.methods)
            expected |= {("flip_share", universe_set, metric, pair): share for pair, share in flips.items()}
            expected["phi_max", universe_set, metric, ""] = max(flips.values())
            for term, share in sums_of_squares(scores, kept).items():
                expected["variance_share", universe_set, metric, term] = share
    query = (
        f"select statistic, universe_set, metric_id, item, value from replicate_statistic where replicate = {replicate}"
    )
    found = {tuple(row[:-1]): row[-1] for row in phantom_marts.sql(query).fetchall()}
    assert expected
    assert {key: found.get(key) for key in expected} == pytest.approx(expected, abs=1e-12)
    # where a score is undefined, at most pairs of other methods are left
    assert {key[0] for key in found.keys() - expected.keys()} <= {"flip_share"}


def test_replicate_0_is_the_point_estimate(phantom_marts: duckdb.DuckDBPyConnection) -> None:
    for statistic, table, value, item in (
        ("flip_share", "flip_share", "flip_share", "method_a || '|' || method_b"),
        ("phi_max", "phi_max", "value", "''"),
        ("variance_share", "variance_share", "share", "term"),
    ):
        kept = "not is_baseline_pair" if table == "flip_share" else f"{value} is not null"
        rows = phantom_marts.sql(
            f"select m.{value}, r.value from (from {table} where {kept}) as m left join replicate_statistic as r"
            f" on r.statistic = '{statistic}' and r.universe_set = m.universe_set and r.metric_id = m.metric_id"
            f" and r.item = {item} and replicate = 0"
        ).fetchall()
        assert len(rows) > 10
        assert [row[1] for row in rows] == pytest.approx([row[0] for row in rows], abs=1e-12), table
    (count, different), *_ = phantom_marts.sql(
        "select count(*), count_if(r.level is distinct from t.level) from replicate_level as r"
        " join threshold_choice as t using (method_id, reference_id, support_id, voxel_volume_id, budget_cm3)"
        " where r.replicate = 0 and t.threshold_rule_id = 'test_matched'"
    ).fetchall()
    assert count > 0
    assert different == 0


def test_intervals_are_quantiles_of_the_replicates_that_are_defined(phantom_marts: duckdb.DuckDBPyConnection) -> None:
    intervals = phantom_marts.sql("from replicate_interval").fetchall()
    frame = phantom_marts.sql("from replicate_statistic where replicate > 0").pl()
    values = frame.partition_by("universe_set", "statistic", "metric_id", "item", as_dict=True)
    assert len(intervals) == len(values)
    for which, *key, low, high, count in intervals:
        assert which == "primary"
        drawn = values[tuple(key)].get_column("value").to_numpy()
        assert 0 < count == len(drawn) <= 1000
        assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]).tolist(), abs=1e-12)
    shown = phantom_marts.sql(
        "select flip_share_low, flip_share_high, value_low, value_high"
        " from flip_share as f join replicate_interval as i on i.statistic = 'flip_share'"
        " and i.universe_set = f.universe_set and i.metric_id = f.metric_id"
        " and i.item = f.method_a || '|' || f.method_b"
    ).fetchall()
    assert shown
    assert all(row[:2] == row[2:] for row in shown)


def dice_at(twin: Twin, method: str, point: str, budget: float, aggregation: str, replicate: int) -> float:
    """Dice at an operating point; at equal burden interpolated between the two levels around the budget."""
    if point != "equal_burden":
        return twin.dice(method, SETTING, (point, budget), "plain", aggregation, replicate)
    levels = twin.levels(method, SETTING, "test_matched", budget, replicate)
    if levels is None:
        return np.nan
    curve, taken = twin.curves[(method, *SETTING, "plain")], twin.taken[replicate]
    p, tp, g = (
        curve[f"{name}_voxels"].astype(np.int64)[:, taken] for name in ("predicted", "true_positive", "reference")
    )
    k, values, burdens = levels[0], list[float](), list[float]()
    for level in (k, k - 1):
        burdens.append(float((p - tp)[level].sum() * twin.mm3 / 1000 / len(taken)))
        if aggregation == "pooled":
            values.append(float(2 * tp[level].sum() / (p + g)[level].sum()))
        else:
            kept = g[level] > 0
            values.append(aggregate(2 * tp[level][kept] / (p + g)[level][kept], aggregation))
    weight = (budget - burdens[0]) / (burdens[1] - burdens[0])
    return (1 - weight) * values[0] + weight * values[1]


def value_of(twin: Twin, method: str, row: dict[str, Any], replicate: int) -> float:
    metric, aggregation = row["metric_id"], row["aggregation_id"]
    if metric == "dice":
        budget = row["budget_cm3"] or twin.protocol.parameters.reference_budget_cm3  # a rule that uses none reads none
        return dice_at(twin, method, row["operating_point"], budget, aggregation, replicate)
    if metric == "lesion_sensitivity":
        what = ("plain", "conn6_floor", "iou_10")
        return twin.sensitivity(method, SETTING, ("validation", row["budget_cm3"]), what, aggregation, replicate)
    return twin.free(method, "canonical", "brain", metric, aggregation, replicate)


def test_contrasts_are_those_of_the_repeated_subjects(
    phantom_marts: duckdb.DuckDBPyConnection, twin: Twin, few: Protocol
) -> None:
    @cache
    def values(method: str, key: tuple[tuple[str, Any], ...], replicate: int) -> float:
        return value_of(twin, method, dict(key), replicate)

    seen: set[Key] = set()
    kind = ["metric_id", "operating_point", "aggregation_id"]
    every = resampled(phantom_marts, few, "contrast_estimate").with_row_index()
    first = every.filter(pl.col("estimate").is_not_null()).unique(kind, keep="first").get_column("index")
    rows = every.filter((pl.col("index") % 19 == 0) | pl.col("index").is_in(first.implode()))
    for row in rows.to_dicts():
        names = ("metric_id", "operating_point", "budget_cm3", "aggregation_id")
        key = tuple((name, row[name]) for name in names)
        drawn = np.array(
            [values(row["method_a"], key, r) - values(row["method_b"], key, r) for r in range(REPLICATES + 1)]
        )
        if np.isnan(drawn[0]):
            assert row["estimate"] is row["estimate_low"] is row["p_value"] is None
            continue
        kept = drawn[1:][~np.isnan(drawn[1:])]
        assert row["estimate"] == pytest.approx(drawn[0], abs=1e-12)
        assert row["n_replicates"] == len(kept)
        ends = [row["estimate_low"], row["estimate_high"]]
        assert ends == pytest.approx(np.quantile(kept, [0.025, 0.975]).tolist(), abs=1e-12)
        sides = min(int((kept <= 1e-13).sum()), int((kept >= -1e-13).sum()))
        assert row["p_value"] == pytest.approx(min(1, 2 * (1 + sides) / (len(kept) + 1)))
        seen.add((row["metric_id"], row["operating_point"], row["aggregation_id"]))
    points = {point for metric, point, _ in seen if metric == "dice"}
    assert len(seen) == 3 * len(points) + 3 + 6
    conformal = {rule.id for rule in few.threshold_rules if rule.alpha}
    assert points - conformal == {"validation", "test_matched", "equal_burden", "fixed_50", "subject_optimum"}
    assert points & conformal


def test_contrast_intervals_are_those_of_scipy(phantom_marts: duckdb.DuckDBPyConnection, few: Protocol) -> None:
    """Paired bootstrap of mean Dice at validation thresholds: the same generator draws the same subjects."""
    rows = resampled(phantom_marts, few, "contrast_estimate").filter(
        pl.col("estimate").is_not_null(), metric_id="dice", operating_point="validation", aggregation_id="mean"
    )
    assert rows.height >= 8
    query = """
        select dice from operating_subject
        where method_id = $method and threshold_rule_id = 'validation' and budget_cm3 = $budget
            and postprocess_id = 'plain'
        order by subject_id"""
    for row in rows.iter_rows(named=True):
        keys = [{"method": row[name], "budget": row["budget_cm3"]} for name in ("method_a", "method_b")]
        pair = [np.array(phantom_marts.execute(query, key).fetchall(), np.float64)[:, 0] for key in keys]
        peer = stats.bootstrap(
            pair,
            mean_difference,
            paired=True,
            n_resamples=REPLICATES,
            method="percentile",
            rng=np.random.Generator(np.random.PCG64(few.parameters.seed)),
        )
        drawn = peer.bootstrap_distribution[~np.isnan(peer.bootstrap_distribution)]
        assert len(drawn) == row["n_replicates"]
        ends = np.quantile(drawn, [0.025, 0.975]).tolist()
        assert [row["estimate_low"], row["estimate_high"]] == pytest.approx(ends, abs=1e-12)


def mean_difference(a: Array, b: Array, axis: int = -1) -> Array:
    """Difference of means over subjects that have a value; NaN where there are none."""
    count = (~np.isnan(a)).sum(axis=axis)
    total = np.nansum(a - b, axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def test_pairs_and_families_are_the_declared_ones(phantom_marts: duckdb.DuckDBPyConnection, twin: Twin) -> None:
    families = dict(phantom_marts.sql("select family, contrast_count from contrast_family").fetchall())
    budgets, models = len(twin.protocol.parameters.budgets_cm3), len(twin.methods)
    pairs = {"methods": models * (models - 1) // 2, "baselines": models * len(twin.baselines)}
    of_points = {rule.id: budgets if rule.uses_budget else 1 for rule in twin.protocol.threshold_rules}
    of_points["equal_burden"] = budgets
    expected = {
        f"{metric} {point} {aggregation} {kind}": count * of_points[point]
        for kind, count in pairs.items()
        for aggregation in ("mean", "median", "pooled")
        for metric, point in (*(("dice", point) for point in of_points), ("lesion_sensitivity", "validation"))
    }
    for kind, count in pairs.items():
        expected |= {f"voxel_metrics mean_and_median {kind}": 4 * count, f"voxel_metrics pooled {kind}": 2 * count}
    assert families == expected
    rows = phantom_marts.sql(
        "select family, p_value is not null, n_replicates, is_resolvable from paired_contrast"
    ).fetchall()
    tested = Counter(family for family, is_tested, *_ in rows if is_tested)
    for family, is_tested, count, is_resolvable in rows:
        # the smallest p-value is 2 / (B + 1), and Holm multiplies it by the size of the family
        assert is_resolvable == (is_tested and 2 * tested[family] / (count + 1) <= 0.05 + 1e-12)


def test_operating_points_have_the_intervals_of_the_repeated_subjects(
    phantom_marts: duckdb.DuckDBPyConnection, twin: Twin, few: Protocol
) -> None:
    for row in resampled(phantom_marts, few, "operating_interval").to_dicts()[::23]:
        frame = phantom_marts.execute(
            "select predicted_voxels p, true_positive_voxels tp, reference_voxels g from operating_subject"
            " where method_id = ? and threshold_rule_id = ? and budget_cm3 = ? and postprocess_id = ?"
            " order by subject_id",
            [row[name] for name in ("method_id", "threshold_rule_id", "budget_cm3", "postprocess_id")],
        ).fetchall()
        p, tp, g = np.array(frame, np.int64).T
        drawn: dict[str, list[float]] = {}
        for taken in twin.taken[1:]:
            kept = taken[g[taken] > 0]
            dice = 2 * tp[kept] / (p + g)[kept]
            both = int((p + g)[taken].sum())
            drawn.setdefault("dice_mean", []).append(aggregate(dice, "mean"))
            drawn.setdefault("dice_median", []).append(aggregate(dice, "median"))
            drawn.setdefault("dice_pooled", []).append(2 * int(tp[taken].sum()) / both if both else np.nan)
            drawn.setdefault("burden_cm3_mean", []).append(float((p - tp)[taken].mean() * twin.mm3 / 1000))
        for name, values in drawn.items():
            ends = np.nanquantile(values, [0.025, 0.975]).tolist()
            assert [row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx(ends, abs=1e-9), name


def test_gaps_have_the_intervals_of_the_repeated_subjects(
    phantom_marts: duckdb.DuckDBPyConnection, twin: Twin, few: Protocol
) -> None:
    points = phantom_marts.sql("select method_id, budget_cm3, gap_mean, gap_interpolated from transfer_gap").fetchall()
    shown = {(method, budget): values for method, budget, *values in points}
    rows = resampled(phantom_marts, few, "gap_interval").to_dicts()
    assert {(row["method_id"], row["budget_cm3"]) for row in rows} == shown.keys()
    for row in rows:
        method, budget = row["method_id"], row["budget_cm3"]
        before, after = (
            np.array([dice_at(twin, method, point, budget, "mean", r) for r in range(REPLICATES + 1)])
            for point in ("validation", "equal_burden")
        )
        gaps = after - before
        assert shown[method, budget][1] == pytest.approx(gaps[0], abs=1e-12)
        ends = [row["gap_interpolated_low"], row["gap_interpolated_high"]]
        assert ends == pytest.approx(np.nanquantile(gaps[1:], [0.025, 0.975]).tolist(), abs=1e-12)
        assert row["n_replicates"] == np.isfinite(gaps[1:]).sum()
        matched = twin.levels(method, SETTING, "test_matched", budget, 0)
        assert matched is not None
        fixed = np.array([mean_dice_at(twin, method, matched[0], r) for r in range(REPLICATES + 1)]) - before
        assert shown[method, budget][0] == pytest.approx(fixed[0], abs=1e-12)
        ends = [row["gap_mean_low"], row["gap_mean_high"]]
        assert ends == pytest.approx(np.nanquantile(fixed[1:], [0.025, 0.975]).tolist(), abs=1e-12)
        assert (row["interval_kind"], row["interpolated_interval_kind"]) == ("fixed_threshold", "reselected")


def mean_dice_at(twin: Twin, method: str, level: int, replicate: int) -> float:
    curve, taken = twin.curves[(method, *SETTING, "plain")], twin.taken[replicate]
    names = ("predicted_voxels", "true_positive_voxels", "reference_voxels")
    p, tp, g = (curve[name].astype(np.int64)[level, taken] for name in names)
    return aggregate(2 * tp[g > 0] / (p + g)[g > 0], "mean")


def gains_of(twin: Twin, method: str, level: int, postprocess: str, replicate: int) -> list[float]:
    """Five gains of a point on the repeated subjects; plain maps are matched to the burden of the processed ones."""
    taken = twin.taken[replicate]

    def means(name: str) -> tuple[Array, Array, Array]:
        curve, lesions = twin.curves[(method, *SETTING, name)], twin.lesions[(method, *SETTING, name, "conn6_floor")]
        p, tp, g = (
            curve[part].astype(np.int64)[:, taken]
            for part in ("predicted_voxels", "true_positive_voxels", "reference_voxels")
        )
        dice = (2 * tp[:, g[0] > 0] / (p + g)[:, g[0] > 0]).mean(axis=1)
        hits, count = (lesions[part].astype(np.int64)[:, taken].sum(axis=1) for part in ("hit_iou_10", "lesion_count"))
        return (p - tp).mean(axis=1) * twin.mm3 / 1000, dice, hits / count

    target, dice, sensitivity = (values[level] for values in means(postprocess))
    burdens, plain, plain_sensitivity = means("plain")
    above = next(k for k, burden in enumerate(burdens) if burden <= target + 1e-12)
    below = max(above - 1, 0)
    weight = (target - burdens[above]) / (burdens[below] - burdens[above]) if above else 0.0
    equal, equal_sensitivity = (
        (1 - weight) * values[above] + weight * values[below] for values in (plain, plain_sensitivity)
    )
    return [
        *(dice - equal, dice - plain[level], plain[level] - equal),
        *(sensitivity - equal_sensitivity, sensitivity - plain_sensitivity[level]),
    ]


def test_gains_have_the_intervals_of_the_repeated_subjects(
    phantom_marts: duckdb.DuckDBPyConnection, twin: Twin, few: Protocol
) -> None:
    shown = {
        (r["method_id"], r["budget_cm3"], r["postprocess_id"]): r
        for r in phantom_marts.sql("from postprocess_gain").pl().to_dicts()
    }
    rows = resampled(phantom_marts, few, "gain_interval").to_dicts()
    assert {(row["method_id"], row["budget_cm3"], row["postprocess_id"]) for row in rows} == shown.keys()
    for row in rows:
        key = (row["method_id"], row["budget_cm3"], row["postprocess_id"])
        level = round(shown[key]["threshold"] * 200)
        drawn = np.array([gains_of(twin, key[0], level, key[2], r) for r in range(REPLICATES + 1)]).T
        for gain, values in zip(GAINS, drawn, strict=True):
            assert shown[key][gain] == pytest.approx(values[0], abs=1e-12), gain
            ends = np.nanquantile(values[1:], [0.025, 0.975]).tolist()
            assert [row[f"{gain}_low"], row[f"{gain}_high"]] == pytest.approx(ends, abs=1e-9), gain
        assert row["n_replicates"] == np.isfinite(drawn[0, 1:]).sum()


NAMES = (
    "replicate_level",
    "replicate_statistic",
    "contrast_estimate",
    "operating_interval",
    "gap_interval",
    "gain_interval",
    "local_contrast_interval",
)


def test_neither_threads_nor_runs_change_a_bit(
    phantom_marts: duckdb.DuckDBPyConnection, few: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    (default,), *_ = phantom_marts.sql("select current_setting('threads')").fetchall()
    runs: list[list[pl.DataFrame]] = []
    try:
        for threads in (1, 3):
            monkeypatch.setattr(resampling, "THREADS", threads)
            phantom_marts.execute(f"set threads = {threads}")
            frames = [resampled(phantom_marts, few, name) for name in NAMES]
            runs.append([frame.sort(frame.columns) for frame in frames])
    finally:
        phantom_marts.execute(f"set threads = {default}")
    for name, first, second in zip(NAMES, *runs, strict=True):
        assert first.height > 0
        assert first.equals(second, null_equal=True), name


def test_few_replicates_are_the_first_of_many(phantom_marts: duckdb.DuckDBPyConnection, few: Protocol) -> None:
    stored = phantom_marts.sql(f"from replicate_level where replicate <= {REPLICATES}").pl()
    again = resampled(phantom_marts, few, "replicate_level")
    assert again.sort(again.columns).equals(stored.sort(stored.columns), null_equal=True)


def test_without_test_subjects_nothing_is_resampled(phantom_marts: duckdb.DuckDBPyConnection, few: Protocol) -> None:
    for name in NAMES:
        assert TRANSFORMS[name].run(few, lambda query: phantom_marts.sql(query).pl().clear()).is_empty()
