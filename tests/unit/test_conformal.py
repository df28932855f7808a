import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import duckdb
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from expectations.protocol import Protocol, protocol
from expectations.tables import breaches
from ingest.manifest import read_manifest
from marts.catalog import marts as known_marts
from marts.release import build_tables, open_for_building
from transforms.catalog import Transform
from transforms.conformal import (
    LAW_COLUMNS,
    BetaBinomialLaw,
    BetaLaw,
    Infeasible,
    clopper_pearson,
    conformal_law,
    conformal_split,
    critical_levels,
    draw_calibration,
    exceedance_interval,
    exceedance_law,
    held_out_exceedances,
    observed_law,
    plan_table,
    planned_universes,
    rule_law,
    split_sizes,
)
from transforms.thresholds import allowed_by_crc

proportion = import_module("statsmodels.stats.proportion")
proportion_confint = cast(Callable[..., tuple[float, float]], proportion.proportion_confint)

Levels = NDArray[np.uint8]
TENTH, FIFTH = Fraction(1, 10), Fraction(1, 5)
LAW = [name.rstrip("?") for name in LAW_COLUMNS]


# The law, against sums of fractions


def binomial_tail(trials: int, least: int, share: Fraction) -> Fraction:
    """P(Binomial(trials, share) >= least)."""
    return sum(
        (math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(least, trials + 1)), Fraction(0)
    )


def beta_mass_below(n: int, j: int, share: Fraction) -> Fraction:
    """P(Beta(j + 1, n - j) <= x): the (j + 1)-th smallest of n uniforms is at most x if j + 1 of them are."""
    return binomial_tail(n, j + 1, share)


def urn_masses(n: int, j: int, n_test: int) -> list[Fraction]:
    """P(k of n_test new subjects exceed): among orders of n + n_test distinct values, all equally likely.

    With k new values above the threshold, the threshold is the (j + k + 1)-th from the top: j calibration subjects and
    k new ones stand above it, n - j - 1 and n_test - k below.
    """
    orders = math.comb(n + n_test, n)
    return [
        Fraction(math.comb(j + k, j) * math.comb(n - j - 1 + n_test - k, n_test - k), orders) for k in range(n_test + 1)
    ]


@st.composite
def calibrations(draw: st.DrawFn) -> tuple[int, int]:
    """Calibration subjects and how many may exceed."""
    n = draw(st.integers(1, 120))
    return n, draw(st.integers(0, n - 1))


def beta(n: int, j: int) -> BetaLaw:
    law = exceedance_law(n, j)
    assert isinstance(law, BetaLaw)
    return law


def betabinomial(n: int, j: int, n_test: int) -> BetaBinomialLaw:
    law = observed_law(n, j, n_test)
    assert isinstance(law, BetaBinomialLaw)
    return law


@pytest.mark.parametrize(
    ("n", "first", "second", "mean", "within", "high"),
    [
        (24, 2, 23, "0.0800", "0.7075", "0.2112"),
        (50, 5, 46, "0.0980", "0.5688", "0.1923"),
        (100, 10, 91, "0.0990", "0.5487", "0.1640"),
    ],
)
def test_the_law_of_the_paper(n: int, first: int, second: int, mean: str, within: str, high: str) -> None:
    law = beta(n, allowed_by_crc(n, TENTH))
    assert law == BetaLaw(first, second)
    assert [f"{v:.4f}" for v in (law.mean, law.within(TENTH), law.quantile(0.975))] == [mean, within, high]


@settings(deadline=None)
@given(calibrations(), st.fractions(0, 1, max_denominator=40))
def test_the_beta_law_is_a_binomial_sum(calibration: tuple[int, int], share: Fraction) -> None:
    n, j = calibration
    assert beta(n, j).within(share) == pytest.approx(float(beta_mass_below(n, j, share)), rel=1e-9, abs=1e-14)
    assert beta(n, j).mean == pytest.approx(float(Fraction(j + 1, n + 1)), rel=1e-15)


@settings(deadline=None)
@given(calibrations(), st.sampled_from([0.025, 0.5, 0.975]))
def test_quantiles_invert_the_beta_law(calibration: tuple[int, int], share: float) -> None:
    n, j = calibration
    found = beta(n, j).quantile(share)
    assert 0 < found < 1
    assert float(beta_mass_below(n, j, Fraction(found))) == pytest.approx(share, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(calibrations(), st.integers(1, 60))
def test_the_observed_law_is_that_of_an_urn(calibration: tuple[int, int], n_test: int) -> None:
    masses, law = urn_masses(*calibration, n_test), betabinomial(*calibration, n_test)
    cumulative = [float(sum(masses[: k + 1], Fraction(0))) for k in range(n_test + 1)]
    assert sum(masses) == 1
    assert law.cumulative == pytest.approx(cumulative, rel=1e-9, abs=1e-14)
    assert law.mean == pytest.approx(float(sum((k * m for k, m in enumerate(masses)), Fraction(0)) / n_test), rel=1e-12)
    for alpha in (Fraction(1, 20), TENTH, FIFTH):
        kept = sum((m for k, m in enumerate(masses) if Fraction(k, n_test) <= alpha), Fraction(0))
        assert law.within(alpha) == pytest.approx(float(kept), rel=1e-9, abs=1e-14)


@settings(deadline=None, max_examples=60)
@given(calibrations(), st.integers(1, 60), st.sampled_from([0.025, 0.5, 0.975]))
def test_quantiles_of_the_observed_law(calibration: tuple[int, int], n_test: int, share: float) -> None:
    cumulative = list(itertools.accumulate(urn_masses(*calibration, n_test)))
    if all(abs(float(c) - share) > 1e-9 for c in cumulative):  # a share that is met exactly may go either way
        expected = next(k for k, c in enumerate(cumulative) if c >= Fraction(share)) / n_test
        assert betabinomial(*calibration, n_test).quantile(share) == expected


def test_the_observed_law_comes_to_the_true_one_as_the_test_cohort_grows() -> None:
    few, many, true = betabinomial(24, 1, 50), betabinomial(24, 1, 20_000), beta(24, 1)
    assert many.within(TENTH) == pytest.approx(true.within(TENTH), abs=1e-3)
    assert many.quantile(0.975) == pytest.approx(true.quantile(0.975), abs=1e-3)
    assert few.quantile(0.975) > true.quantile(0.975)


def test_without_any_allowed_exceedance_there_is_a_reason_and_no_law() -> None:
    law = exceedance_law(8, -1)
    assert isinstance(law, Infeasible)
    assert "8 calibration subjects are too few" in law.reason
    assert observed_law(8, -1, 100) == law
    assert observed_law(24, 1, 0) == Infeasible("no test subject shows an exceedance")


@pytest.mark.parametrize(("n", "j"), [(5, 5), (5, 9), (0, 0)])
def test_a_rule_that_lets_all_exceed_is_no_rule(n: int, j: int) -> None:
    with pytest.raises(ValueError, match="no control"):
        exceedance_law(n, j)


# Conformal risk control, by enumeration


@pytest.mark.parametrize("alpha", [Fraction(1, 20), TENTH, FIFTH, Fraction(1, 3)])
@pytest.mark.parametrize("n", range(1, 40))
def test_crc_keeps_alpha_whatever_new_subject_and_one_more_exceedance_would_not(n: int, alpha: Fraction) -> None:
    """The new subject is at any of n + 1 equally likely places: it exceeds at j + 1 of them."""
    j = allowed_by_crc(n, alpha)
    if j >= 0:
        assert sum(place > n - 1 - j for place in range(n + 1)) == j + 1
        assert Fraction(j + 1, n + 1) <= alpha
        assert beta(n, j).mean == pytest.approx(float(Fraction(j + 1, n + 1)))
    assert Fraction(j + 2, n + 1) > alpha


@pytest.mark.parametrize(("n", "alpha", "j"), [(9, TENTH, 0), (19, TENTH, 1), (24, FIFTH, 4), (19, Fraction(1, 20), 0)])
def test_where_alpha_times_n_plus_1_is_whole_the_mean_exceedance_is_alpha(n: int, alpha: Fraction, j: int) -> None:
    assert (alpha * (n + 1)).denominator == 1
    assert allowed_by_crc(n, alpha) == j
    assert Fraction(j + 1, n + 1) == alpha
    assert sum((k * m for k, m in enumerate(urn_masses(n, j, 7))), Fraction(0)) / 7 == alpha


def calibrated_level(calibration: Sequence[int], alpha: Fraction) -> int | None:
    """The rule as it is defined: the smallest level with (exceedances + 1) / (n + 1) <= alpha."""
    for level in range(201):
        if Fraction(sum(c > level for c in calibration) + 1, len(calibration) + 1) <= alpha:
            return level
    return None


@pytest.mark.parametrize(("cohort", "n", "alpha"), [(9, 4, FIFTH), (10, 5, Fraction(1, 2)), (12, 9, TENTH)])
def test_over_all_splits_of_a_cohort_the_held_out_exceedance_has_the_law_exactly(
    cohort: int, n: int, alpha: Fraction
) -> None:
    levels = (np.arange(cohort) * 7 % 13 * 9).astype(np.uint8)
    assert len(set(levels.tolist())) == cohort
    sets = list(itertools.combinations(range(cohort), n))
    j = allowed_by_crc(n, alpha)
    [counts] = held_out_exceedances(levels, np.array(sets), [j])
    assert counts.tolist() == [by_definition(levels, chosen, alpha) for chosen in sets]
    seen = Counter(int(count) for count in counts)
    assert [Fraction(seen[k], len(sets)) for k in range(cohort - n + 1)] == urn_masses(n, j, cohort - n)


def by_definition(levels: Levels, chosen: Sequence[int], alpha: Fraction) -> int:
    level = calibrated_level([int(levels[i]) for i in chosen], alpha)
    assert level is not None
    return sum(int(levels[i]) > level for i in range(levels.size) if i not in set(chosen))


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[Levels, list[tuple[int, ...]]]:
    """Critical levels, often tied, and calibration sets."""
    span = draw(st.sampled_from([1, 3, 201]))
    levels = np.array(draw(st.lists(st.integers(0, 200), min_size=6, max_size=24)), np.uint8) % span
    n = draw(st.integers(4, levels.size))
    order = st.permutations(range(levels.size))
    return levels.astype(np.uint8), [tuple(draw(order)[:n]) for _ in range(draw(st.integers(1, 4)))]


@settings(deadline=None, max_examples=80)
@given(cohorts())
def test_held_out_exceedances_equal_the_rule_applied_split_by_split(
    drawn: tuple[Levels, list[tuple[int, ...]]],
) -> None:
    levels, sets = drawn
    alphas = [FIFTH, Fraction(1, 3), Fraction(1, 2)]
    found = held_out_exceedances(levels, np.array(sets), [allowed_by_crc(len(sets[0]), alpha) for alpha in alphas])
    assert found.tolist() == [[by_definition(levels, chosen, alpha) for chosen in sets] for alpha in alphas]


def test_no_rule_and_no_split_give_no_counts() -> None:
    levels = np.array([3, 1, 2], np.uint8)
    assert held_out_exceedances(levels, np.array([[0, 1]]), []).shape == (0, 1)
    assert held_out_exceedances(levels, np.empty((0, 2), np.int64), [0]).shape == (1, 0)


@given(st.lists(st.one_of(st.floats(0, 1, width=32), st.integers(0, 200).map(lambda k: float(np.float32(k / 200))))))
def test_the_critical_level_is_the_first_that_no_longer_exceeds(critical: list[float]) -> None:
    expected = [next(k for k in range(201) if not np.float32(t) > np.float32(k / 200)) for t in critical]
    assert critical_levels(np.array(critical, np.float64)).tolist() == expected


@pytest.mark.parametrize(("n", "alpha"), [(24, TENTH), (19, FIFTH)])
def test_simulated_calibration_sets_follow_the_law(n: int, alpha: Fraction) -> None:
    """Uniform critical thresholds: the true exceedance of a threshold is one minus itself.

    The empirical distribution of 20,000 sets stays within sqrt(log(2 / p) / 2 / 20,000) of the law but with probability
    p (Dvoretzky, Kiefer, Wolfowitz; Massart), here one in a million; the mean within five standard errors.
    """
    sets, j = 20_000, allowed_by_crc(n, alpha)
    scores = np.random.Generator(np.random.PCG64(6)).random((sets, n))
    exceedance = np.sort(1 - np.sort(scores, axis=1)[:, n - j - 1])
    law, band = beta(n, j), math.sqrt(math.log(2 / 1e-6) / 2 / sets)
    for share in (Fraction(k, 50) for k in range(1, 25)):
        assert np.mean(exceedance <= float(share)) == pytest.approx(float(beta_mass_below(n, j, share)), abs=band)
        assert np.mean(exceedance <= float(share)) == pytest.approx(law.within(share), abs=band)
    for share in (0.025, 0.975):
        assert np.mean(exceedance <= law.quantile(share)) == pytest.approx(share, abs=band)
    variance = law.mean * (1 - law.mean) / (n + 2)
    assert exceedance.mean() == pytest.approx(law.mean, abs=5 * math.sqrt(variance / sets))


@pytest.mark.parametrize(("n", "alpha"), [(9, TENTH), (19, Fraction(1, 20)), (24, FIFTH)])
def test_simulated_cohorts_show_exceedances_as_the_law_says(n: int, alpha: Fraction) -> None:
    """20,000 times n subjects calibrate and 37 others are counted; alpha (n + 1) is whole, so the mean is alpha."""
    sets, j, n_test = 20_000, allowed_by_crc(n, alpha), 37
    scores = np.random.Generator(np.random.PCG64(7)).random((sets, n + n_test))
    thresholds = np.sort(scores[:, :n], axis=1)[:, n - j - 1]
    counts = (scores[:, n:] > thresholds[:, None]).sum(axis=1)
    law, band = betabinomial(n, j, n_test), math.sqrt(math.log(2 / 1e-6) / 2 / sets)
    for k in range(n_test + 1):
        assert np.mean(counts <= k) == pytest.approx(float(law.cumulative[k]), abs=band)
    spread = law.mean * (1 - law.mean) / (n + 2) * (1 + (n + 1) / n_test)
    assert law.mean == float(alpha)
    assert counts.mean() / n_test == pytest.approx(law.mean, abs=5 * math.sqrt(spread / sets))


# Intervals


@given(st.integers(1, 400))
def test_intervals_are_those_of_statsmodels(total: int) -> None:
    counts = np.unique(np.linspace(0, total, 5).astype(np.int64))
    low, high = clopper_pearson(counts, total)
    for k, below, above in zip(counts.tolist(), low.tolist(), high.tolist(), strict=True):
        expected = proportion_confint(k, total, alpha=0.05, method="beta")
        assert (below, above) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("total", [1, 4, 37])
def test_the_ends_of_an_interval_leave_a_fortieth_of_a_binomial_in_its_tail(total: int) -> None:
    low, high = clopper_pearson(np.arange(total + 1), total)
    assert (low[0], high[-1]) == (0.0, 1.0)
    for k in range(1, total + 1):
        assert float(binomial_tail(total, k, Fraction(low[k]))) == pytest.approx(0.025, rel=1e-9)
        assert 1 - float(binomial_tail(total, k, Fraction(high[k - 1]))) == pytest.approx(0.025, rel=1e-9)


# Sizes and draws


def test_declared_sizes_that_leave_ten_subjects_fit() -> None:
    sizes = {size.n: size for size in split_sizes(60, [24, 50, 100])}
    assert [(n, size.status) for n, size in sizes.items()] == [(24, "ok"), (50, "ok"), (100, "unavailable")]
    assert sizes[50].is_drawn and not sizes[100].is_drawn
    assert sizes[100].reason == "100 calibration subjects leave fewer than 10 of 60 test subjects"
    assert [size.status for size in split_sizes(59, [50, 24])] == ["ok", "unavailable"]


def test_half_calibrates_where_no_declared_size_fits() -> None:
    assert [(s.n, s.status) for s in split_sizes(33, [24])] == [(16, "degraded"), (24, "unavailable")]
    assert [(s.n, s.status) for s in split_sizes(8, [4])] == [(4, "degraded")]
    assert [(s.n, s.status) for s in split_sizes(1, [24])] == [(24, "unavailable")]
    assert [(s.n, s.status) for s in split_sizes(34, [24])] == [(24, "ok")]
    assert [(s.n, s.status) for s in split_sizes(20, [])] == [(10, "degraded")]


def test_draws_repeat_are_nested_and_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    few, many = draw_calibration(30, 12, 1_000, 5), draw_calibration(30, 20, 2_300, 5)
    assert np.array_equal(many[:1_000, :12], few)
    assert few.tolist() == draw_calibration(30, 12, 1_000, 5).tolist() != draw_calibration(30, 12, 1_000, 6).tolist()
    assert all(len(set(row)) == 20 for row in many.tolist())


def test_every_subject_is_drawn_about_as_often() -> None:
    drawn = draw_calibration(40, 10, 4_000, 1)
    often = np.bincount(drawn.ravel(), minlength=40)
    assert np.abs(often - 1_000).max() < 5 * math.sqrt(4_000 * 0.25 * 0.75)


# Tables


def cohort_subject(validation: int, test: int, excluded: int = 0) -> pl.DataFrame:
    kinds = [("validation", True)] * validation + [("test", True)] * test + [("test", False)] * excluded
    rows = [(f"s{i:03d}", split, included) for i, (split, included) in enumerate(kinds)]
    return pl.DataFrame(
        rows, schema={"subject_id": pl.String, "split": pl.String, "is_included": pl.Boolean}, orient="row"
    )


def rows_of(transform: Transform, inputs: Mapping[str, pl.DataFrame], study: Protocol | None = None) -> pl.DataFrame:
    assert set(transform.inputs) <= set(inputs)
    frame = transform.compute(study or protocol(), inputs)
    assert breaches(frame, transform.table) == []
    return frame


def named(frame: pl.DataFrame) -> list[dict[str, Any]]:
    return list(frame.iter_rows(named=True))


def test_the_law_stands_at_the_declared_sizes_and_at_the_study_s_own() -> None:
    rows = named(rows_of(conformal_law, {"cohort_subject": cohort_subject(8, 30, excluded=3)}))
    assert [(r["n_calibration"], r["alpha"]) for r in rows] == [
        (n, a) for n in (8, 24, 50, 100) for a in (0.05, 0.1, 0.2)
    ]
    assert {r["n_test"] for r in rows} == {30}
    assert {r["n_calibration"] for r in rows if r["is_study_size"]} == {8}
    states = [(r["status"], r["allowed_exceedances"]) for r in rows]
    assert states[:5] == [("infeasible", -1), ("infeasible", -1), ("ok", 0), ("ok", 0), ("ok", 1)]
    assert rows[0]["reason"] == "needs 19 calibration subjects, there are 8"
    assert [r[name] for r in rows[:2] for name in LAW] == [None] * 16
    urn = urn_masses(24, 1, 30)
    assert rows[4]["beta_exceedance_mean"] == rows[4]["betabinomial_exceedance_mean"] == 0.08
    assert rows[4]["beta_within_alpha"] == pytest.approx(float(beta_mass_below(24, 1, TENTH)))
    assert rows[4]["betabinomial_within_alpha"] == pytest.approx(float(sum(urn[:4], Fraction(0))))


def test_a_study_of_a_declared_size_has_it_once() -> None:
    rows = named(rows_of(conformal_law, {"cohort_subject": cohort_subject(24, 5)}))
    assert [(r["n_calibration"], r["is_study_size"]) for r in rows[::3]] == [(24, True), (50, False), (100, False)]


def test_without_test_subjects_the_true_law_is_left() -> None:
    rows = named(rows_of(conformal_law, {"cohort_subject": cohort_subject(24, 0)}))
    assert {r["status"] for r in rows} == {"degraded"}
    assert all(r["beta_exceedance_mean"] is not None and r["betabinomial_exceedance_mean"] is None for r in rows)
    assert rows_of(exceedance_interval, {"cohort_subject": cohort_subject(24, 0)}).is_empty()


def test_an_interval_for_every_count() -> None:
    rows = named(rows_of(exceedance_interval, {"cohort_subject": cohort_subject(2, 5)}))
    assert [(r["n_subjects"], r["exceedance_count"]) for r in rows] == [(5, k) for k in range(6)]
    assert (rows[0]["exceedance_low"], rows[5]["exceedance_high"]) == (0.0, 1.0)
    assert all(r["exceedance_low"] <= r["exceedance_count"] / 5 <= r["exceedance_high"] for r in rows)


def test_the_plan_of_the_paper_s_cohort() -> None:
    rows = {r["threshold_rule_id"]: r for r in named(plan_table(24, 312, 0.10))}
    assert list(rows) == [rule.id for rule in protocol().threshold_rules if rule.alpha]
    assert {name: r["allowed_exceedances"] for name, r in rows.items() if r["rule_kind"] != "crc_label_free"} == {
        **{"crc_05": 0, "crc_10": 1, "crc_20": 4},
        **{"rcps_05": -1, "rcps_10": 0, "rcps_20": 1},
    }
    assert rows["rcps_05"]["status"] == "infeasible"
    assert rows["rcps_05"]["reason"] == "needs 45 calibration subjects, there are 24"
    assert [rows["rcps_05"][name] for name in LAW] == [None] * 8
    assert [rows[name]["smallest_n"] for name in ("crc_05", "crc_10", "crc_20")] == [19, 9, 4]
    assert [rows[name]["smallest_n"] for name in ("rcps_05", "rcps_10", "rcps_20")] == [45, 22, 11]
    assert f"{rows['crc_10']['beta_within_alpha']:.4f}" == "0.7075"
    assert rows["crc_label_free_10"]["beta_within_alpha"] == rows["crc_10"]["beta_within_alpha"]
    assert rows["rcps_10"]["beta_within_alpha"] >= 0.9  # what RCPS is for


@pytest.mark.parametrize("n", [0, 1, 4, 11, 45])
def test_the_plan_is_the_table_of_a_release(n: int) -> None:
    release = rows_of(rule_law, {"cohort_subject": cohort_subject(n, 7, excluded=2)})
    assert release.equals(plan_table(n, 7, 0.10))
    feasible = release.filter(pl.col("status") == "ok")
    assert sorted(feasible["threshold_rule_id"]) == sorted(
        release.filter(pl.col("smallest_n") <= n)["threshold_rule_id"]
    )
    assert plan_table(n, 7, 0.10).equals(plan_table(n, 7, 0.10))


def test_a_plan_of_fewer_than_no_subjects_is_refused() -> None:
    for validation, test in ((-1, 5), (5, -1)):
        with pytest.raises(ValueError, match="negative"):
            plan_table(validation, test, 0.10)


def test_universes_of_a_study() -> None:
    assert planned_universes(protocol()) == {"defensible": 15_552, "all": protocol().universe_count}
    lacking = [("voxel_volume_id", "legacy"), ("reference_id", "own_mapped"), ("support_id", "brain_in_view")]
    assert planned_universes(protocol(), lacking) == {"defensible": 15_552 // 2, "all": 155_520 // 2 // 3 * 2 // 2}
    assert planned_universes(protocol({"budgets_cm3": [20.0]}), [("budget_cm3", "20")]) == {"defensible": 0, "all": 0}
    for unknown in (("support_id", "skull"), ("no_such_axis", "brain")):
        with pytest.raises(KeyError):
            planned_universes(protocol(), [unknown])


# Splits of a cohort


METHODS = ["early", "late"]
STUDY = protocol({"budgets_cm3": [20.0, 5.0], "conformal_split_sizes": [6, 12, 30], "conformal_split_count": 40})


def critical_threshold(subjects: Sequence[str], budgets: Sequence[float], methods: Sequence[str]) -> pl.DataFrame:
    """Made-up critical thresholds, some tied, beside rows of other places that must not be read."""
    generator = np.random.Generator(np.random.PCG64(3))
    schema = ["method_id", "subject_id", "reference_id", "support_id", "voxel_volume_id", "loss", "budget_cm3"]
    places = [
        ("canonical", "brain", "true", "false_positive"),
        ("canonical", "brain", "true", "predicted_volume"),
        ("canonical", "brain", "legacy", "false_positive"),
        ("canonical", "brain_in_view", "true", "false_positive"),
        ("round_trip", "brain", "true", "false_positive"),
    ]
    rows = [
        (method, subject, *place, budget, float(np.float32(generator.integers(0, 30) / 29)))
        for method, subject, place, budget in itertools.product(methods, subjects, places, budgets)
    ]
    frame = pl.DataFrame(rows, schema=[*schema, "threshold"], orient="row")
    return frame.sample(fraction=1.0, shuffle=True, seed=1)


@pytest.fixture(scope="module")
def split_inputs() -> dict[str, pl.DataFrame]:
    subjects = cohort_subject(4, 24, excluded=2)
    ranked = [*((m, True) for m in METHODS), ("out", False)]
    return {
        "cohort_subject": subjects,
        "ranked_method": pl.DataFrame(ranked, schema=["method_id", "is_ranked"], orient="row"),
        "critical_threshold": critical_threshold(subjects["subject_id"].to_list(), [5.0, 20.0], [*METHODS, "out"]),
    }


def exceeding(critical: Sequence[np.float32], level: int) -> int:
    return len([t for t in critical if t > np.float32(level / 200)])


def exceedances_by_loops(
    inputs: Mapping[str, pl.DataFrame], method: str, n: int, alpha: Fraction, budget: float
) -> Iterator[Fraction]:
    """Exceedances on the held-out subjects, split by split, from critical thresholds and the definition of the rule."""
    included = inputs["cohort_subject"].filter((pl.col("split") == "test") & pl.col("is_included"))
    rows = inputs["critical_threshold"].filter(
        pl.col("method_id") == method, pl.col("budget_cm3") == budget, pl.col("loss") == "false_positive"
    )
    places = (
        pl.col("reference_id") == "canonical",
        pl.col("support_id") == "brain",
        pl.col("voxel_volume_id") == "true",
    )
    found: dict[str, float] = dict(rows.filter(*places).select("subject_id", "threshold").iter_rows())
    critical = [np.float32(found[subject]) for subject in sorted(included["subject_id"].to_list())]
    keys = np.random.Generator(np.random.PCG64(STUDY.parameters.seed)).random((40, len(critical)))
    for row in keys.tolist():
        order = sorted(range(len(critical)), key=lambda i: row[i])
        calibration, rest = [critical[i] for i in order[:n]], [critical[i] for i in order[n:]]
        level = next(k for k in range(201) if Fraction(exceeding(calibration, k) + 1, n + 1) <= alpha)
        yield Fraction(exceeding(rest, level), len(rest))


def test_split_rows_equal_loops_over_the_definition(split_inputs: dict[str, pl.DataFrame]) -> None:
    frame = rows_of(conformal_split, split_inputs, STUDY)
    key = ("method_id", "n_calibration", "alpha", "budget_cm3")
    assert frame.select(key).rows() == list(itertools.product(METHODS, (6, 12, 30), (0.05, 0.1, 0.2), (5.0, 20.0)))
    for row in named(frame):
        method, n, alpha, budget = (row[name] for name in key)
        exact = {0.05: Fraction(1, 20), 0.1: TENTH, 0.2: FIFTH}[alpha]
        j, numbers = (
            allowed_by_crc(n, exact),
            [row[name] for name in row if name.startswith(("split_e", "split_w", "b"))],
        )
        assert row["allowed_exceedances"] == j
        if n == 30 or j < 0:
            assert (row["status"], row["split_count"]) == ("unavailable" if n == 30 else "infeasible", 0)
            assert row["reason"] and numbers[1:] == [None] * 8
            continue
        assert (row["status"], row["reason"], row["split_count"], row["n_test"]) == ("ok", None, 40, 24 - n)
        shares = list(exceedances_by_loops(split_inputs, method, n, exact, budget))
        assert row["split_exceedance_mean"] == pytest.approx(float(sum(shares, Fraction(0)) / 40), rel=1e-14)
        assert row["split_within_alpha"] == sum(share <= exact for share in shares) / 40
        low, high = np.quantile([float(share) for share in shares], [0.025, 0.975])
        assert (row["split_exceedance_low"], row["split_exceedance_high"]) == pytest.approx((low, high), rel=1e-12)
        law = betabinomial(n, j, 24 - n)
        assert row["betabinomial_exceedance_high"] == law.quantile(0.975)
        assert row["betabinomial_within_alpha"] == law.within(exact)


def test_splits_do_not_depend_on_the_order_of_rows(split_inputs: dict[str, pl.DataFrame]) -> None:
    turned = {name: frame.reverse() for name, frame in split_inputs.items()}
    assert rows_of(conformal_split, turned, STUDY).equals(rows_of(conformal_split, split_inputs, STUDY))


def test_a_method_without_some_critical_thresholds_says_so(split_inputs: dict[str, pl.DataFrame]) -> None:
    full = split_inputs["critical_threshold"]
    is_gone = (pl.col("method_id") == "late") & (pl.col("budget_cm3") == 5.0) & (pl.col("subject_id") == "s009")
    frame = rows_of(conformal_split, {**split_inputs, "critical_threshold": full.filter(~is_gone)}, STUDY)
    gone = (pl.col("method_id") == "late") & (pl.col("budget_cm3") == 5.0) & (pl.col("n_calibration") < 30)
    assert set(frame.filter(gone)["reason"]) == {"critical thresholds are there for 23 of 24 test subjects"}
    assert set(frame.filter(gone)["status"]) == {"unavailable"}
    usual = rows_of(conformal_split, split_inputs, STUDY)
    assert frame.filter(~gone).equals(usual.filter(~gone))


@pytest.mark.parametrize(
    ("test", "states"), [(0, {"unavailable"}), (1, {"unavailable"}), (9, {"degraded", "infeasible"})]
)
def test_a_small_cohort_is_split_in_half_or_not_at_all(test: int, states: set[str]) -> None:
    subjects = cohort_subject(3, test)
    inputs = {
        "cohort_subject": subjects,
        "ranked_method": pl.DataFrame({"method_id": METHODS, "is_ranked": [True, True]}),
        "critical_threshold": critical_threshold(subjects["subject_id"].to_list(), [5.0, 20.0], METHODS),
    }
    frame = rows_of(conformal_split, inputs, STUDY)
    assert set(frame.filter(pl.col("n_calibration") != 30)["status"]) == states | (
        {"unavailable"} if test == 9 else set()
    )
    half = frame.filter(pl.col("status") == "degraded")
    assert set(half["n_calibration"]) == ({4} if test == 9 else set())
    assert frame.height == 2 * 2 * 3 * (4 if test == 9 else 3)


def test_large_splits_of_continuous_scores_follow_the_law_for_any_number_of_held_out_subjects() -> None:
    """2,000 splits against the exact law: the same bounds as for simulated calibration sets, here p is 1e-6."""
    cohort, n, j, splits = 201, 24, 1, 2_000
    levels = np.random.Generator(np.random.PCG64(2)).permutation(cohort).astype(np.uint8)
    [counts] = held_out_exceedances(levels, draw_calibration(cohort, n, splits, 11), [j])
    law, band = betabinomial(n, j, cohort - n), math.sqrt(math.log(2 / 1e-6) / 2 / splits)
    for k in range(0, cohort - n + 1, 3):
        assert np.mean(counts <= k) == pytest.approx(float(law.cumulative[k]), abs=band)
    spread = law.mean * (1 - law.mean) / (n + 2) * (1 + (n + 1) / (cohort - n))
    assert counts.mean() / (cohort - n) == pytest.approx(law.mean, abs=5 * math.sqrt(spread / splits))


# A measured lake


@pytest.fixture(scope="module")
def marts(phantom_lake: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """The conformal marts of the phantom, with what they read and nothing else."""
    connection = open_for_building(None, phantom_lake)
    build_tables(connection, read_manifest(phantom_lake), ["conformal_rule", "conformal_split", "conformal_law"])
    yield connection
    connection.close()


def test_on_a_lake_the_grid_rule_is_the_order_statistic_of_critical_thresholds(
    marts: duckdb.DuckDBPyConnection,
) -> None:
    places = ("method_id", "reference_id", "support_id", "voxel_volume_id", "budget_cm3")
    critical = marts.sql(
        "select c.* from critical_threshold as c join cohort_subject as s using (subject_id)"
        " where s.split = 'validation' and s.is_included"
    ).pl()
    chosen = marts.sql(
        f"select {', '.join(places)}, rule_kind, allowed_exceedances, level from threshold_choice"
        " join calibration_rule using (threshold_rule_id) where allowed_exceedances >= 0"
    ).pl()
    by_place = {key: frame["threshold"].sort().to_list() for key, frame in critical.group_by(*places, "loss")}
    expected: list[int] = []
    for row in named(chosen):
        loss = "predicted_volume" if row["rule_kind"] == "crc_label_free" else "false_positive"
        ordered = by_place[*(row[name] for name in places), loss]
        statistic = np.float32(ordered[len(ordered) - row["allowed_exceedances"] - 1])
        expected.append(next(k for k in range(201) if np.float32(k / 200) >= statistic))
    assert set(chosen["rule_kind"]) == {"crc", "rcps", "crc_label_free"}
    assert len(set(expected)) > 10
    assert chosen["level"].to_list() == expected


def test_on_a_lake_every_conformal_rule_has_its_row(marts: duckdb.DuckDBPyConnection) -> None:
    rows = named(marts.sql("select * from conformal_rule").pl())
    methods = marts.sql("select method_id from ranked_method where is_ranked").pl()["method_id"].to_list()
    keys = {(r["method_id"], r["threshold_rule_id"], r["budget_cm3"]) for r in rows}
    rules = [rule.id for rule in protocol().threshold_rules if rule.alpha]
    assert len(keys) == len(rows)
    assert keys == set(itertools.product(methods, rules, protocol().parameters.budgets_cm3))
    stands = {r["threshold_rule_id"] for r in rows if r["status"] == "ok"}
    assert stands == {"crc_10", "crc_20", "rcps_20", "crc_label_free_10", "crc_label_free_20"}


def test_on_a_lake_an_infeasible_rule_has_a_reason_and_no_number(marts: duckdb.DuckDBPyConnection) -> None:
    rows = named(marts.sql("select * from conformal_rule where status <> 'ok'").pl())
    numbers = ("threshold", "exceedance", "exceedance_low", "exceedance_high", "controlled_exceedance", "dice_mean")
    numbers += ("burden_cm3_mean", "burden_exceedance_count", "betabinomial_exceedance_mean")
    assert rows
    for row in rows:
        assert row["status"] == "infeasible"
        assert row["reason"] == f"needs {row['smallest_n']} validation subjects, the cohort has 11"
        assert row["allowed_exceedances"] == -1
        assert [row[name] for name in numbers] == [None] * len(numbers)


def test_on_a_lake_rules_show_what_test_subjects_do_at_their_threshold(marts: duckdb.DuckDBPyConnection) -> None:
    curve = marts.sql(
        "select c.method_id, c.threshold, c.predicted_voxels, c.true_positive_voxels, c.reference_voxels, s.voxel_mm3"
        " from threshold_curve as c join cohort_subject as s using (subject_id)"
        " where s.split = 'test' and s.is_included and c.postprocess_id = 'plain'"
        " and c.reference_id = 'canonical' and c.support_id = 'brain'"
        " and c.voxel_volume_id = 'true'"
    ).pl()
    at: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for point in named(curve):
        at.setdefault((point["method_id"], point["threshold"]), []).append(point)
    exceed: set[float] = set()
    for row in named(marts.sql("select * from conformal_rule where status = 'ok'").pl()):
        points, budget = at[row["method_id"], row["threshold"]], row["budget_cm3"]
        volumes = [p["predicted_voxels"] * p["voxel_mm3"] / 1000 for p in points]
        burdens = [(p["predicted_voxels"] - p["true_positive_voxels"]) * p["voxel_mm3"] / 1000 for p in points]
        dice = [
            2 * p["true_positive_voxels"] / (p["predicted_voxels"] + p["reference_voxels"])
            for p in points
            if p["reference_voxels"]
        ]
        count, volume_count = sum(b > budget for b in burdens), sum(v > budget for v in volumes)
        exceed.add(count / len(points))
        assert (row["n_subjects"], row["n_dice"]) == (len(points), len(dice))
        assert (row["burden_exceedance_count"], row["volume_exceedance_count"]) == (count, volume_count)
        assert row["exceedance"] == count / len(points)
        is_label_free = row["rule_kind"] == "crc_label_free"
        assert row["controlled_exceedance"] == (volume_count if is_label_free else count) / len(points)
        assert row["burden_cm3_mean"] == pytest.approx(sum(burdens) / len(points))
        assert row["dice_mean"] == pytest.approx(sum(dice) / len(dice))
        interval = proportion_confint(count, len(points), alpha=0.05, method="beta")
        assert (row["exceedance_low"], row["exceedance_high"]) == pytest.approx(interval)
        law = betabinomial(11, row["allowed_exceedances"], len(points))
        assert row["betabinomial_exceedance_mean"] == law.mean
        assert row["betabinomial_exceedance_low"] == law.quantile(0.025)
        assert row["betabinomial_exceedance_high"] == law.quantile(0.975)
    assert len(exceed) > 1


def test_on_a_lake_splits_of_all_subjects_follow_the_definition(marts: duckdb.DuckDBPyConnection) -> None:
    subjects = marts.sql("select subject_id, 'test' as split, true as is_included from cohort_subject").pl()
    study = protocol({"conformal_split_sizes": [4], "conformal_split_count": 50})
    inputs = {
        "cohort_subject": subjects,
        "ranked_method": marts.sql("select * from ranked_method").pl(),
        "critical_threshold": marts.sql("select * from critical_threshold").pl(),
    }
    frame = rows_of(conformal_split, inputs, study).filter(pl.col("alpha") == 0.2)
    assert set(frame["status"]) == {"ok"}
    drawn = draw_calibration(subjects.height, 4, 50, study.parameters.seed)
    names = sorted(subjects["subject_id"].to_list())
    counts = marts.sql(
        "select c.method_id, b.budget_cm3, c.level, c.subject_id, c.burden_cm3 > b.budget_cm3 as exceeds"
        " from subject_curve as c cross join budget as b where c.postprocess_id = 'plain'"
        " and c.reference_id = 'canonical' and c.support_id = 'brain' and c.voxel_volume_id = 'true'"
    ).pl()
    for (method, budget), part in counts.group_by("method_id", "budget_cm3"):
        loss = part.sort("level", "subject_id")["exceeds"].to_numpy().reshape(201, len(names))
        shares: list[float] = []
        for row in drawn:
            level = int(np.argmax(loss[:, row].sum(axis=1) == 0))  # four subjects at alpha 0.20: none may exceed
            shares.append(loss[level].sum() / (len(names) - 4))
        [found] = named(frame.filter((pl.col("method_id") == method) & (pl.col("budget_cm3") == budget)))
        assert found["split_exceedance_mean"] == pytest.approx(np.mean(shares))
        assert found["split_within_alpha"] == np.mean([share <= 0.2 for share in shares])


def test_on_a_lake_the_released_splits_are_a_state_where_the_cohort_is_tiny(
    marts: duckdb.DuckDBPyConnection,
) -> None:
    rows = named(marts.sql("select * from conformal_split").pl())
    assert {(r["n_calibration"], r["status"]) for r in rows} == {
        (2, "infeasible"),
        (24, "unavailable"),
        (50, "unavailable"),
        (100, "unavailable"),
    }
    assert all(r["reason"] and r["split_exceedance_mean"] is None for r in rows)


def test_on_a_lake_the_checks_beside_the_rules_hold(marts: duckdb.DuckDBPyConnection) -> None:
    checks = known_marts()["conformal_rule"].checks
    assert len(checks) == 2
    for check in checks:
        broken = f"select * from conformal_rule where not ({check.condition})"
        assert marts.sql(broken).pl().is_empty(), check.condition


def test_without_test_subjects_a_rule_keeps_its_threshold_and_says_why_it_shows_nothing(
    marts: duckdb.DuckDBPyConnection,
) -> None:
    mart = known_marts()["conformal_rule"]
    inputs = {name: marts.sql(f"select * from {name}").pl() for name in mart.inputs}
    usual = {
        tuple(row[name] for name in mart.table.key): row
        for row in named(marts.sql("select * from conformal_rule").pl())
    }
    nobody = {
        "operating_point": inputs["operating_point"].clear(),
        "exceedance_curve": inputs["exceedance_curve"].filter(pl.col("split") == "validation"),
        "rule_law": plan_table(11, 0, 0.10),
        "exceedance_interval": rows_of(exceedance_interval, {"cohort_subject": cohort_subject(11, 0)}),
    }
    with duckdb.connect() as bare:
        for name, frame in {**inputs, **nobody}.items():
            bare.register(name, frame)
        rows = named(bare.sql(mart.sql).pl())
    assert len(rows) == len(usual)
    for row in rows:
        before = usual[tuple(row[name] for name in mart.table.key)]
        assert (row["threshold"], row["n_subjects"]) == (before["threshold"], 0)
        assert [row[name] for name in ("exceedance", "exceedance_low", "burden_cm3_mean", "dice_mean")] == [None] * 4
        state = ("unavailable", "the cohort has no test subject")
        assert (row["status"], row["reason"]) == (
            state if before["status"] == "ok" else (before["status"], before["reason"])
        )
