"""Firth's regression against closed forms and a general optimiser; the states of what cannot be fitted."""

import itertools
import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from expectations.protocol import protocol
from transforms.determinants import TERMS, Estimate, determinant, firth, fit_firth, gee, penalised_likelihood
from transforms.resampling import Floats

Lesion = tuple[str, int, float, float | None, bool]


@given(table=st.tuples(*[st.integers(0, 12)] * 4).filter(lambda t: t[0] + t[1] > 0 and t[2] + t[3] > 0))
@settings(deadline=None, max_examples=60)
def test_of_two_groups_the_log_odds_are_those_of_half_a_lesion_more_in_every_cell(table: tuple[int, ...]) -> None:
    a, b, c, d = table  # hit and missed lesions of two groups, separated groups among them
    group = np.repeat([1.0, 1.0, 0.0, 0.0], table)
    hit = np.repeat([1.0, 0.0, 1.0, 0.0], table)
    weights, _ = fit_firth(np.column_stack([np.ones(len(group)), group]), hit)
    expected = math.log((a + 0.5) / (b + 0.5)) - math.log((c + 0.5) / (d + 0.5))
    assert weights[1] == pytest.approx(expected, abs=1e-6)
    assert weights[0] == pytest.approx(math.log((c + 0.5) / (d + 0.5)), abs=1e-6)


def random_lesions(seed: int, lesions: int = 60) -> tuple[Floats, Floats, Floats]:
    generator = np.random.default_rng(seed)
    covariates = generator.normal(size=(lesions, 3))
    subjects = np.sort(generator.integers(0, 12, lesions)).astype(np.float64)
    effect = generator.normal(size=12)[subjects.astype(int)] * 0.5
    hit = generator.random(lesions) < 1 / (1 + np.exp(-(covariates @ [1.0, 0.5, 0.0] + effect)))
    return covariates, hit.astype(np.float64), subjects


@pytest.mark.parametrize("seed", range(4))
def test_maximum_and_profile_are_those_of_a_general_optimiser(seed: int) -> None:
    covariates, hit, _ = random_lesions(seed)
    design = np.column_stack([np.ones(len(hit)), covariates])

    def best(place: int | None = None, value: float = 0.0) -> tuple[Floats, float]:
        free = [k for k in range(4) if k != place]

        def loss(weights: Floats) -> float:
            whole = np.zeros(4)
            whole[free] = weights
            if place is not None:
                whole[place] = value
            return -penalised_likelihood(design, hit, whole)[0]

        found = optimize.minimize(
            loss, np.zeros(len(free)), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 20000}
        )
        return found.x, -float(found.fun)

    weights, likelihood = best()
    estimate = firth(covariates, hit, 0.95)
    assert estimate.log_odds == pytest.approx(weights[1:], abs=1e-5)
    floor = likelihood - stats.chi2.ppf(0.95, 1) / 2
    for place in range(3):
        for end in (estimate.low[place], estimate.high[place]):
            assert best(place + 1, float(end))[1] == pytest.approx(floor, abs=1e-5)
        assert estimate.low[place] < estimate.log_odds[place] < estimate.high[place]


def test_under_separation_firth_stays_finite_and_the_equations_say_so() -> None:
    covariate = np.linspace(-1, 1, 20)[:, None]
    hit = (covariate[:, 0] > 0).astype(np.float64)
    estimate = firth(covariate, hit, 0.95)
    assert np.isfinite(estimate.log_odds).all() and 0 < estimate.low[0] < estimate.log_odds[0]
    assert np.isnan(estimate.high[0])  # the data set no upper end
    silent = gee(covariate, hit, np.repeat(np.arange(5.0), 4), 0.95)
    assert np.isnan(silent.log_odds).all() and silent.reason


def assert_no_search_climbs_above_the_ends(covariates: Floats, hit: Floats, found: Estimate) -> None:
    """At an end the profile is at its floor: no start of a search without gradients climbs above it there."""
    design = np.column_stack([np.ones(len(hit)), covariates])
    maximum, best = fit_firth(design, hit)
    floor = best - stats.chi2.ppf(0.95, 1) / 2
    for place, end in [(k + 1, e) for ends in (found.low, found.high) for k, e in enumerate(ends) if np.isfinite(e)]:
        free = [k for k in range(len(maximum)) if k != place]

        def loss(weights: Floats, free: list[int] = free, place: int = place, end: float = float(end)) -> float:
            whole = np.zeros(len(maximum))
            whole[free], whole[place] = weights, end
            return -penalised_likelihood(design, hit, whole)[0]

        highest = -np.inf
        for scale, turn in itertools.product((1.0, end / maximum[place]), (1.0, -1.0)):
            start = maximum[free] * abs(scale) * np.array([1.0] + [turn] * (len(free) - 1))
            search = optimize.minimize(loss, start, method="Nelder-Mead", options={"maxiter": 600, "xatol": 1e-7})
            highest = max(highest, -float(search.fun))
        assert highest <= floor + 1e-4


@pytest.mark.parametrize(
    ("seed", "lesions", "share"), [(1, 12, 0.5), (2, 30, 0.1), (3, 40, 0.9), (29, 9, 0.1), (846, 8, 0.5)]
)
def test_ends_near_separation_are_those_of_a_wider_search(seed: int, lesions: int, share: float) -> None:
    generator = np.random.default_rng(seed)
    covariates = generator.normal(size=(lesions, 2)) * [1, 3]
    hit = (covariates[:, 0] + generator.normal(size=lesions) * 0.1 > np.quantile(covariates[:, 0], share)).astype(float)
    assert 0 < hit.sum() < lesions
    scaled = (covariates - covariates.mean(axis=0)) / covariates.std(axis=0)
    found = firth(scaled, hit, 0.95)
    assert not (found.low >= found.log_odds).any() and not (found.log_odds >= found.high).any()
    assert_no_search_climbs_above_the_ends(scaled, hit, found)


def frame(rows: list[Lesion]) -> pl.DataFrame:
    return pl.DataFrame(
        [("m", s, k, v, c, k / 100, 0.5 * hit, 3, hit) for k, (s, _, v, c, hit) in enumerate(rows)],
        schema={
            **{"method_id": pl.String, "subject_id": pl.String, "lesion_id": pl.Int64, "volume_mm3": pl.Float64},
            **{"mean_contrast": pl.Float64, "relative_position": pl.Float64, "matched_iou": pl.Float64},
            **{"overlap_voxels": pl.Int64, "is_detected": pl.Boolean},
        },
        orient="row",
    )


def lesions(seed: int, contrast: bool = True, hits: bool | None = None) -> list[Lesion]:
    covariates, hit, subjects = random_lesions(seed)
    return [
        (f"s{int(s):02}", k, float(np.exp(v)), float(c) if contrast else None, bool(h) if hits is None else hits)
        for k, (s, (v, c, _), h) in enumerate(zip(subjects, covariates, hit, strict=True))
    ]


def by_covariate(rows: list[Lesion]) -> dict[tuple[str, str], dict[str, object]]:
    result = determinant.compute(protocol(), {"lesion": frame(rows)}).to_dicts()
    return {(str(row["regression"]), str(row["covariate"])): row for row in result}


def test_both_regressions_of_every_covariate_stand_beside_their_numbers() -> None:
    found = by_covariate(lesions(1))
    assert found.keys() == {(name, term) for name in ("firth", "gee") for term in TERMS}
    for row in found.values():
        assert row["status"] == "ok" and row["reason"] is None
        assert row["lesion_total"] == 60 and row["n_subjects"] == len({s for s, *_ in lesions(1)})
    size = [found[name, "log_volume"]["log_odds"] for name in ("firth", "gee")]
    assert size[0] == pytest.approx(size[1], abs=0.5)


def test_what_cannot_be_fitted_is_a_state_with_a_reason() -> None:
    without = by_covariate(lesions(1, contrast=False))
    assert without["gee", "contrast"]["status"] == "unavailable"
    assert without["gee", "log_volume"]["status"] == "degraded"
    assert without["gee", "log_volume"]["reason"] == "fitted without contrast"
    for hits, counted in ((True, "60 of 60"), (False, "0 of 60")):
        rows = by_covariate(lesions(1, hits=hits)).values()
        assert {row["status"] for row in rows} == {"unavailable"}
        assert all(str(row["reason"]).startswith(counted) and row["log_odds"] is None for row in rows)
    few = by_covariate(lesions(1)[:3])
    assert {row["status"] for row in few.values()} == {"unavailable"}
    assert determinant.compute(protocol(), {"lesion": frame([])}).is_empty()
