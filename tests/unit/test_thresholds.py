import math
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from typing import cast

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expectations.protocol import Protocol, ThresholdRule, override_problems, protocol
from expectations.tables import breaches
from transforms.thresholds import allowed_by_crc, allowed_by_rcps, calibration_rule, smallest_count, upper_bound

proportion = import_module("statsmodels.stats.proportion")
proportion_confint = cast(Callable[..., tuple[float, float]], proportion.proportion_confint)

ALPHAS = [Fraction(1, 20), Fraction(1, 10), Fraction(1, 5)]
DELTA = 0.10
RULES = {rule.id: rule for rule in protocol().threshold_rules}
SMALLEST = {
    "crc_05": 19,
    "crc_10": 9,
    "crc_20": 4,
    "crc_label_free_05": 19,
    "crc_label_free_10": 9,
    "crc_label_free_20": 4,
    "rcps_05": 45,
    "rcps_10": 22,
    "rcps_20": 11,
}


def crc_by_definition(count: int, alpha: Fraction) -> int:
    """The largest k of 0..n with (k + 1) / (n + 1) <= alpha; -1 where even k = 0 is too many."""
    return max((k for k in range(count + 1) if Fraction(k + 1, count + 1) <= alpha), default=-1)


def rcps_by_definition(count: int, alpha: Fraction, delta: Fraction) -> int:
    """The largest k of which a binomial at rate alpha shows no more with probability at most delta, in fractions.

    That the Clopper-Pearson bound of k among n is at most alpha says just this.
    """
    allowed, below = -1, Fraction(0)
    for k in range(count):
        below += math.comb(count, k) * alpha**k * (1 - alpha) ** (count - k)
        if below > delta:
            return allowed
        allowed = k
    return allowed


@pytest.mark.parametrize("alpha", ALPHAS)
def test_crc_allows_what_its_definition_allows(alpha: Fraction) -> None:
    for count in range(61):
        assert max(allowed_by_crc(count, alpha), -1) == crc_by_definition(count, alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_crc_is_exact_where_alpha_times_n_plus_1_is_whole(alpha: Fraction) -> None:
    for whole in range(1, 7):
        count = whole * alpha.denominator - 1
        assert allowed_by_crc(count, alpha) == whole - 1
        assert allowed_by_crc(count - 1, alpha) == whole - 2


@given(count=st.integers(0, 500), alpha=st.fractions(0, 1, max_denominator=60))
def test_crc_at_any_level(count: int, alpha: Fraction) -> None:
    assert allowed_by_crc(count, alpha) == crc_by_definition(count, alpha)


def test_crc_at_the_sizes_of_the_paper() -> None:
    found = {count: allowed_by_crc(count, Fraction(1, 10)) for count in (24, 50, 100)}
    assert found == {24: 1, 50: 4, 100: 9}  # Beta(j + 1, n - j): Beta(2, 23), Beta(5, 46), Beta(10, 91)


@given(exceedances=st.integers(0, 80), more=st.integers(0, 80), delta=st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.5]))
def test_the_upper_bound_is_that_of_statsmodels(exceedances: int, more: int, delta: float) -> None:
    count = max(exceedances + more, 1)
    _, expected = proportion_confint(exceedances, count, alpha=2 * delta, method="beta")
    assert upper_bound(exceedances, count, delta) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("count", [1, 2, 10])
def test_the_upper_bound_of_all_is_one_and_of_none_has_a_closed_form(count: int) -> None:
    assert upper_bound(count, count, DELTA) == 1.0
    assert upper_bound(0, count, DELTA) == pytest.approx(1 - DELTA ** (1 / count), rel=1e-12)


def test_the_upper_bound_of_nobody_is_one() -> None:
    assert upper_bound(0, 0, DELTA) == 1.0


@pytest.mark.parametrize("alpha", ALPHAS)
def test_rcps_allows_what_its_definition_allows(alpha: Fraction) -> None:
    for count in range(0, 130):
        assert allowed_by_rcps(count, alpha, DELTA) == rcps_by_definition(count, alpha, Fraction(1, 10))


@settings(deadline=None)
@given(
    count=st.integers(0, 80),
    alpha=st.sampled_from([Fraction(1, 20), Fraction(1, 7), Fraction(1, 3), Fraction(9, 10)]),
    delta=st.sampled_from([Fraction(1, 1000), Fraction(1, 20), Fraction(3, 10), Fraction(1, 2)]),
)
def test_rcps_at_any_confidence(count: int, alpha: Fraction, delta: Fraction) -> None:
    assert allowed_by_rcps(count, alpha, float(delta)) == rcps_by_definition(count, alpha, delta)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_more_subjects_never_allow_fewer_exceedances_and_rcps_never_more_than_crc(alpha: Fraction) -> None:
    crc = [allowed_by_crc(count, alpha) for count in range(200)]
    rcps = [allowed_by_rcps(count, alpha, DELTA) for count in range(200)]
    assert crc == sorted(crc)
    assert rcps == sorted(rcps)
    assert all(strict <= loose for strict, loose in zip(rcps, crc, strict=True))


@pytest.mark.parametrize(("rule_id", "count"), SMALLEST.items())
def test_the_fewest_subjects_of_each_rule(rule_id: str, count: int) -> None:
    assert smallest_count(RULES[rule_id], DELTA) == count


@pytest.mark.parametrize("rule_id", [rule.id for rule in RULES.values() if rule.alpha is None])
def test_a_rule_that_is_not_conformal_has_no_fewest_subjects(rule_id: str) -> None:
    with pytest.raises(ValueError, match=rule_id):
        smallest_count(RULES[rule_id], DELTA)


@given(alpha=st.fractions(Fraction(1, 60), Fraction(59, 60), max_denominator=60))
def test_the_fewest_subjects_of_crc_at_any_level(alpha: Fraction) -> None:
    rule = ThresholdRule(id="x", kind="crc", alpha=str(alpha))
    expected = next(count for count in range(100) if crc_by_definition(count, alpha) >= 0)
    assert smallest_count(rule, DELTA) == expected


@settings(deadline=None)
@given(rule_id=st.sampled_from(["rcps_05", "rcps_10", "rcps_20"]), permille=st.integers(1, 500))
def test_the_fewest_subjects_of_rcps_at_any_confidence(rule_id: str, permille: int) -> None:
    alpha = RULES[rule_id].exact_alpha or Fraction(0)
    expected = next(count for count in range(1, 200) if (1 - alpha) ** count <= Fraction(permille, 1000))
    assert smallest_count(RULES[rule_id], permille / 1000) == expected


@pytest.mark.parametrize("delta", [0.0, 1e-100, 1e-17, 0.5, 0.9, 1.0])
def test_every_confidence_that_a_study_may_set_has_its_fewest_subjects(delta: float) -> None:
    if override_problems({"rcps_delta": delta}):
        with pytest.raises(ValueError, match="rcps_delta"):
            protocol({"rcps_delta": delta})
    else:
        expected = next(count for count in range(1, 10_000) if 0.9**count <= delta)
        assert smallest_count(RULES["rcps_10"], delta) == expected


def cohort(validation: int, test: int = 3, excluded: int = 0) -> pl.DataFrame:
    rows = [("validation", True)] * validation + [("test", True)] * test + [("validation", False)] * excluded
    return pl.DataFrame(rows, schema={"split": pl.String, "is_included": pl.Boolean}, orient="row")


def calibrated(frame: pl.DataFrame, study: Protocol | None = None) -> dict[str, dict[str, object]]:
    rows = calibration_rule.compute(study or protocol(), {"cohort_subject": frame})
    assert breaches(rows, calibration_rule.table) == []
    return {str(row["threshold_rule_id"]): row for row in rows.iter_rows(named=True)}


def test_every_rule_has_a_row_in_declared_order() -> None:
    rows = calibrated(cohort(24))
    assert list(rows) == list(RULES)
    assert [row["position"] for row in rows.values()] == list(range(len(RULES)))
    assert [row["rule_kind"] for row in rows.values()] == [rule.kind for rule in RULES.values()]


def test_only_included_validation_subjects_calibrate() -> None:
    rows = calibrated(cohort(24, test=7, excluded=5))
    assert {row["n_calibration"] for row in rows.values()} == {24}


@pytest.mark.parametrize("count", [0, 3, 4, 9, 18, 19, 24, 45, 60])
def test_rows_hold_the_allowed_exceedances_or_the_reason(count: int) -> None:
    for rule_id, row in calibrated(cohort(count)).items():
        rule = RULES[rule_id]
        if rule.exact_alpha is None:
            assert (row["alpha"], row["allowed_exceedances"]) == (None, None)
            continue
        is_rcps = rule.kind == "rcps"
        definition = rcps_by_definition(count, rule.exact_alpha, Fraction(1, 10)) if is_rcps else None
        allowed = crc_by_definition(count, rule.exact_alpha) if definition is None else definition
        assert row["alpha"] == float(rule.exact_alpha)
        assert row["allowed_exceedances"] == allowed
        needed = f"needs {SMALLEST[rule_id]} validation subjects, the cohort has {count}"
        assert row["reason"] == (None if allowed >= 0 else needed)


def test_without_validation_subjects_and_too_few_to_cross_fit_the_validation_rule_says_so() -> None:
    rows = calibrated(cohort(0, test=1))
    needed = "the cohort has no validation subject, and cross-fitting needs 2 test subjects: it has 1"
    assert rows["validation"]["reason"] == needed
    for rule_id in ("test_matched", "fixed_50", "subject_optimum"):
        assert rows[rule_id]["reason"] is None
    assert calibrated(cohort(1, test=1))["validation"]["reason"] is None
    assert calibrated(cohort(0, test=2))["validation"]["reason"] is None


def test_rules_that_use_the_budget() -> None:
    without = {rule_id for rule_id, row in calibrated(cohort(24)).items() if not row["uses_budget"]}
    assert without == {"fixed_50", "subject_optimum"}


def test_the_confidence_of_a_study_reaches_rcps_alone() -> None:
    usual, strict = calibrated(cohort(40)), calibrated(cohort(40), protocol({"rcps_delta": 0.01}))
    assert {rule_id for rule_id in RULES if usual[rule_id] != strict[rule_id]} == {"rcps_05", "rcps_10", "rcps_20"}
    assert strict["rcps_10"]["reason"] == "needs 44 validation subjects, the cohort has 40"
