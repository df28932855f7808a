"""What makes a lesion detectable: hits regressed on the lesion's volume, contrast and place (protocol, section 9).

Two models of the same lesions: logistic regression with Firth's penalty, which stays finite under separation, with
profile intervals (Firth, 1993, doi:10.1093/biomet/80.1.27; Heinze & Schemper, 2002, doi:10.1002/sim.1047); and
generalised estimating equations with an exchangeable correlation within subjects and robust errors (Liang & Zeger,
1986, doi:10.1093/biomet/73.1.13).
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy import optimize, stats
from scipy.special import expit

from expectations.protocol import Protocol
from transforms.catalog import Inputs, declared
from transforms.resampling import Floats

TERMS = ("log_volume", "contrast", "relative_position")
COLUMNS = {"log_volume": pl.col("volume_mm3").log(), "contrast": pl.col("mean_contrast")}
STEPS = 200  # of the estimating equations
SEPARATED = 30.0  # log odds per standard deviation: who needs more to fit has covariates that separate the hits


@dataclass(frozen=True)
class Estimate:
    """Log odds of each covariate with its interval; all NaN where they cannot be had, and then why."""

    log_odds: Floats
    low: Floats
    high: Floats
    reason: str | None = None


def penalised_likelihood(design: Floats, hit: Floats, weights: Floats) -> tuple[float, Floats]:
    """Log likelihood of a logistic model plus half the log determinant of its information (Jeffreys' prior).

    Args:
        design: Lesions x covariates, an intercept among them.
        hit: 0 or 1 per lesion.
        weights: Log odds per covariate.

    Returns:
        The value and its gradient; minus infinity and zeros where the information is singular to machine precision.
    """
    linear = design @ weights
    probability = expit(linear)
    variance = probability * (1 - probability)
    information = (design * variance[:, None]).T @ design
    sign, log_determinant = np.linalg.slogdet(information) if information.any() else (0.0, -np.inf)
    if not sign > 0:
        return -np.inf, np.zeros(len(weights))
    leverage = variance * (np.linalg.solve(information, design.T).T * design).sum(axis=1)
    value = hit @ linear - np.logaddexp(0, linear).sum() + 0.5 * log_determinant
    return float(value), design.T @ (hit - probability + leverage * (0.5 - probability))


def fit_firth(
    design: Floats, hit: Floats, fixed: dict[int, float] | None = None, start: Floats | None = None
) -> tuple[Floats, float]:
    """Maximise the penalised likelihood.

    Args:
        design: Lesions x covariates, an intercept among them.
        hit: 0 or 1 per lesion.
        fixed: Covariates (by position) that are held at a value.
        start: Log odds to start from; zero without.

    Returns:
        Log odds per covariate, and the penalised log likelihood there.
    """
    weights = np.zeros(design.shape[1]) if start is None else start.copy()
    for place, value in (fixed or {}).items():
        weights[place] = value
    free = [place for place in range(len(weights)) if place not in (fixed or {})]

    def loss(values: Floats) -> tuple[float, Floats]:
        weights[free] = values
        value, gradient = penalised_likelihood(design, hit, weights)
        return -value, -gradient[free]

    with np.errstate(divide="ignore", invalid="ignore"):  # a step too far ends where the likelihood is none
        found = optimize.minimize(loss, weights[free], jac=True, method="BFGS", options={"gtol": 1e-8})
    weights[free] = found.x
    return weights, -float(found.fun)


def firth(covariates: Floats, hit: Floats, level: float) -> Estimate:
    """Firth's logistic regression with profile likelihood intervals.

    Args:
        covariates: Lesions x covariates, standardised; an intercept is added.
        hit: 0 or 1 per lesion.
        level: Coverage of the intervals.

    Returns:
        Log odds with their intervals; an end is NaN where the likelihood knows none within `SEPARATED`.
    """
    design = np.column_stack([np.ones(len(hit)), covariates])
    weights, best = fit_firth(design, hit)
    drop = stats.chi2.ppf(level, 1) / 2
    ends = np.array([_profile(design, hit, place, weights, best - drop) for place in range(1, len(weights))])
    return Estimate(weights[1:], ends[:, 0], ends[:, 1])


def _profile(design: Floats, hit: Floats, place: int, maximum: Floats, floor: float) -> tuple[float, float]:
    """Where the profile of one covariate falls to a floor on both sides of its maximum; NaN beyond `SEPARATED`.

    Near separation the profile is flat, and the other covariates have several local maxima along it: on the way out
    each point is climbed from several starts, the last point stretched and with every other covariate turned round;
    between two points, from both.
    """

    def climbed(value: float, starts: Sequence[Floats]) -> tuple[Floats, float]:
        found = [fit_firth(design, hit, {place: value}, start) for start in starts]
        weights, likelihood = max(found, key=lambda one: one[1] if np.isfinite(one[1]) else -np.inf)
        return weights, likelihood - floor if np.isfinite(likelihood) else -1.0  # far out the information is singular

    others = [other for other in range(1, len(maximum)) if other != place]
    turns = [np.where(np.arange(len(maximum)) == other, -1.0, 1.0) for other in others]

    def crossing(inside: float, outside: float, starts: Sequence[Floats]) -> float:
        return float(optimize.brentq(lambda value: climbed(value, starts)[1], inside, outside, xtol=1e-6))

    def end(direction: float) -> float:
        inside, near, reach = float(maximum[place]), maximum, 0.5
        while abs(inside) < SEPARATED:
            outside = direction * min(direction * inside + reach, SEPARATED)
            far = near * (outside / inside if outside * inside > 0 else 1.0)
            weights, above = climbed(outside, [maximum, near, far, *(turn * far for turn in turns)])
            if above <= 0:
                return crossing(inside, outside, [near, weights])
            inside, near, reach = outside, weights, 2 * reach
        return np.nan

    return end(-1.0), end(1.0)


def gee(covariates: Floats, hit: Floats, subjects: Floats, level: float) -> Estimate:
    """Generalised estimating equations: binomial, exchangeable within subjects, robust errors, Wald intervals.

    Args:
        covariates: Lesions x covariates, standardised; an intercept is added.
        hit: 0 or 1 per lesion.
        subjects: A number per subject.
        level: Coverage of the intervals.
    """
    from statsmodels.genmod.cov_struct import Exchangeable
    from statsmodels.genmod.families import Binomial
    from statsmodels.genmod.generalized_estimating_equations import GEE

    design = np.column_stack([np.ones(len(hit)), covariates])
    nothing = np.full(covariates.shape[1], np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they warn of is asked below
        try:
            fit = GEE(hit, design, subjects, family=Binomial(), cov_struct=Exchangeable()).fit(maxiter=STEPS)
        except (np.linalg.LinAlgError, ValueError, ZeroDivisionError) as error:
            return Estimate(nothing, nothing, nothing, f"the equations have no solution: {error}")
    found, half = fit.params[1:], stats.norm.ppf((1 + level) / 2) * fit.bse[1:]
    if not fit.converged or not np.isfinite([*found, *half]).all() or np.abs(found).max() > SEPARATED:
        return Estimate(nothing, nothing, nothing, "the equations do not converge: the covariates separate the hits")
    return Estimate(found, found - half, found + half)


@declared(
    name="determinant",
    row="One row per method, regression and covariate: how the odds of detecting a lesion change with one standard "
    "deviation of it.",
    key=("method_id", "regression", "covariate"),
    columns=(
        *("log_odds?", "log_odds_low?", "log_odds_high?", "detected_count", "lesion_total", "n_subjects"),
        *("status", "reason?"),
    ),
    inputs=("lesion_detection", "ranked_method"),
    queries={
        "lesion": """
            select d.*
            from lesion_detection as d
            join ranked_method as m using (method_id)
            where m.kind <> 'baseline'
            order by m.position, d.subject_id, d.lesion_id""",
    },
)
def determinant(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Both regressions for every method, not for baselines; covariates are standardised over the method's lesions."""
    rows: list[tuple[object, ...]] = []
    lesions = inputs["lesion"].with_columns(**COLUMNS)
    for part in lesions.partition_by("method_id", maintain_order=True):
        rows += _method_rows(part, protocol.parameters.interval_level)
    return determinant.table.frame(rows)


def _method_rows(lesions: pl.DataFrame, level: float) -> Iterator[tuple[object, ...]]:
    method = lesions.item(0, "method_id")
    present = [term for term in TERMS if lesions.get_column(term).null_count() == 0]
    present = [term for term in present if lesions.get_column(term).n_unique() > 1]
    hit = lesions.get_column("is_detected").to_numpy().astype(np.float64)
    subjects = lesions.get_column("subject_id").rank("dense").to_numpy().astype(np.float64)
    counts = (int(hit.sum()), len(hit), lesions.get_column("subject_id").n_unique())
    reason = _unfit(counts, len(present))
    covariates = lesions.select(present).to_numpy()
    scaled = (covariates - covariates.mean(axis=0)) / covariates.std(axis=0)
    for name in ("firth", "gee"):
        nothing = np.full(len(present), np.nan)
        if reason:
            found = Estimate(nothing, nothing, nothing, reason)
        else:
            found = firth(scaled, hit, level) if name == "firth" else gee(scaled, hit, subjects, level)
        for term in TERMS:
            if term not in present:
                missing = f"{term.replace('_', ' ')} is not known for every lesion, or the same for all"
                yield (method, name, term, None, None, None, *counts, "unavailable", missing)
                continue
            place = present.index(term)
            values = [float(part[place]) for part in (found.log_odds, found.low, found.high)]
            numbers = [None if np.isnan(value) else value for value in values]
            status, why = _status(found, present, is_open=None in numbers)
            yield (method, name, term, *numbers, *counts, status, why)


def _status(found: Estimate, present: Sequence[str], *, is_open: bool) -> tuple[str, str | None]:
    """Status and reason of one covariate's row; an interval is open where the hits are nearly separated."""
    if found.reason:
        return "unavailable", found.reason
    lacking = [term.replace("_", " ") for term in TERMS if term not in present]
    reasons = [f"fitted without {' and '.join(lacking)}"] if lacking else []
    reasons += [f"the interval has no end within {SEPARATED:g}: the covariates nearly separate the hits"] * is_open
    return ("degraded", "; ".join(reasons)) if reasons else ("ok", None)


def _unfit(counts: tuple[int, int, int], covariates: int) -> str | None:
    """Why nothing can be fitted, if so: all lesions alike, or too few of them."""
    detected, lesions, subjects = counts
    if detected in (0, lesions):
        return f"{detected} of {lesions} lesions are detected: there is nothing to explain"
    if lesions <= covariates + 1 or subjects < 2:
        return f"{lesions} lesions of {subjects} subjects are too few for {covariates} covariates"
    return None if covariates else "no covariate varies"
