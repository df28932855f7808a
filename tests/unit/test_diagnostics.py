"""Power of the diagnostics: rank correlations against scipy, and power where the answer is known."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from expectations.protocol import protocol
from transforms.diagnostics import (
    CORRUPTIONS,
    Case,
    Draws,
    anti_location_rates,
    diagnostic_power,
    draw_cohorts,
    exchanged_count,
    measure_power,
    rank_correlations,
)

spearmanr: Any = import_module("scipy.stats").spearmanr

Floats = NDArray[np.float64]
RATE = 0.05
FEW = st.sampled_from([0.1, 0.2, 0.5, 0.7])


def case(declared: Sequence[float], benign: Sequence[float], corrupted: Sequence[float], partial: bool = False) -> Case:
    return Case(np.array(declared), np.array(benign), np.array(corrupted), partial)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(FEW, FEW, st.integers(0, 3)), min_size=2, max_size=8))
def test_rank_correlations_are_scipy_s_over_the_repeated_subjects(items: list[tuple[float, float, int]]) -> None:
    first, second = np.array([i[0] for i in items]), np.array([i[1] for i in items])
    counts = np.array([[i[2] for i in items], [1] * len(items)])
    for row, found in zip(counts, rank_correlations(first, second, counts), strict=True):
        one, other = np.repeat(first, row), np.repeat(second, row)
        if np.unique(one).size < 2 or np.unique(other).size < 2:
            assert math.isnan(found)
        else:
            assert found == pytest.approx(spearmanr(one, other).statistic, abs=1e-12)


def test_draws_are_scipy_s_sample_too() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random(20), rng.random(20)
    draws = draw_cohorts(20, 35, 50, seed=4)
    assert draws.index.shape == (50, 35)
    found = rank_correlations(first, second, draws.counts())
    expected = [spearmanr(first[row], second[row]).statistic for row in draws.index]
    assert found == pytest.approx(np.array(expected), abs=1e-12)


def test_the_first_places_are_exchanged() -> None:
    draws = Draws(np.array([[2, 0, 2], [1, 1, 0]]), subjects=3)
    assert draws.counts().tolist() == [[1, 0, 2], [1, 2, 0]]
    assert draws.counts_exchanged(2).tolist() == [[0, 0, 1, 1, 0, 1], [1, 0, 0, 0, 2, 0]]
    declared, exchanged = np.array([0.9, 0.4, 0.8]), np.array([0.1, 0.9, 0.3])
    partial = case(declared.tolist(), declared.tolist(), exchanged.tolist(), partial=True)
    # cohort one reads 2 and 0 exchanged (0.3, 0.1) and 2 as it is (0.8); cohort two 1 exchanged twice, and 0 as it is
    assert partial.under_corruption("anti_location", draws, 2).tolist() == [2 / 3, 0.0]
    [first, _] = partial.under_corruption("rank_stability", draws, 2)
    assert first == pytest.approx(spearmanr([0.8, 0.9, 0.8], [0.3, 0.1, 0.8]).statistic)


def test_an_auroc_of_a_half_is_no_anti_location() -> None:
    counts = np.array([[1, 1, 1, 1], [0, 0, 4, 0], [0, 1, 3, 0]])
    assert anti_location_rates(np.array([0.5, 0.2, 0.9, 0.49]), counts).tolist() == [0.5, 0.0, 0.25]


@pytest.mark.parametrize(("size", "count"), [(30, 2), (60, 3), (312, 16), (10, 2), (2, 2), (1, 1), (50, 3), (49, 2)])
def test_five_percent_of_the_ids_are_two_at_least(size: int, count: int) -> None:
    assert exchanged_count(size, 0.05) == count


def simulated(count: int = 40, seed: int = 1) -> tuple[Floats, Floats]:
    """AUROC of the declared maps, and of a re-export that moves each a little."""
    rng = np.random.default_rng(seed)
    declared = rng.uniform(0.6, 0.95, count)
    return declared, declared + rng.normal(0, 0.01, count)


def test_ranks_that_are_turned_round_are_always_found() -> None:
    declared, benign = simulated()
    turned = Case(declared, benign, 1 - declared, is_partial=False)
    power = measure_power(turned, "rank_stability", draw_cohorts(40, 30, 400, 1), 0, RATE)
    assert power is not None
    assert power.power == 1 and power.has_spread
    assert power.false_alarm_rate == pytest.approx(RATE, abs=1 / 400)
    assert 0.9 < power.decision_threshold < 1


def test_a_corruption_that_does_nothing_is_found_as_often_as_a_false_alarm() -> None:
    declared, benign = simulated()
    draws = draw_cohorts(40, 30, 1000, 1)
    nothing = measure_power(Case(declared, benign, benign, is_partial=False), "rank_stability", draws, 0, RATE)
    assert nothing is not None and nothing.power == nothing.false_alarm_rate
    located = np.concatenate([[0.3, 0.4], declared])
    unchanged = Case(located, located, located, is_partial=False)
    nothing = measure_power(unchanged, "anti_location", draw_cohorts(42, 30, 1000, 1), 0, RATE)
    assert nothing is not None and nothing.power == nothing.false_alarm_rate <= RATE


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_power_of_anti_location_is_that_of_a_binomial(share: float) -> None:
    """Without anti-located subjects the threshold is 0: a cohort of n shows a share q with power 1 - (1 - q)^n."""
    count, size, cohorts = 100, 30, 4000
    declared = np.linspace(0.6, 0.9, count)
    corrupted = declared.copy()
    corrupted[: round(share * count)] = 0.2
    power = measure_power(
        Case(declared, declared, corrupted, is_partial=False),
        "anti_location",
        draw_cohorts(count, size, cohorts, 2),
        0,
        RATE,
    )
    assert power is not None
    assert (power.decision_threshold, power.false_alarm_rate, power.has_spread) == (0.0, 0.0, False)
    expected = 1 - (1 - share) ** size
    assert power.power == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / cohorts))


def test_anti_location_must_exceed_what_is_there_without_corruption() -> None:
    """A tenth is anti-located anyway: the threshold is the binomial's 95th percentile, and power its tail beyond."""
    count, size, cohorts = 100, 60, 4000
    declared, corrupted = np.full(count, 0.8), np.full(count, 0.8)
    declared[:10], corrupted[:25] = 0.3, 0.3
    power = measure_power(
        Case(declared, declared, corrupted, is_partial=False),
        "anti_location",
        draw_cohorts(count, size, cohorts, 3),
        0,
        RATE,
    )
    assert power is not None
    limit = int(stats.binom.ppf(0.95, size, 0.1))
    assert power.decision_threshold == pytest.approx(limit / size)
    expected = float(stats.binom.sf(limit, size, 0.25))
    assert power.power == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / cohorts))
    assert power.false_alarm_rate == pytest.approx(float(stats.binom.sf(limit, size, 0.1)), abs=0.02)


def test_equal_values_have_no_rank_to_correlate() -> None:
    flat = case([0.7] * 5, [0.7] * 5, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert measure_power(flat, "rank_stability", draw_cohorts(5, 30, 100, 1), 0, RATE) is None


PARAMETERS = {"multiverse_replicates": 200, "diagnostic_sample_sizes": [5, 30]}


def computed(
    aurocs: Mapping[str, Sequence[float | None]], benign: str | None, methods: Sequence[str] = ("m",)
) -> pl.DataFrame:
    """Rows for one measured method, from its AUROC by variant and subject."""
    rows = [
        ("m", f"s{number:03d}", variant_id, value)
        for variant_id, values in aurocs.items()
        for number, value in enumerate(values)
        if value is not None
    ]
    frames = {
        "auroc": pl.DataFrame(rows, ["method_id", "subject_id", "variant_id", "value"], orient="row"),
        "benign_reexport": pl.DataFrame(
            [("m", benign)] if benign else [], {"method_id": pl.String, "variant_id": pl.String}, orient="row"
        ),
        "method": pl.DataFrame({"method_id": methods}),
    }
    return diagnostic_power.compute(protocol(PARAMETERS), frames)


def test_rows_for_every_diagnostic_corruption_and_size() -> None:
    declared, benign = simulated(12)
    turned = (1 - declared).tolist()
    aurocs = {"declared": declared.tolist(), "nearest": benign.tolist(), "exchanged": turned}
    aurocs |= {variant_id: turned for variant_id in CORRUPTIONS if variant_id != "ids_permuted"}
    rows = computed(aurocs, "nearest", methods=("m", "unmeasured"))
    assert rows.height == 2 * 2 * len(CORRUPTIONS) * 3
    assert rows.select("diagnostic_id", "method_id", "variant_id", "sample_id").is_unique().all()
    missing = rows.filter(pl.col("method_id") == "unmeasured")
    assert missing.get_column("status").unique().to_list() == ["unavailable"]
    assert missing.get_column("power").null_count() == missing.height
    flips = rows.filter(
        (pl.col("method_id") == "m")
        & (pl.col("variant_id") == "transpose")
        & (pl.col("diagnostic_id") == "rank_stability")
    ).sort("sample_size")
    assert flips.get_column("sample_size").to_list() == [5, 12, 30]
    assert flips.get_column("status").to_list() == ["ok", "ok", "degraded"]
    assert flips.get_column("observed").to_list() == pytest.approx([-1, -1, -1])
    assert flips.get_column("power").to_list()[1:] == [1, 1]
    assert flips.get_column("benign_variant_id").unique().to_list() == ["nearest"]
    found = min(size for size, power in flips.select("sample_size", "power").iter_rows() if power >= 0.95)
    assert flips.get_column("smallest_sample").unique().to_list() == [found]
    permuted = rows.filter((pl.col("method_id") == "m") & (pl.col("variant_id") == "ids_permuted"))
    assert permuted.get_column("observed").null_count() == permuted.height
    assert permuted.get_column("power").null_count() == 0


def test_subjects_without_an_auroc_are_left_out_and_too_few_say_so() -> None:
    declared, benign = simulated(6)
    some: list[float | None] = [0.1, 0.2, 0.3, 0.15, None, None]
    rows = computed({"declared": declared.tolist(), "nearest": benign.tolist(), "transpose": some}, "nearest")
    turned = rows.filter(pl.col("variant_id") == "transpose")
    assert turned.get_column("n_subjects").unique().to_list() == [4]
    few = rows.filter(pl.col("variant_id") == "flip_left_right")
    assert few.get_column("status").unique().to_list() == ["unavailable"]
    two: list[float | None] = [0.1, 0.2, None, None, None, None]
    rows = computed({"declared": declared.tolist(), "nearest": benign.tolist(), "transpose": two}, "nearest")
    [reason] = rows.filter(pl.col("variant_id") == "transpose").get_column("reason").unique()
    assert reason.startswith("2 test subjects")


def test_nothing_measured_is_unavailable() -> None:
    rows = computed({}, None)
    assert rows.height == 2 * len(CORRUPTIONS) * 3
    assert rows.get_column("status").unique().to_list() == ["unavailable"]
    assert all("--diagnostics" in reason for reason in rows.get_column("reason"))
