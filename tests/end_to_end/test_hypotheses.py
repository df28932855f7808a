"""The ledger on the phantom, against the same claims worked out by hand from the lake tables."""

from fractions import Fraction
from typing import Any

import duckdb
import numpy as np
import pytest


@pytest.fixture(scope="module")
def cases(phantom_marts: duckdb.DuckDBPyConnection) -> dict[tuple[str, str], dict[str, Any]]:
    rows = phantom_marts.sql("from hypothesis_case").pl().to_dicts()
    return {(row["hypothesis_id"], row["item"]): row for row in rows}


def rows_of(marts: duckdb.DuckDBPyConnection, query: str) -> list[Any]:
    return marts.sql(query).fetchall()


def test_every_hypothesis_has_a_verdict_and_says_why(phantom_marts: duckdb.DuckDBPyConnection) -> None:
    listed = rows_of(phantom_marts, "select hypothesis_id from hypothesis_criterion order by position")
    judged = rows_of(
        phantom_marts,
        "select hypothesis_id, verdict, reason, case_count from hypothesis"
        " where configuration_set = 'primary' order by position",
    )
    assert [row[0] for row in judged] == [row[0] for row in listed]
    for name, verdict, reason, count in judged:
        assert reason, name
        assert (verdict == "not_testable") == (count == 0), name


def test_the_pair_that_flips_most_is_counted_over_universes(
    phantom_marts: duckdb.DuckDBPyConnection, cases: dict[tuple[str, str], dict[str, Any]]
) -> None:
    (item,) = (item for name, item in cases if name == "H1")
    scores = phantom_marts.sql(
        "select universe_id, method_id, score from universe_score join universe using (universe_id)"
        " join method using (method_id) where kind = 'method' and universe.is_defensible and universe.status = 'ok'"
        " order by universe_id, position"
    ).pl()
    table = scores.pivot("method_id", index="universe_id", values="score").drop("universe_id").to_numpy()
    order = [
        name
        for (name,) in rows_of(phantom_marts, "select method_id from method where kind = 'method' order by position")
    ]
    shares: dict[str, Fraction] = {}
    for a in range(len(order)):
        for b in range(a + 1, len(order)):
            gap = table[:, a] - table[:, b]
            tie = int((np.abs(gap) < 1e-9).sum())
            above, below = int((gap >= 1e-9).sum()), int((gap <= -1e-9).sum())
            shares[f"{order[a]} vs {order[b]}"] = (min(above, below) + Fraction(tie, 2)) / len(gap)
    assert cases["H1", item]["estimate"] == pytest.approx(float(max(shares.values())), abs=1e-12)
    assert shares[item] == max(shares.values())
    assert cases["H1", item]["is_supported"] == (cases["H1", item]["estimate_low"] >= 0.20)


def test_missed_lesions_are_compared_lesion_by_lesion(
    phantom_marts: duckdb.DuckDBPyConnection, cases: dict[tuple[str, str], dict[str, Any]]
) -> None:
    lesions = set(
        rows_of(
            phantom_marts,
            "select subject_id, lesion_id from lesion join cohort_subject using (subject_id)"
            " where method_id is null and lesion_definition_id = 'conn6_floor' and is_included and split = 'test'",
        )
    )
    setting = "reference_id = 'canonical' and support_id = 'brain' and voxel_volume_id = 'true'"
    levels = dict(
        rows_of(
            phantom_marts,
            "select method_id, level from threshold_choice join ranked_method using (method_id) where kind = 'method'"
            f" and {setting} and threshold_rule_id = 'validation' and budget_cm3 = 20 and status = 'ok'",
        )
    )
    missed: dict[str, set[Any]] = {}
    for method, level in levels.items():
        hit = rows_of(
            phantom_marts,
            "select subject_id, lesion_id from lesion_match where postprocess_id = 'plain' and matched_iou >= 0.1"
            f" and method_id = '{method}' and level = {level}",
        )
        missed[method] = lesions - set(hit)
    tested = {item: row for (name, item), row in cases.items() if name == "S5"}
    assert tested
    for item, row in tested.items():
        a, b = (missed[method] for method in item.split(" and "))
        assert row["estimate"] == pytest.approx(len(a & b) / len(a | b), abs=1e-15), item


def test_conformal_control_counts_the_subjects_above(
    phantom_marts: duckdb.DuckDBPyConnection, cases: dict[tuple[str, str], dict[str, Any]]
) -> None:
    tested = {item: row for (name, item), row in cases.items() if name == "H8" and row["is_supported"] is not None}
    assert tested
    mm3 = rows_of(phantom_marts, "select any_value(voxel_mm3) from cohort_subject")[0][0]
    for item, row in list(tested.items())[::5]:
        method, rule, _, budget, _ = item.split(" ")
        volume = "predicted_voxels" if "label_free" in rule else "predicted_voxels - true_positive_voxels"
        above = rows_of(
            phantom_marts,
            f"select avg((({volume}) * {mm3} / 1000 > {budget})::int) from operating_subject"
            f" where method_id = '{method}' and threshold_rule_id = '{rule}' and budget_cm3 = {budget}"
            " and postprocess_id = 'plain'",
        )[0][0]
        alpha = {"05": 0.05, "10": 0.10, "20": 0.20}[rule[-2:]]
        assert row["estimate"] == pytest.approx(above, abs=1e-12), item
        assert row["is_supported"] == (above <= alpha + 0.02), item


def test_the_last_method_and_the_ends_of_the_budgets(
    phantom_marts: duckdb.DuckDBPyConnection, cases: dict[tuple[str, str], dict[str, Any]]
) -> None:
    dice = rows_of(
        phantom_marts,
        "select dice_mean, method_id from operating_point join method using (method_id) where kind = 'method'"
        " and threshold_rule_id = 'validation' and budget_cm3 = 20 and postprocess_id = 'plain'",
    )
    assert [item for name, item in cases if name == "S2"] == [min(dice)[1]]
    pruned = {
        (method, budget): (low, high)
        for method, budget, low, high in rows_of(
            phantom_marts,
            "select method_id, budget_cm3, sensitivity_gain_low, sensitivity_gain_high from postprocess_gain"
            " where postprocess_id = 'hysteresis_pruned' and budget_cm3 in (5, 40)",
        )
    }
    tested = {item: row for (name, item), row in cases.items() if name == "H5"}
    assert len(tested) == 2 * len(dice)
    for item, row in tested.items():
        method, _, budget, _ = item.split(" ")
        low, high = pruned[method, float(budget)]
        assert row["is_supported"] == (low > 0 if budget == "5" else high < 0), item
