"""A study of two methods with two training sets each, from its files to its marts, against slow twins.

The phantom's `coarse` maps stand for `diffuse` trained otherwise, those of `sharp_twin` for `sharp`. The twin of the
eleventh axis writes every universe out; resampled values are computed on subjects repeated as a replicate takes them.
"""

import itertools
import shutil
import statistics
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from expectations.study import load_study
from ingest.jobs import InProcess
from ingest.manifest import Manifest, read_manifest
from ingest.run import Ingest
from marts.findings import QUESTIONS
from marts.gate import judge
from marts.quality import check_findings, declared_findings
from marts.release import Built, build_tables, open_for_building

sklearn_metrics: Any = import_module("sklearn.metrics")

Array = NDArray[Any]
Connection = duckdb.DuckDBPyConnection

PRIMARY, OTHER = "IXI", "MOOD+IXI-HH"
MODELS = ("diffuse", "sharp")
METHODS = {
    (model, name): model + ("" if name == PRIMARY else f"~{OTHER}") for model in MODELS for name in (PRIMARY, OTHER)
}
REPLICATES = 25
AXES = (
    *("reference_id", "support_id", "voxel_volume_id", "threshold_rule_id", "budget_cm3", "postprocess_id"),
    *("lesion_definition_id", "hit_criterion_id", "aggregation_id", "metric_id"),
)
CONFIGURATION_MARTS = (
    *("configuration", "configuration_level", "configuration_member", "configuration_score", "configuration_order"),
    *("configuration_variance", "configuration_contrast", "configuration_criterion", "selection"),
)
LEDGER_MARTS = ("ledger_member", "ledger_set", "configuration_phi_max", "configuration_share", "hypothesis")
PRIMARY_MARTS = ("dropped_level", "cell_order", "universe_spread", "flip_share", "phi_max", "paired_contrast")


def several_sets(phantom: Path, folder: Path) -> Path:
    """The study file: the phantom's four methods as two, each with two training sets."""
    text = phantom.read_text()
    for patterns in ("reference/", "brain/", "intensity/", "maps/"):
        text = text.replace(f'"{patterns}', f'"{phantom.parent}/{patterns}')
    text = text.replace('family = "feature"', 'family = "residual"')  # a family is a model's, whatever it learnt from
    names = {"diffuse": METHODS["diffuse", PRIMARY], "coarse": "diffuse", "sharp": "sharp", "sharp_twin": "sharp"}
    for declared, model in names.items():
        training_set = PRIMARY if declared == model else OTHER
        text = text.replace(f'id = "{declared}"\n', f'id = "{model}"\ntraining_set = "{training_set}"\n')
    head = f'[study]\nprimary_training_set = "{PRIMARY}"\nroots = ["{phantom.parent}"]\n'
    text = text.replace("[study]\n", head)
    for name in ("multiverse_replicates = 40", "contrast_replicates = 200"):
        assert name in text
        text = text.replace(name, f"{name.split(' = ')[0]} = {REPLICATES}")
    folder.mkdir(exist_ok=True)
    shutil.copy(phantom.parent / "subjects.csv", folder)
    (folder / "study.toml").write_text(text)
    return folder / "study.toml"


def alone(study: Path, training_set: str, folder: Path) -> Path:
    """The study file with the maps of one training set alone, which are its primary ones; models in the same order."""
    head, *methods = study.read_text().split("[[method]]")
    last, *baselines = methods[-1].split("[[baseline]]")
    owned = [text for text in (*methods[:-1], last) if f'training_set = "{training_set}"' in text]
    owned.sort(key=lambda text: next(place for place, model in enumerate(MODELS) if f'id = "{model}"' in text))
    head = head.replace(f'primary_training_set = "{PRIMARY}"', f'primary_training_set = "{training_set}"')
    file = folder / "alone.toml"
    file.write_text("[[method]]".join([head, *owned]) + "[[baseline]]" + "[[baseline]]".join(baselines))
    shutil.copy(study.parent / "subjects.csv", folder)
    return file


def measured(study: Path, lake: Path) -> Manifest:
    report = Ingest(load_study(study), lake, InProcess()).run()
    assert not report.manifest.failures
    return read_manifest(lake)


def built(lake: Path, manifest: Manifest, wanted: tuple[str, ...]) -> tuple[Connection, Built]:
    connection = open_for_building(None, lake)
    return connection, build_tables(connection, manifest, wanted)


@pytest.fixture(scope="module")
def study(phantom_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return several_sets(phantom_study, tmp_path_factory.mktemp("several_sets"))


@pytest.fixture(scope="module")
def lake(phantom_lake: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the phantom's lake, to which each study adds what it alone measures."""
    lake = tmp_path_factory.mktemp("several_sets_lake")
    shutil.copytree(phantom_lake, lake, dirs_exist_ok=True)
    return lake


@pytest.fixture(scope="module")
def release(lake: Path, study: Path) -> Iterator[tuple[Connection, Built]]:
    wanted = (*CONFIGURATION_MARTS, *PRIMARY_MARTS, "gate_summary", "order_share", "operating_point", "variance_share")
    wanted += ("diagnostic", "diagnostic_power", "hypothesis")  # the findings ask these, too
    connection, tables = built(lake, measured(study, lake), wanted)
    yield connection, tables
    connection.close()


@pytest.fixture(scope="module")
def marts(release: tuple[Connection, Built]) -> Connection:
    return release[0]


def rows(marts: Connection, query: str) -> list[tuple[Any, ...]]:
    return marts.sql(query).fetchall()


def test_other_training_sets_are_measured_gated_and_scored_like_methods(marts: Connection) -> None:
    found = rows(marts, "select method_id, model_id, kind from method where kind <> 'baseline' order by position")
    assert found == [
        ("diffuse", "diffuse", "method"),
        ("sharp", "sharp", "method"),
        (f"sharp~{OTHER}", "sharp", "configuration"),
        (f"diffuse~{OTHER}", "diffuse", "configuration"),
    ]
    everyone = set(METHODS.values())
    for table in ("gate_summary", "threshold_choice", "operating_point", "cell_score"):
        assert everyone <= {row[0] for row in rows(marts, f"select distinct method_id from {table}")}, table
    for table, column in (
        ("flip_share", "method_b"),
        ("universe_spread", "method_id"),
        ("paired_contrast", "method_a"),
    ):
        assert not [m for (m,) in rows(marts, f"select distinct {column} from {table}") if "~" in m], table


def test_a_release_with_several_training_sets_keeps_every_rule(release: tuple[Connection, Built]) -> None:
    connection, tables = release
    for name in (*CONFIGURATION_MARTS, *LEDGER_MARTS, "hypothesis_case"):
        mart = tables.marts[name]
        assert declared_findings(connection, mart.table) == []
        assert list(check_findings(connection, mart.table, mart.checks)) == []


def test_other_training_sets_move_nothing_of_the_primary_one(
    marts: Connection, study: Path, lake: Path, tmp_path: Path
) -> None:
    connection, _ = built(lake, measured(alone(study, PRIMARY, tmp_path), lake), PRIMARY_MARTS)
    try:
        for mart in PRIMARY_MARTS:
            query = f"select * from {mart} order by all"
            assert rows(connection, query) == rows(marts, query), mart
            assert mart == "dropped_level" or rows(connection, query)
        assert rows(connection, "select * from method where kind = 'configuration'") == []
    finally:
        connection.close()


def test_without_several_training_sets_these_marts_have_no_row(phantom_marts: Connection) -> None:
    for mart in CONFIGURATION_MARTS:
        assert rows(phantom_marts, f"select * from {mart}") == [], mart
    assert rows(phantom_marts, "select distinct configuration_set from hypothesis") == [("primary",)]
    for transform in ("configuration_statistic", "configuration_baseline_contrast"):
        assert rows(phantom_marts, f"select * from {transform}") == [], transform


def test_the_gate_alone_judges_other_training_sets_and_says_what_would_mend_them(study: Path, tmp_path: Path) -> None:
    head, *methods = study.read_text().split("[[method]]")
    place = next(k for k, text in enumerate(methods) if 'id = "diffuse"' in text and f'"{OTHER}"' in text)
    right = next(line for line in methods[place].splitlines() if line.startswith("reversed"))
    flags = right.partition("[")[2].rstrip("]").split(", ")
    flipped = ["false" if flags[0] == "true" else "true", *flags[1:]]
    methods[place] = methods[place].replace(right, f"reversed = [{', '.join(flipped)}]")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[[method]]".join([head, *methods]))
    shutil.copy(study.parent / "subjects.csv", tmp_path)
    gate = Ingest(load_study(wrong), tmp_path / "lake", InProcess()).run_gate(is_kept=False)
    verdicts = judge(tmp_path / "lake", gate)
    found = dict(verdicts.methods.select("method_id", "verdict").iter_rows())
    failing = METHODS["diffuse", OTHER]
    assert found == {method: "failed" if method == failing else "passed" for method in METHODS.values()}
    lines = verdicts.methods.row(by_predicate=pl.col("method_id") == failing, named=True)["study_lines"]
    assert right in lines.splitlines()


def test_scores_are_those_of_the_reference_universe(marts: Connection) -> None:
    found = {
        row[:3]: row[3:] for row in rows(marts, "from configuration_score select model_id, training_set, metric_id, *")
    }
    assert len(found) == 2 * 2 * 6
    point = """
        select method_id, dice_mean from operating_point
        where threshold_rule_id = 'validation' and budget_cm3 = 20 and postprocess_id = 'plain'"""
    dice = dict(rows(marts, point))
    mean = "select method_id, favg(auroc) from voxel_ranking join cohort_subject using (subject_id)"
    where = "where split = 'test' and reference_id = 'canonical' and support_id = 'brain' group by all"
    auroc = dict(rows(marts, f"{mean} {where}"))
    scores = "select model_id, training_set, metric_id, score, n_subjects, status from configuration_score"
    for model, training_set, metric, score, n_subjects, status in rows(marts, scores):
        method = METHODS[model, training_set]
        if metric in ("dice", "voxel_auroc"):
            assert score == pytest.approx((dice if metric == "dice" else auroc)[method], abs=1e-15)
        assert status == "ok"
        assert n_subjects == 3  # the fourth test subject has an empty reference


def universe_array(marts: Connection, universe_set: str, metric: str) -> Array:
    """Scores by the ten axes, training set and model."""
    condition = "status = 'ok'" + (" and is_defensible" if universe_set == "defensible" else "")
    condition += "" if metric == "all" else f" and metric_id = '{metric}'"
    columns = ", ".join(AXES)
    universes = rows(marts, f"select {columns}, cell_id from universe where {condition}")
    levels = [sorted({row[k] for row in universes}) for k in range(len(AXES))]
    place = [{level: position for position, level in enumerate(axis)} for axis in levels]
    score = {(c, m): s for c, m, s in rows(marts, "select cell_id, method_id, score from cell_score")}
    scores = np.full([*(len(axis) for axis in levels), 2, 2], np.nan)
    for row in universes:
        at = tuple(place[k][row[k]] for k in range(len(AXES)))
        scores[at] = [[score[row[-1], METHODS[model, name]] for model in MODELS] for name in (PRIMARY, OTHER)]
    assert not np.isnan(scores).any()
    return scores


def slow_shares(scores: Array, names: tuple[str, ...]) -> dict[str, float]:
    """Shares of all terms; the methods are on the last axis of `scores`, the axes of `names` before it."""
    grand, size, methods = scores.mean(), scores.size, scores.shape[-1]
    by_method = scores.mean(axis=tuple(range(scores.ndim - 1)))
    total = ((scores - grand) ** 2).sum()
    terms = {"method": size / methods * ((by_method - grand) ** 2).sum()}
    for axis, name in enumerate(names):
        levels = scores.shape[axis]
        means = np.moveaxis(scores, axis, 0).reshape(levels, -1, methods).mean(axis=1)
        level = means.mean(axis=1)
        terms[name] = size / levels * ((level - grand) ** 2).sum()
        rest = means - level[:, None] - by_method + grand
        terms[f"method:{name}"] = size / (levels * methods) * (rest**2).sum()
    terms["axes"] = sum(value for name, value in terms.items() if name != "method")
    terms["remainder"] = total - terms["method"] - terms["axes"]
    return {name: value / total for name, value in terms.items()} | {"total": 1.0}


@pytest.mark.parametrize(
    ("universe_set", "metric"), [("defensible", "dice"), ("defensible", "all"), ("all", "voxel_ap")]
)
def test_variance_with_the_training_set_as_an_axis(marts: Connection, universe_set: str, metric: str) -> None:
    where = f"where universe_set = '{universe_set}' and metric_id = '{metric}'"
    found = dict(rows(marts, f"select term, share from configuration_variance {where}"))
    expected = slow_shares(universe_array(marts, universe_set, metric), (*AXES, "configuration"))
    assert found.keys() == expected.keys()
    for term, share in expected.items():
        assert found[term] == pytest.approx(share, abs=1e-11), term
    assert found["configuration"] > 0 and found["method:configuration"] > 0


def test_replicate_0_is_the_mart_and_every_share_has_an_interval(marts: Connection) -> None:
    joined = """
        select v.term, v.share, s.value, v.share_low, v.share_high
        from configuration_variance as v
        left join configuration_statistic as s
            on s.universe_set = v.universe_set and s.metric_id = v.metric_id and s.item = v.term and s.replicate = 0
            and s.configuration_set is null"""
    found = rows(marts, joined)
    assert len(found) == 2 * 7 * (2 * 11 + 4)
    for term, share, value, low, high in found:
        assert value == pytest.approx(share, abs=1e-12), term
        assert low <= high


def drawn(count: int, seed: int) -> list[list[int]]:
    """Subjects that each replicate takes, replicate 0 every one once."""
    index = np.random.Generator(np.random.PCG64(seed)).integers(0, count, (REPLICATES, count))
    return [list(range(count)), *index.tolist()]


def seed_of(marts: Connection) -> int:
    return int(rows(marts, "select seed from protocol")[0][0])


def subjects_of(marts: Connection, split: str) -> list[str]:
    where = f"where is_included and split = '{split}'"
    return [s for (s,) in rows(marts, f"select subject_id from cohort_subject {where} order by subject_id")]


def test_resampled_variance_of_voxel_auroc(marts: Connection) -> None:
    """One metric written out on repeated subjects; what reads curves is the code of `replicate_statistic`."""
    subjects = subjects_of(marts, "test")
    ranking = "select method_id, support_id, subject_id, auroc from voxel_ranking where reference_id = 'canonical'"
    auroc = {row[:3]: row[3] for row in rows(marts, ranking)}
    bins: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}
    histogram = "select method_id, support_id, subject_id, bin, positive_voxels, negative_voxels from score_histogram"
    for method, support, subject, *counts in rows(marts, f"{histogram} where reference_id = 'canonical'"):
        bins.setdefault((method, support, subject), []).append((counts[0], counts[1], counts[2]))
    for replicate in (1, 2, 5):
        taken = [subjects[i] for i in drawn(len(subjects), seed_of(marts))[replicate]]
        scores = np.empty((2, 3, 2, 2))
        for (s, support), (k, name), (m, model) in itertools.product(
            enumerate(("brain", "brain_in_view")), enumerate((PRIMARY, OTHER)), enumerate(MODELS)
        ):
            method = METHODS[model, name]
            values = [v for i in taken if (v := auroc[method, support, i]) is not None]
            pooled = [row for i in taken for row in bins[method, support, i]]
            score = [row[0] for row in pooled] * 2
            label = [1] * len(pooled) + [0] * len(pooled)
            weight = [row[1] for row in pooled] + [row[2] for row in pooled]
            whole = sklearn_metrics.roc_auc_score(label, score, sample_weight=weight)
            scores[s, :, k, m] = statistics.fmean(values), statistics.median(values), whole
        expected = slow_shares(scores, ("support_id", "aggregation_id", "configuration"))
        where = f"universe_set = 'defensible' and metric_id = 'voxel_auroc' and replicate = {replicate}"
        where += " and configuration_set is null"
        found = dict(rows(marts, f"select item, value from configuration_statistic where {where}"))
        for term, share in expected.items():
            assert found[term] == pytest.approx(share, abs=1e-9), (replicate, term)


def test_shares_of_universes_with_another_order(marts: Connection) -> None:
    members: dict[str, list[str]] = {}
    for name, method in rows(
        marts,
        "select configuration_set, method_id from configuration_member order by configuration_set, model_position",
    ):
        members.setdefault(name, []).append(method)
    assert members["primary"] == members[f"all {PRIMARY}"] == list(MODELS)
    assert members[f"all {OTHER}"] == [METHODS[model, OTHER] for model in MODELS]
    assert {"validation_selected", "test_selected"} < members.keys()
    score = {(c, m): s for c, m, s in rows(marts, "select cell_id, method_id, score from cell_score")}
    universes = rows(marts, "select cell_id, metric_id from universe where status = 'ok' and is_defensible")
    mart = "from configuration_order where universe_set = 'defensible'"
    found = {
        row[:2]: row[2:] for row in rows(marts, f"select configuration_set, metric_id, share, universe_count {mart}")
    }
    assert {name for name, _ in found} == members.keys() - {"primary"}

    def direction(cell: int, pair: list[str]) -> int:
        difference = score[cell, pair[0]] - score[cell, pair[1]]
        return 0 if abs(difference) < 1e-9 else 1 if difference > 0 else -1

    for name, pair in members.items():
        for metric in {m for _, m in universes} | {"all"} if name != "primary" else ():
            cells = [cell for cell, one in universes if metric in (one, "all")]
            differing = sum(direction(cell, pair) != direction(cell, list(MODELS)) for cell in cells)
            assert found[name, metric] == (pytest.approx(differing / len(cells)), len(cells))
    assert 0 < found[f"all {OTHER}", "all"][0] < 1
    assert found[f"all {PRIMARY}", "all"][0] == 0


def test_contrasts_of_models_with_a_common_training_set(marts: Connection) -> None:
    subjects = subjects_of(marts, "test")
    point = "threshold_rule_id = 'validation' and budget_cm3 = 20 and postprocess_id = 'plain'"
    dice = {
        row[:2]: row[2]
        for row in rows(marts, f"select method_id, subject_id, dice from operating_subject where {point}")
    }
    where = "where reference_id = 'canonical' and support_id = 'brain'"
    ranked = {
        row[:2]: row[2:]
        for row in rows(marts, f"select method_id, subject_id, auroc, average_precision from voxel_ranking {where}")
    }
    values = {"dice": dice, "voxel_auroc": {k: v[0] for k, v in ranked.items()}}
    values["voxel_ap"] = {k: v[1] for k, v in ranked.items()}
    p_values: dict[str, list[tuple[float, str]]] = {}
    mart = "select training_set, metric_id, estimate, p_value, n_subjects, n_replicates from configuration_contrast"
    found = rows(marts, mart)
    assert len(found) == 2 * 3
    for training_set, metric, estimate, p_value, n_subjects, n_replicates in found:
        differences: list[float] = []
        for taken in drawn(len(subjects), seed_of(marts)):
            means: list[float] = []
            for model in MODELS:
                own = [values[metric][METHODS[model, training_set], subjects[i]] for i in taken]
                means.append(statistics.fmean(v for v in own if v is not None))
            differences.append(means[0] - means[1])
        assert (estimate, n_subjects) == (pytest.approx(differences[0], abs=1e-12), 3)
        assert n_replicates == REPLICATES
        below, above = (sum(sign * d <= 0 for d in differences[1:]) for sign in (1, -1))
        assert p_value == pytest.approx(min(1, 2 * (1 + min(below, above)) / (REPLICATES + 1)))
        p_values.setdefault(training_set, []).append((p_value, metric))
    for training_set, family in p_values.items():
        largest = 0.0
        for place, (p_value, metric) in enumerate(sorted(family)):
            largest = max(largest, min(1.0, (3 - place) * p_value))
            condition = f"training_set = '{training_set}' and metric_id = '{metric}'"
            holm = rows(marts, f"select p_holm from configuration_contrast where {condition}")
            assert holm == [(pytest.approx(largest),)]


def test_criteria_are_those_of_the_validation_marts(marts: Connection) -> None:
    setting = "reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'"
    best = f"""
        select method_id, max(dice_pooled) from cohort_curve
        where split = $split and postprocess_id = 'plain' and {setting} group by all"""
    at_budget = f"""
        select c.method_id, c.dice_mean
        from threshold_choice as t
        join cohort_curve as c using (method_id, reference_id, support_id, voxel_volume_id, level)
        where t.threshold_rule_id = 'validation' and t.budget_cm3 = 20 and c.split = 'validation'
            and c.postprocess_id = 'plain' and {setting}"""
    mean = """
        select method_id, favg(average_precision) from voxel_ranking join cohort_subject using (subject_id)
        where split = 'validation' and reference_id = 'canonical' and support_id = 'brain' group by all"""
    median = f"""
        select method_id, max(dice) from (
            select method_id, level, median(dice) as dice from subject_curve
            where split = 'validation' and postprocess_id = 'plain' and {setting} group by all
        ) group by all"""
    expected = {
        "validation_dice_pooled": dict(marts.execute(best, {"split": "validation"}).fetchall()),
        "test_dice_pooled": dict(marts.execute(best, {"split": "test"}).fetchall()),
        "validation_dice_median": dict(rows(marts, median)),
        "validation_dice_budget": dict(rows(marts, at_budget)),
        "validation_voxel_ap": dict(rows(marts, mean)),
    }
    found = rows(marts, "select selection_rule_id, method_id, value, status, reason from configuration_criterion")
    assert len(found) == 6 * 4
    for rule, method, value, status, reason in found:
        if rule == "validation_slice_dice_median":
            assert (value, status) == (None, "unavailable") and "not measured" in reason
        else:
            assert value == pytest.approx(expected[rule][method], abs=1e-12), (rule, method)
            assert (status, reason) == ("ok", None)


def test_selection_on_resampled_validation_subjects(marts: Connection) -> None:
    subjects = subjects_of(marts, "validation")
    where = "where reference_id = 'canonical' and support_id = 'brain'"
    precision = {
        row[:2]: row[2]
        for row in rows(marts, f"select method_id, subject_id, average_precision from voxel_ranking {where}")
    }
    dice = dict(rows(marts, "select method_id, score from configuration_score where metric_id = 'dice'"))
    found = {
        row[0]: row[1:]
        for row in rows(
            marts,
            "select model_id, training_set, choice_share, test_regret, regret_mean, regret_low, regret_high,"
            " n_replicates from selection where selection_rule_id = 'validation_voxel_ap'",
        )
    }
    assert found.keys() == set(MODELS)
    for model, (choice, share, regret, mean, low, high, n_replicates) in found.items():
        chosen: list[str] = []
        for taken in drawn(len(subjects), seed_of(marts)):
            value = {
                name: statistics.fmean(precision[METHODS[model, name], subjects[i]] for i in taken)
                for name in (PRIMARY, OTHER)
            }
            chosen.append(max(value, key=lambda name: value[name]))
        best = max(dice[METHODS[model, name]] for name in (PRIMARY, OTHER))
        regrets = [best - dice[METHODS[model, name]] for name in chosen]
        assert choice == chosen[0]
        assert share == pytest.approx(sum(name == choice for name in chosen[1:]) / REPLICATES)
        assert regret == pytest.approx(regrets[0], abs=1e-12)
        assert mean == pytest.approx(statistics.fmean(regrets[1:]), abs=1e-12)
        assert [low, high] == pytest.approx(np.quantile(regrets[1:], [0.025, 0.975]).tolist(), abs=1e-12)
        assert n_replicates == REPLICATES


CASE = "item, estimate, estimate_low, estimate_high, criterion_margin, is_supported"
VERDICT = "verdict, supported_count, case_count, undecided_count"


def ledger(marts: Connection, configuration_set: str, table: str, columns: str) -> list[tuple[Any, ...]]:
    where = f"where configuration_set = '{configuration_set}'"
    return rows(marts, f"select hypothesis_id, {columns} from {table} {where} order by all")


def test_the_primary_maps_under_another_name_have_the_verdicts_of_the_primary_maps(marts: Connection) -> None:
    assert rows(marts, "select configuration_set, same_as, status from ledger_set order by position")[:3] == [
        ("primary", "primary", "ok"),
        (f"all {PRIMARY}", "primary", "ok"),
        (f"all {OTHER}", f"all {OTHER}", "ok"),
    ]
    for table, columns in (("hypothesis_case", f"{CASE}, reason"), ("hypothesis", f"{VERDICT}, reason")):
        found = ledger(marts, f"all {PRIMARY}", table, columns)
        assert found == ledger(marts, "primary", table, columns) and found


def test_a_set_has_the_verdicts_of_a_study_whose_primary_maps_these_are(
    marts: Connection, study: Path, lake: Path, tmp_path: Path
) -> None:
    """Numbers are equal, but for the last digits of what is summed about another centre."""
    ledger_marts = ("hypothesis", "configuration_phi_max", "configuration_share")
    connection, _ = built(lake, measured(alone(study, OTHER, tmp_path), lake), ledger_marts)
    try:
        undiagnosed = {"H7", "S7"}
        for table, columns in (("hypothesis_case", CASE), ("hypothesis", VERDICT)):
            expected = [row for row in ledger(connection, "primary", table, columns) if row[0] not in undiagnosed]
            found = [row for row in ledger(marts, f"all {OTHER}", table, columns) if row[0] not in undiagnosed]
            found = [(one, item.replace(f"~{OTHER}", ""), *rest) for one, item, *rest in found]
            assert [row[:2] for row in found] == [row[:2] for row in expected]
            for one, other in zip(found, expected, strict=True):
                assert one[2:] == (pytest.approx(other[2:], abs=1e-12) if one[0] in ("H1", "H2") else other[2:]), one
        decided = {row[0] for row in ledger(marts, f"all {OTHER}", "hypothesis", VERDICT) if row[1] != "not_testable"}
        assert {"H1", "H2", "H3", "H5", "H6", "S1", "S2", "S3", "S5", "S6"} <= decided
        for mart in ("configuration_phi_max", "configuration_share"):
            query = f"select * exclude (configuration_set) from {mart} where configuration_set = '{{}}' order by all"
            expected, found = rows(connection, query.format("primary")), rows(marts, query.format(f"all {OTHER}"))
            assert [row[:1] for row in found] == [row[:1] for row in expected] and found
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, abs=1e-12)
    finally:
        connection.close()


@pytest.mark.parametrize("metric", ["dice", "all", "voxel_ap"])
def test_shares_and_flips_of_a_set_over_universes_written_out(marts: Connection, metric: str) -> None:
    where = f"where configuration_set = 'all {OTHER}' and metric_id = '{metric}'"
    scores = universe_array(marts, "defensible", metric)[..., 1, :]
    found = dict(rows(marts, f"select term, share from configuration_share {where}"))
    expected = slow_shares(scores, AXES)
    assert found.keys() == expected.keys()
    for term, share in expected.items():
        assert found[term] == pytest.approx(share, abs=1e-11), term
    difference = (scores[..., 0] - scores[..., 1]).ravel()
    tied, above = int((abs(difference) < 1e-9).sum()), int((difference >= 1e-9).sum())
    share = (min(above, len(difference) - tied - above) + tied / 2) / len(difference)
    query = f"select value, value_low, value_high, method_a, method_b from configuration_phi_max {where}"
    [(value, low, high, *pair)] = rows(marts, query)
    assert (value, tuple(pair)) == (pytest.approx(share, abs=1e-12), MODELS)
    assert 0 <= low <= high <= 0.5


def test_contrasts_with_baselines_are_those_of_primary_maps(marts: Connection) -> None:
    """Of one baseline less another set's maps: written out at the two levels about the budget."""
    curve = """
        select method_id, level, favg(burden) as burden, favg(dice) as dice
        from (
            select
                c.method_id, c.level, (predicted_voxels - true_positive_voxels) * s.voxel_mm3 / 1000 as burden,
                2 * true_positive_voxels / nullif(predicted_voxels + c.reference_voxels, 0)
                    + case when c.reference_voxels = 0 then null else 0 end as dice
            from threshold_curve as c
            join cohort_subject as s using (subject_id)
            where s.is_included and s.split = 'test' and postprocess_id = 'plain'
                and reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'
        )
        group by all
        order by method_id, level"""
    levels: dict[str, list[tuple[float, float]]] = {}
    for method, _, burden, dice in rows(marts, curve):
        levels.setdefault(method, []).append((burden, dice))

    def at_budget(method: str) -> float | None:
        for (looser, more), (tighter, less) in itertools.pairwise(levels[method]):
            if tighter <= 20 < looser:
                weight = (20 - tighter) / (looser - tighter)
                return (1 - weight) * less + weight * more
        return None

    found = rows(marts, "select method_a, method_b, budget_cm3, estimate from configuration_baseline_contrast")
    others = [METHODS[model, OTHER] for model in MODELS]
    assert {row[:2] for row in found} == set(itertools.product(others, ("FLAIR", "T2")))
    reached = 0
    for a, b, budget, estimate in found:
        assert budget == 20
        values = at_budget(a), at_budget(b)
        if values[0] is None or values[1] is None:
            assert estimate is None
        else:
            assert estimate == pytest.approx(values[0] - values[1], abs=1e-12)
            reached += 1
    assert reached


def found_by(marts: Connection, title: str) -> list[tuple[Any, ...]]:
    [question] = [one for one in QUESTIONS if one.title.startswith(title)]
    return rows(marts, question.sql)


def test_findings_show_the_choice_and_the_orders(marts: Connection) -> None:
    choices = found_by(marts, "Which training set?")
    assert [row[:2] for row in choices[:2]] == [(model, "validation_dice_pooled") for model in MODELS]
    assert len(choices) == 5 * 2
    assert [row[0] for row in found_by(marts, "Orders with other")] == [
        f"all {OTHER}",
        "test_selected",
        "validation_selected",
    ]
    assert found_by(marts, "Training sets that are no level") == []
    sets = dict(found_by(marts, "Hypotheses with other training sets"))
    assert list(sets)[:2] == [f"all {PRIMARY}", f"all {OTHER}"] and len(sets) == 4
    assert sets[f"all {PRIMARY}"] == "none: these are the primary maps"
    assert "H7" not in sets[f"all {OTHER}"]  # not testable in either
    assert {row[0] for row in found_by(marts, "Operating points")} == {*MODELS, "FLAIR", "T2"}


def test_a_hole_of_another_training_set_says_so_and_drops_nothing_of_the_primary_one(
    lake: Path, study: Path, tmp_path: Path
) -> None:
    """Without legacy volume the other maps lack scores that the primary ones have: no level of the axis there."""
    head, *methods = study.read_text().split("[[method]]")
    place = next(k for k, text in enumerate(methods) if 'id = "sharp"' in text and f'"{OTHER}"' in text)
    methods[place] = "\n".join(line for line in methods[place].splitlines() if not line.startswith("legacy")) + "\n\n"
    holed = tmp_path / "holed.toml"
    holed.write_text("[[method]]".join([head, *methods]))
    shutil.copy(study.parent / "subjects.csv", tmp_path)
    connection, _ = built(lake, measured(holed, lake), (*CONFIGURATION_MARTS, "dropped_level"))
    try:
        assert rows(connection, "select * from dropped_level") == []
        levels = rows(connection, "select universe_set, training_set, status, reason from configuration_level")
        reason = f"sharp~{OTHER} has no score in"
        assert [(u, t) for u, t, status, _ in levels if status != "ok"] == [("all", OTHER)]
        assert next(r for u, t, _, r in levels if (u, t) == ("all", OTHER)).startswith(reason)
        sets = rows(connection, "select distinct universe_set from configuration_variance")
        assert sets == [("defensible",)]
        orders = "select status, universe_count, unscored_count, reason from configuration_order"
        where = f"where configuration_set = 'all {OTHER}' and metric_id = 'dice' and universe_set"
        assert rows(connection, f"{orders} {where} = 'defensible'") == [("ok", 2592, 0, None)]
        [(status, compared, left_out, why)] = rows(connection, f"{orders} {where} = 'all'")
        assert (status, compared + left_out, left_out > 0) == ("degraded", 25_920, True)
        assert why.startswith(f"{left_out} universes are left out")
    finally:
        connection.close()
