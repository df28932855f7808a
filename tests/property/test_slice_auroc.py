"""Adjusted slice AUROC against twins that write every comparison out."""

from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.interpolate import LSQUnivariateSpline

from expectations.protocol import Protocol, protocol
from ingest.manifest import read_manifest
from transforms.slices import (
    Placement,
    Profile,
    area_quintile,
    borrowed_auroc,
    caliper_placement,
    covariate_splines,
    spline_placement,
    strata_placement,
)

Array = NDArray[Any]
FAST = settings(deadline=None, max_examples=80)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A few subjects of a few slices, with many ties in score and area."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = sum(sizes)
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    position = np.concatenate([np.linspace(0, 1, size) if size > 1 else np.zeros(1) for size in sizes])
    return Profile(
        score=generator.choice([0.0, 0.1, 0.5, 0.9], n),
        positive=generator.random(n) < draw(st.sampled_from([0.2, 0.5, 0.9])),
        area=generator.integers(1, 8, n).astype(np.float64),
        position=position,
        start=start,
    )


def subjects_of(profile: Profile) -> list[slice]:
    return [slice(int(a), int(b)) for a, b in zip(profile.start[:-1], profile.start[1:], strict=True)]


def higher(negatives: Array, score: float) -> float:
    return float((negatives > score).mean() + (negatives == score).mean() / 2)


def same(placement: Placement, totals: list[float], counts: list[int]) -> None:
    assert placement.total.tolist() == pytest.approx(totals, abs=1e-12)
    assert placement.matched.tolist() == counts


@FAST
@given(profile=profiles())
def test_within_strata(profile: Profile) -> None:
    stratum = area_quintile(profile)
    totals, counts = list[float](), list[int]()
    for part in subjects_of(profile):
        edges = [np.quantile(profile.area[part], q) for q in (0.2, 0.4, 0.6, 0.8)]
        own = [sum(edge < area for edge in edges) for area in profile.area[part]]
        assert stratum[part].tolist() == own
        placed: list[float] = []
        for k, stratum_k in enumerate(own):
            rivals = [j for j, s in enumerate(own) if s == stratum_k and not profile.positive[part][j]]
            if profile.positive[part][k] and rivals:
                placed.append(higher(profile.score[part][rivals], profile.score[part][k]))
        totals.append(sum(placed))
        counts.append(len(placed))
    same(strata_placement(profile, stratum), totals, counts)


@FAST
@given(profile=profiles(), width=st.sampled_from([0.05, 0.2, 0.6, 5.0]), uses_position=st.booleans())
def test_within_calipers(profile: Profile, width: float, uses_position: bool) -> None:
    covariates = [profile.area, profile.position] if uses_position else [profile.area]
    scaled = np.array([c / c.std() if c.std() > 0 else 0 * c for c in covariates])
    totals, counts = list[float](), list[int]()
    for part in subjects_of(profile):
        positive, score, place = profile.positive[part], profile.score[part], scaled[:, part]
        placed: list[float] = []
        for k in np.flatnonzero(positive):
            apart = np.abs(place - place[:, [k]])
            inside = ~positive & (apart <= width).all(axis=0)
            if inside.any():
                distance = np.where(inside, (apart**2).sum(axis=0), np.inf)
                placed.append(higher(score[distance == distance.min()], score[k]))
        totals.append(sum(placed))
        counts.append(len(placed))
    same(caliper_placement(profile, width, uses_position), totals, counts)


@FAST
@given(profile=profiles(), donors=st.integers(1, 6))
def test_borrowed_profiles(profile: Profile, donors: int) -> None:
    parts = subjects_of(profile)
    area = [float(profile.area[part].mean()) for part in parts]
    found = borrowed_auroc(profile, donors)
    for target, part in enumerate(parts):
        others = sorted((abs(area[k] - area[target]), k) for k in range(len(parts)) if k != target)[:donors]
        values: list[float] = []
        for _, donor in others:
            shared = min(part.stop - part.start, parts[donor].stop - parts[donor].start)
            lent, labels = profile.score[parts[donor]][:shared], profile.positive[part][:shared]
            if labels.any() and not labels.all():
                values.append(1 - float(np.mean([higher(lent[~labels], score) for score in lent[labels]])))
        assert found[target] == pytest.approx(np.mean(values) if values else np.nan, nan_ok=True, abs=1e-12)


def smooth(seed: int) -> Profile:
    generator = np.random.default_rng(seed)
    n, subjects = 200, 5
    area, position = generator.uniform(10, 90, n), generator.uniform(0, 1, n)
    start = np.linspace(0, n, subjects + 1).astype(np.int64)
    return Profile(generator.random(n), generator.random(n) < 0.3, area, position, start)


def test_a_score_that_is_a_covariate_is_worth_nothing_once_adjusted() -> None:
    profile = smooth(1)
    known = Profile(profile.area, profile.positive, profile.area, profile.position, profile.start)
    placement = spline_placement(known, covariate_splines(known))
    assert placement.total == pytest.approx(placement.matched / 2)
    exact = caliper_placement(
        Profile(known.score, known.positive, np.round(known.area / 20), known.position, known.start), 1e-9
    )
    assert exact.matched.sum() > 0


def test_the_spline_is_the_least_squares_spline_of_the_negatives() -> None:
    profile = smooth(2)
    flat = Profile(profile.score, profile.positive, profile.area, np.zeros(200), profile.start)
    order = np.argsort(profile.area)
    negative = order[~profile.positive[order]]
    knots = np.quantile(profile.area, [0.25, 0.5, 0.75])
    bounds = (float(profile.area.min()), float(profile.area.max()))
    spline = LSQUnivariateSpline(profile.area[negative], profile.score[negative], knots, bbox=bounds, k=3)
    residual = profile.score - spline(profile.area)
    expected = strata_placement(
        Profile(residual, profile.positive, profile.area, profile.position, profile.start), np.zeros(200, np.int64)
    )
    assert spline_placement(flat, covariate_splines(flat)).total == pytest.approx(expected.total, abs=1e-6)


@pytest.mark.parametrize("kind", ["no subject", "no positive", "no negative", "constant"])
def test_what_cannot_be_placed_is_not_matched(kind: str) -> None:
    n = 0 if kind == "no subject" else 6
    positive = np.full(n, kind == "no negative")
    if kind == "constant":
        positive[:2] = True
    start = np.array([0, n], np.int64) if n else np.array([0], np.int64)
    profile = Profile(np.zeros(n), positive, np.ones(n), np.zeros(n), start)
    for placement in (
        strata_placement(profile, area_quintile(profile)),
        caliper_placement(profile, 0.2),
        spline_placement(profile, covariate_splines(profile)),
    ):
        matched = 2 if kind == "constant" else 0
        assert placement.matched.sum() == matched and placement.total.sum() == matched / 2


@pytest.fixture(scope="module")
def study(phantom_lake: Any) -> Protocol:
    return protocol(read_manifest(phantom_lake).overrides)


def test_the_marts_agree_on_slices(phantom_marts: duckdb.DuckDBPyConnection) -> None:
    pairs = phantom_marts.sql(
        "select s.value, m.value from slice_auroc as s join slice_metric as m on m.method_id = s.scorer_id"
        " and m.support_id = s.support_id and m.aggregation_id = s.aggregation_id and m.reference_id = 'canonical'"
        " and m.metric_id = case s.estimator_id when 'marginal' then 'slice_auroc' else 'slice_aroc' end"
        " where s.slice_summary = 'score_max' and s.estimator_id in ('marginal', 'area_quintile')"
    ).fetchall()
    assert len(pairs) == 6 * 2 * 3 * 2  # methods and baselines, supports, aggregations, estimators
    for adjusted, metric in pairs:
        assert adjusted == pytest.approx(metric, abs=1e-12)


def test_every_scorer_stands_with_its_numbers(phantom_marts: duckdb.DuckDBPyConnection, study: Protocol) -> None:
    rows = phantom_marts.sql("from slice_auroc").pl().to_dicts()
    estimators = {row["estimator_id"] for row in rows}
    assert {f"area_caliper_{width:g}" for width in study.parameters.slice_calipers_sd} < estimators
    controls = [row for row in rows if row["slice_summary"] == "control"]
    assert {row["scorer_id"] for row in controls} == {"brain_area", "central_position"}
    assert {row["support_id"] for row in controls} == {"brain"}
    for row in rows:
        assert row["n_subjects"] <= 4 and (row["value"] is None) == (row["n_subjects"] == 0)
        assert (row["matched_fraction"] == 1) or row["estimator_id"] not in ("marginal", "borrowed")
        if row["aggregation_id"] != "median" and row["value"] is not None:
            assert row["value_low"] - 1e-9 <= row["value"] <= row["value_high"] + 1e-9, row
