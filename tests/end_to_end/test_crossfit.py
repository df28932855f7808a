"""A study without validation subjects: cross-fitted thresholds and all that follows, against slow twins.

Two methods and a baseline of the phantom, six subjects, all of them test; the last has an empty reference. The twins
start from the lake tables: thresholds by the validation rule written out for every fold, resampled values on subjects
repeated as a replicate takes them, every subject at the level of its own fold.
"""

import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from expectations.protocol import Protocol, protocol
from expectations.study import load_study
from ingest.jobs import InProcess
from ingest.manifest import read_manifest
from ingest.run import Ingest
from marts.findings import QUESTIONS, summary
from marts.quality import check_findings, declared_findings
from marts.release import build_tables, open_for_building
from transforms import TRANSFORMS
from transforms.gains import GAINS
from transforms.multiverse import PRIMARIES, Multiverse, multiverse_queries

Array = NDArray[Any]
Connection = duckdb.DuckDBPyConnection
Key = tuple[Any, ...]

SUBJECTS = ("phantom01", "phantom02", "phantom03", "phantom12", "phantom13", "phantom15")
KEPT = ('id = "diffuse"', 'id = "sharp"\n', 'id = "FLAIR"')
REPLICATES = 25
BUDGET = 20.0
SETTING = "reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'"
WANTED = (
    *("threshold_choice", "subject_threshold", "operating_point", "transfer_gap", "postprocess_gain", "identity_check"),
    *("lesion_detection", "error_mode", "sensitivity_subset", "conformal_rule", "dropped_level", "universe"),
    *("flip_share", "phi_max", "variance_share", "contrast_estimate", "hypothesis", "order_share", "contrast_family"),
)


def all_test(phantom: Path, folder: Path) -> Path:
    """The study file: some of the phantom's entries and subjects, none of them validation."""
    text = phantom.read_text()
    for patterns in ("reference/", "brain/", "intensity/", "maps/"):
        text = text.replace(f'"{patterns}', f'"{phantom.parent}/{patterns}')
    head, *entries = text.split("\n[[")
    last, own_protocol = entries[-1].split("\n[protocol]\n")
    entries = [entry for entry in (*entries[:-1], last) if any(name in f"{entry}\n" for name in KEPT)]
    for name in ("multiverse_replicates = 40", "contrast_replicates = 200"):
        own_protocol = own_protocol.replace(name, f"{name.split(' = ')[0]} = {REPLICATES}")
    head = head.replace("[study]\n", f'[study]\nroots = ["{phantom.parent}"]\n')
    folder.mkdir(exist_ok=True)
    (folder / "study.toml").write_text("\n[[".join([head, *entries]) + f"\n[protocol]\n{own_protocol}")
    (folder / "subjects.csv").write_text("subject_id,split\n" + "".join(f"{name},test\n" for name in SUBJECTS))
    return folder / "study.toml"


@pytest.fixture(scope="module")
def lake(phantom_study: Path, phantom_lake: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The phantom's lake, in which the maps of the methods are measured already."""
    study = all_test(phantom_study, tmp_path_factory.mktemp("all_test"))
    lake = tmp_path_factory.mktemp("all_test_lake")
    shutil.copytree(phantom_lake, lake, dirs_exist_ok=True)
    assert not Ingest(load_study(study), lake, InProcess()).run().manifest.failures
    return lake


@pytest.fixture(scope="module")
def marts(lake: Path) -> Iterator[Connection]:
    connection = open_for_building(None, lake)
    built = build_tables(connection, read_manifest(lake), WANTED)
    for name in WANTED:
        table = built.tables[name]
        assert declared_findings(connection, table) == []
        checks = built.marts[name].checks if name in built.marts else ()
        assert [f for f in check_findings(connection, table, checks) if f.severity == "stop"] == []
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def few(lake: Path) -> Protocol:
    return protocol(read_manifest(lake).overrides)


def arrays(connection: Connection, table: str, key: str, condition: str = "true") -> dict[Key, dict[str, Array]]:
    """Columns of a curve table by key, each level x subject."""
    frame = connection.sql(
        f"select {key}, level, subject_id, * exclude ({key}, level, subject_id) from {table}"
        f" where subject_id in {SUBJECTS} and {condition} order by {key}, level, subject_id"
    ).pl()
    names = key.split(", ")
    return {
        one: {
            name: part.get_column(name).to_numpy().astype(np.int64).reshape(-1, len(SUBJECTS))
            for name, kind in part.schema.items()
            if kind.is_integer() and name != "level"
        }
        for one, part in frame.partition_by(names, as_dict=True).items()
    }


SERIES = "method_id, reference_id, support_id, voxel_volume_id"


def chosen_on(curve: dict[str, Array], lesion: dict[str, Array], others: list[int], limit: float, mm3: float) -> int:
    """The validation rule (protocol, section 6) on some subjects."""
    predicted, hit = curve["predicted_voxels"], curve["true_positive_voxels"]
    sizes = predicted + curve["reference_voxels"]
    with_reference = [s for s in others if curve["reference_voxels"][0, s] > 0]
    feasible = [k for k in range(201) if int((predicted - hit)[k, others].sum()) * mm3 / 1000 / len(others) <= limit]
    hits = [int(row[others].sum()) for row in lesion["hit_iou_10"]]
    tolerated = max(1, (3 * int(lesion["lesion_count"][0, others].sum())) // 100)
    guarded = [k for k in feasible if hits[k] >= max(hits[j] for j in feasible) - tolerated]
    dice = {k: sum(Fraction(2 * int(hit[k, s]), int(sizes[k, s])) for s in with_reference) for k in guarded}
    return max(k for k in guarded if dice[k] == max(dice.values()))


@pytest.mark.parametrize(
    ("overrides", "fold"),
    [({}, [0, 1, 2, 3, 4, 5]), ({"crossfit_leave_one_out_limit": 5, "crossfit_folds": 4}, [0, 1, 2, 3, 0, 1])],
    ids=["leave_one_out", "folds"],
)
def test_thresholds_are_chosen_on_the_other_folds(
    lake: Path, marts: Connection, overrides: dict[str, object], fold: list[int]
) -> None:
    manifest, connection = read_manifest(lake), marts
    if overrides:
        connection = open_for_building(None, lake)
        wanted = ("threshold_choice", "subject_threshold")
        build_tables(connection, manifest.model_copy(update={"overrides": manifest.overrides | overrides}), wanted)
    assert connection.sql("select fold from crossfit_fold order by subject_id").fetchall() == [(f,) for f in fold]
    curves = arrays(connection, "threshold_curve", SERIES, "postprocess_id = 'plain'")
    at = "postprocess_id = 'plain' and lesion_definition_id = 'conn6_floor'"
    lesions = arrays(connection, "lesion_curve", SERIES, at)
    true_mm3 = float(connection.sql("select any_value(voxel_mm3) from cohort_subject").fetchall()[0][0])
    legacy = dict(connection.sql("select method_id, legacy_voxel_mm3 from method").fetchall())
    expected: dict[Key, tuple[int, int]] = {}
    for key, curve in curves.items():
        mm3 = legacy[key[0]] if key[3] == "legacy" else true_mm3
        for budget in (5.0, 10.0, 20.0, 40.0):
            for one in set(fold):
                others = [s for s in range(len(SUBJECTS)) if fold[s] != one]
                level = chosen_on(curve, lesions[key], others, budget, mm3)
                expected |= {(*key, budget, SUBJECTS[s]): (level, len(others)) for s in range(6) if fold[s] == one}
    found = connection.sql(
        f"select {SERIES}, t.budget_cm3, t.subject_id, t.level, c.n_subjects from subject_threshold as t"
        f" join crossfit_fold as f using (subject_id) join crossfit_threshold as c using ({SERIES}, budget_cm3, fold)"
        " where t.threshold_rule_id = 'validation'"
    ).fetchall()
    assert {tuple(row[:-2]): row[-2:] for row in found} == expected
    assert len({level for level, _ in expected.values()}) > 20


def test_without_validation_subjects_all_subjects_scale_a_baseline(marts: Connection) -> None:
    (found,) = marts.sql(
        "select s.scale_kind, s.low, s.high, median(q.low), median(q.high), list(q.subject_id order by q.subject_id)"
        " from score_scale as s join score_quantile as q using (method_id) where s.method_id = 'FLAIR' group by all"
    ).fetchall()
    assert found == ("quantiles", *found[3:5], *found[3:5], list(SUBJECTS))


def test_the_rule_is_degraded_and_everything_conformal_is_infeasible(marts: Connection) -> None:
    rows = marts.sql(
        "select threshold_rule_id, r.rule_kind, t.status, t.level, t.reason from threshold_choice as t"
        " join calibration_rule as r using (threshold_rule_id)"
    ).fetchall()
    for rule, kind, status, level, reason in rows:
        if rule == "validation":
            assert (status, level) == ("degraded", None)
            assert reason.startswith("crossfit: leave one out of 6 subjects, thresholds ")
        elif kind in ("crc", "rcps", "crc_label_free"):
            assert (status, level) == ("infeasible", None)
            assert "the cohort has 0" in reason
    assert marts.sql("select level_id from dropped_level").fetchall() == [("crc_10",)]
    assert marts.sql("select distinct status from conformal_rule").fetchall() == [("infeasible",)]
    assert "cross-fitted over 6 folds" in summary(marts)
    (points,) = (question.sql for question in QUESTIONS if question.title.startswith("Operating points"))
    assert {row[1] for row in marts.sql(points).fetchall()} == {"validation, crossfit", "test_matched"}


def test_every_mart_at_validation_thresholds_has_rows(marts: Connection) -> None:
    for table, condition in (
        ("operating_point", "threshold_rule_id = 'validation' and threshold is null and dice_mean_low is not null"),
        ("transfer_gap", "validation_threshold is null and gap_mean_low < gap_mean_high"),
        ("postprocess_gain", "threshold is null and total_gain_low < total_gain_high and lesion_total > 0"),
        ("lesion_detection", "is_detected"),
        ("error_mode", "mode_count > 0"),
        ("sensitivity_subset", "metric_id = 'dice' and n_subjects = 5"),
        ("hypothesis_case", "hypothesis_id = 'S5'"),
        ("universe", "threshold_rule_id = 'validation' and status = 'ok' and is_reference"),
    ):
        assert marts.sql(f"select count(*) from {table} where {condition}").fetchall()[0][0] > 0, table
    held = marts.sql("select identity, bool_and(holds) from identity_check group by all").fetchall()
    assert {"identity_1", "identity_2", "identity_5", "floor_identity"} <= {identity for identity, _ in held}
    assert all(holds for _, holds in held)


def test_replicate_0_is_the_point_estimate(marts: Connection) -> None:
    for table, value, item in (
        ("flip_share", "flip_share", "method_a || '|' || method_b"),
        ("phi_max", "value", "''"),
        ("variance_share", "share", "term"),
    ):
        kept = "not is_baseline_pair" if table == "flip_share" else f"{value} is not null"
        rows = marts.sql(
            f"select m.{value}, r.value from (from {table} where {kept}) as m left join replicate_statistic as r"
            f" on r.statistic = '{table}' and r.universe_set = m.universe_set and r.metric_id = m.metric_id"
            f" and r.item = {item} and replicate = 0"
        ).fetchall()
        assert len(rows) > 10
        assert [row[1] for row in rows] == pytest.approx([row[0] for row in rows], abs=1e-12), table


class Twin:
    """Values of methods on repeated subjects in the reference setting, from the lake tables."""

    def __init__(self, connection: Connection, study: Protocol) -> None:
        size = len(SUBJECTS)
        drawn = np.random.Generator(np.random.PCG64(study.parameters.seed)).integers(0, size, (REPLICATES, size))
        self.taken = [np.arange(size), *drawn]
        self.mm3 = float(connection.sql("select any_value(voxel_mm3) from cohort_subject").fetchall()[0][0])
        self.curves = arrays(connection, "threshold_curve", "method_id, postprocess_id", SETTING)
        at = f"{SETTING} and lesion_definition_id = 'conn6_floor'"
        self.lesions = arrays(connection, "lesion_curve", "method_id, postprocess_id", at)
        rows = connection.sql(
            f"select method_id, list(level order by subject_id) from subject_threshold where {SETTING}"
            f" and threshold_rule_id = 'validation' and budget_cm3 = {BUDGET} group by method_id"
        ).fetchall()
        self.own = {method: np.array(levels) for method, levels in rows}

    def voxels(self, method: str, levels: Array, postprocess: str = "plain") -> tuple[Array, Array, Array]:
        """Predicted, hit and reference voxels of every subject at its level."""
        curve, all_subjects = self.curves[method, postprocess], np.arange(len(SUBJECTS))
        names = ("predicted_voxels", "true_positive_voxels", "reference_voxels")
        predicted, hit, reference = (curve[name][levels, all_subjects] for name in names)
        return predicted, hit, reference

    def dice(self, method: str, levels: Array, taken: Array, aggregation: str, postprocess: str = "plain") -> float:
        predicted, hit, reference = (part[taken] for part in self.voxels(method, levels, postprocess))
        if aggregation == "pooled":
            return float(2 * hit.sum() / (predicted + reference).sum())
        kept = reference > 0
        values = 2 * hit[kept] / (predicted + reference)[kept]
        return float(np.nan if not kept.any() else np.mean(values) if aggregation == "mean" else np.median(values))

    def sensitivity(
        self, method: str, levels: Array, taken: Array, aggregation: str, postprocess: str = "plain"
    ) -> float:
        lesion, all_subjects = self.lesions[method, postprocess], np.arange(len(SUBJECTS))
        hits, lesions = (lesion[name][levels, all_subjects][taken] for name in ("hit_iou_10", "lesion_count"))
        kept = lesions > 0
        if aggregation == "pooled":
            return float(hits.sum() / lesions.sum())
        values = hits[kept] / lesions[kept]
        return float(np.nan if not kept.any() else np.mean(values) if aggregation == "mean" else np.median(values))

    def burden(self, method: str, levels: Array, taken: Array, postprocess: str = "plain") -> float:
        predicted, hit, _ = self.voxels(method, levels, postprocess)
        return float((predicted - hit)[taken].sum() * self.mm3 / 1000 / len(taken))

    def matched(self, method: str, taken: Array, burden: float) -> tuple[int, int, float]:
        """The first level that keeps a mean burden, the level below, and its weight."""
        at = [self.burden(method, self.everywhere(k), taken) for k in range(201)]
        level = next(k for k in range(201) if at[k] <= burden)
        below = max(level - 1, 0)
        return level, below, (burden - at[level]) / (at[below] - at[level]) if at[below] > at[level] else 0.0

    @staticmethod
    def everywhere(level: int) -> Array:
        return np.full(len(SUBJECTS), level)


@pytest.fixture(scope="module")
def twin(marts: Connection, few: Protocol) -> Twin:
    return Twin(marts, few)


def ends(values: list[float]) -> list[float]:
    return np.quantile(np.array(values)[~np.isnan(values)], [0.025, 0.975]).tolist()


def test_subjects_differ_in_their_levels(twin: Twin) -> None:
    assert any(len(set(levels.tolist())) > 1 for levels in twin.own.values())


def test_contrasts_are_those_of_repeated_subjects_at_their_own_levels(marts: Connection, twin: Twin) -> None:
    rows = marts.sql(f"from contrast_estimate where budget_cm3 = {BUDGET}").pl().to_dicts()
    seen: set[Key] = set()
    for row in rows:
        pair = (row["method_a"], row["method_b"])
        point, aggregation = row["operating_point"], row["aggregation_id"]
        if point.startswith(("crc", "rcps")):
            assert row["estimate"] is None  # nothing conformal is claimed
            continue
        drawn: list[float] = []
        for taken in twin.taken:
            values: list[float] = []
            for method in pair:
                if row["metric_id"] == "lesion_sensitivity":
                    values.append(twin.sensitivity(method, twin.own[method], taken, aggregation))
                elif point == "validation":
                    values.append(twin.dice(method, twin.own[method], taken, aggregation))
                else:
                    level, below, weight = twin.matched(method, taken, BUDGET)
                    assert level > 0
                    at = [twin.dice(method, twin.everywhere(k), taken, aggregation) for k in (level, below)]
                    values.append(at[0] if point == "test_matched" else (1 - weight) * at[0] + weight * at[1])
            drawn.append(values[0] - values[1])
        assert row["estimate"] == pytest.approx(drawn[0], abs=1e-12)
        assert [row["estimate_low"], row["estimate_high"]] == pytest.approx(ends(drawn[1:]), abs=1e-12)
        seen.add((row["metric_id"], point, aggregation))
    assert len(seen) == 9 + 3


def test_operating_points_gaps_and_gains_keep_every_subject_at_its_level(marts: Connection, twin: Twin) -> None:
    for method, own in twin.own.items():
        for row in (
            marts.sql(
                f"from operating_point where threshold_rule_id = 'validation' and budget_cm3 = {BUDGET}"
                f" and method_id = '{method}'"
            )
            .pl()
            .to_dicts()
        ):
            done = row["postprocess_id"]
            drawn = {
                **{f"dice_{a}": [twin.dice(method, own, t, a, done) for t in twin.taken] for a in ("mean", "median")},
                "dice_pooled": [twin.dice(method, own, t, "pooled", done) for t in twin.taken],
                "burden_cm3_mean": [twin.burden(method, own, t, done) for t in twin.taken],
            }
            for name, values in drawn.items():
                assert row[name] == pytest.approx(values[0], abs=1e-12)
                assert [row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx(ends(values[1:]), abs=1e-12)
        (gap,) = marts.sql(f"from transfer_gap where budget_cm3 = {BUDGET} and method_id = '{method}'").pl().to_dicts()
        matched = twin.everywhere(round(200 * gap["test_matched_threshold"]))
        fixed = [twin.dice(method, matched, t, "mean") - twin.dice(method, own, t, "mean") for t in twin.taken]
        moved: list[float] = []
        for taken in twin.taken:
            level, below, weight = twin.matched(method, taken, BUDGET)
            at = [twin.dice(method, twin.everywhere(k), taken, "mean") for k in (level, below)]
            moved.append((1 - weight) * at[0] + weight * at[1] - twin.dice(method, own, taken, "mean"))
        assert gap["validation_burden_cm3"] == pytest.approx(twin.burden(method, own, twin.taken[0]), abs=1e-12)
        for name, values in (("gap_mean", fixed), ("gap_interpolated", moved)):
            assert gap[name] == pytest.approx(values[0], abs=1e-12)
            assert [gap[f"{name}_low"], gap[f"{name}_high"]] == pytest.approx(ends(values[1:]), abs=1e-12)
        gains = (
            marts.sql(f"from postprocess_gain where budget_cm3 = {BUDGET} and method_id = '{method}'").pl().to_dicts()
        )
        assert {row["postprocess_id"] for row in gains} == {"hysteresis", "hysteresis_pruned"}
        for row in gains:
            parts = np.array([gain_parts(twin, method, own, row["postprocess_id"], taken) for taken in twin.taken])
            for name, values in zip(GAINS, parts.T.tolist(), strict=True):
                assert row[name] == pytest.approx(values[0], abs=1e-12)
                assert [row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx(ends(values[1:]), abs=1e-12)


def gain_parts(twin: Twin, method: str, own: Array, postprocess: str, taken: Array) -> list[float]:
    """The gains in their declared order."""
    level, below, weight = twin.matched(method, taken, twin.burden(method, own, taken, postprocess))
    values: list[float] = []
    for measure, aggregation in ((twin.dice, "mean"), (twin.sensitivity, "pooled")):
        done, plain = measure(method, own, taken, aggregation, postprocess), measure(method, own, taken, aggregation)
        at = [measure(method, twin.everywhere(k), taken, aggregation) for k in (level, below)]
        equal = (1 - weight) * at[0] + weight * at[1]
        values += [done - equal, done - plain] + ([plain - equal] if aggregation == "mean" else [])
    return values


def test_cells_of_the_multiverse_keep_every_subject_at_its_level(marts: Connection, twin: Twin, few: Protocol) -> None:
    names = ("threshold_choice", "replicate_level", "cohort_subject", "protocol")
    queries = {name: f"from {name}" for name in names} | multiverse_queries(PRIMARIES)
    inputs = {name: marts.sql(query).pl() for name, query in queries.items()}
    methods = ["diffuse", "sharp"]
    multiverse = Multiverse(few, inputs, methods)
    compared = 0
    for key, cells in multiverse.groups():
        if key != ("canonical", "brain", "true"):
            continue
        scores = multiverse.scores(key, cells)
        rows = cells.rows.filter(pl.col("metric_id").is_in(["dice", "lesion_sensitivity"]))
        rows = rows.filter(threshold_rule_id="validation", budget_cm3=BUDGET)
        rows = rows.filter((pl.col("metric_id") == "dice") | (pl.col("lesion_definition_id") == "conn6_floor"))
        rows = rows.filter((pl.col("metric_id") == "dice") | (pl.col("hit_criterion_id") == "iou_10"))
        for row in rows.to_dicts():
            measure = twin.dice if row["metric_id"] == "dice" else twin.sensitivity
            for place, method in enumerate(methods):
                what = (row["aggregation_id"], row["postprocess_id"])
                expected = [measure(method, twin.own[method], taken, *what) for taken in twin.taken]
                found = scores[place, row["place"]].tolist()
                assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)
                compared += 1
    assert compared == 2 * (9 + 9)


def test_a_resampled_table_is_the_same_again(marts: Connection, few: Protocol) -> None:
    for name in ("replicate_statistic", "contrast_estimate", "gain_interval"):
        again = TRANSFORMS[name].run(few, lambda query: marts.sql(query).pl())
        assert again.equals(marts.sql(f"from {name}").pl())
