"""How many exceedances a calibration set may show: exact arithmetic for CRC, a binomial bound for RCPS.

Sources: conformal risk control (Angelopoulos et al., 2022, arXiv:2208.02814); risk-controlling prediction sets (Bates
et al., 2021, doi:10.1145/3478535); the Clopper-Pearson bound (1934, doi:10.1093/biomet/26.4.404).
"""

import math
from fractions import Fraction

import polars as pl
from scipy import stats

from expectations.protocol import Parameters, Protocol, ThresholdRule
from transforms.catalog import Inputs, declared


def allowed_by_crc(count: int, alpha: Fraction) -> int:
    """Exceedances that CRC allows among `count` calibration subjects: floor(alpha (n + 1)) - 1, negative if infeasible.

    >>> allowed_by_crc(24, Fraction(1, 10)), allowed_by_crc(9, Fraction(1, 10)), allowed_by_crc(8, Fraction(1, 10))
    (1, 0, -1)
    """
    return math.floor(alpha * (count + 1)) - 1


def allowed_by_rcps(count: int, alpha: Fraction, delta: float) -> int:
    """Exceedances whose Clopper-Pearson upper bound (confidence 1 - delta) keeps alpha; -1 if not even none does.

    >>> allowed_by_rcps(22, Fraction(1, 10), 0.10), allowed_by_rcps(21, Fraction(1, 10), 0.10)
    (0, -1)
    """
    allowed = -1
    while allowed + 1 < count and upper_bound(allowed + 1, count, delta) <= float(alpha):
        allowed += 1
    return allowed


def upper_bound(exceedances: int, count: int, delta: float) -> float:
    """One-sided Clopper-Pearson upper bound of a proportion at confidence 1 - delta."""
    if exceedances >= count:
        return 1.0
    return float(stats.beta.isf(delta, exceedances + 1, count - exceedances))


def _allowed(rule: ThresholdRule, count: int, delta: float) -> int | None:
    if rule.exact_alpha is None:
        return None
    if rule.kind == "rcps":
        return allowed_by_rcps(count, rule.exact_alpha, delta)
    return allowed_by_crc(count, rule.exact_alpha)


def smallest_count(rule: ThresholdRule, delta: float) -> int:
    """The fewest calibration subjects for which a conformal rule is feasible.

    Raises:
        ValueError: The rule is not conformal.
    """
    if rule.exact_alpha is None:
        raise ValueError(f"{rule.id} is no conformal rule")
    if rule.kind == "rcps":  # no exceedance among n keeps alpha once (1 - alpha)^n <= delta
        first = math.ceil(math.log(delta) / math.log1p(-float(rule.exact_alpha))) - 1
        return next(n for n in range(max(first, 1), first + 3) if allowed_by_rcps(n, rule.exact_alpha, delta) >= 0)
    return math.ceil(1 / rule.exact_alpha) - 1


def crossfit_folds(n_validation: int, n_test: int, parameters: Parameters) -> int | None:
    """How many folds of test subjects the validation rule is cross-fitted over, as the mart `crossfit_fold` deals them.

    Returns:
        As many as subjects where each is left out in turn; None with a validation subject, or too few test subjects.
    """
    if n_validation > 0 or n_test < 2:
        return None
    return n_test if n_test <= parameters.crossfit_leave_one_out_limit else min(parameters.crossfit_folds, n_test)


@declared(
    name="calibration_rule",
    row="One row per threshold rule: how many of the validation subjects may exceed a budget.",
    key=("threshold_rule_id",),
    columns=("rule_kind", "position", "uses_budget", "alpha?", "n_calibration", "allowed_exceedances?", "reason?"),
    inputs=("cohort_subject",),
)
def calibration_rule(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Rules with their allowed exceedances for the validation subjects at hand.

    Without any, the validation rule is cross-fitted over the test subjects (mart `crossfit_threshold`).
    """
    cohort = inputs["cohort_subject"]
    included = cohort.filter("is_included").get_column("split").to_list()
    count, test = included.count("validation"), included.count("test")
    delta = protocol.parameters.rcps_delta
    rows: list[tuple[object, ...]] = []
    for position, rule in enumerate(protocol.threshold_rules):
        allowed = _allowed(rule, count, delta)
        alpha = None if rule.exact_alpha is None else float(rule.exact_alpha)
        reason = None
        if allowed is not None and allowed < 0:
            reason = f"needs {smallest_count(rule, delta)} validation subjects, the cohort has {count}"
        elif rule.kind == "validation" and count == 0 and crossfit_folds(count, test, protocol.parameters) is None:
            reason = f"the cohort has no validation subject, and cross-fitting needs 2 test subjects: it has {test}"
        rows.append((rule.id, rule.kind, position, rule.uses_budget, alpha, count, allowed, reason))
    return calibration_rule.table.frame(rows)
