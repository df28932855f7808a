from importlib import import_module
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy import stats

from marts.catalog import read_mart, sql_folder
from transforms import resampling
from transforms.resampling import (
    INFEASIBLE,
    Counts,
    Floats,
    Resample,
    draw,
    exact,
    in_threads,
    interval,
    matched_levels,
    mean_burdens,
    medians,
    p_values,
    pooled_slice_auroc,
    pooled_voxel_ranking,
)

sklearn_metrics: Any = import_module("sklearn.metrics")
multitest: Any = import_module("statsmodels.stats.multitest")

FEW = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def resamples(draw_from: st.DrawFn, most: int = 9) -> Resample:
    """One to nine subjects in a few replicates; replicates may leave subjects out or take nobody."""
    shape = (draw_from(st.integers(1, 6)), draw_from(st.integers(1, most)))
    return Resample(draw_from(arrays(np.uint16, shape, elements=st.integers(0, 4))))


def repeated(counts: Counts, replicate: int) -> NDArray[np.intp]:
    """Positions of the subjects that a replicate takes, as often as it takes them."""
    taken = [place for place, count in enumerate(counts[replicate].tolist()) for _ in range(count)]
    return np.array(taken, np.intp)


@FEW
@given(subjects=st.integers(1, 12), replicates=st.integers(0, 30), seed=seeds)
def test_draws_are_the_rows_of_one_index_matrix(subjects: int, replicates: int, seed: int) -> None:
    index = np.random.Generator(np.random.PCG64(seed)).integers(0, subjects, (replicates, subjects))
    counts = draw(subjects, replicates, seed).counts
    assert counts[0].tolist() == [1] * subjects
    for replicate, row in enumerate(index):
        assert counts[replicate + 1].tolist() == np.bincount(row, minlength=subjects).tolist()


def test_a_longer_matrix_begins_with_the_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(5, 40, 7).counts
    assert np.array_equal(draw(5, 11, 7).counts, whole[:12])
    monkeypatch.setattr(resampling, "BLOCK", 7)
    assert np.array_equal(draw(5, 40, 7).counts, whole)
    assert draw(0, 3, 7).counts.shape == (4, 0)


@FEW
@given(resample=resamples(), data=st.data())
def test_sums_are_exact_in_any_order_of_subjects(resample: Resample, data: st.DataObject) -> None:
    subjects = resample.shape[1]
    values = exact(data.draw(arrays(np.float64, (2, 3, subjects), elements=st.floats(0, 1))), 4 * subjects)
    order = np.random.default_rng(data.draw(seeds)).permutation(subjects)
    sums = resample.sums(values)
    shuffled = Resample(np.ascontiguousarray(resample.counts[:, order])).sums(values[..., order])
    assert sums.tobytes() == shuffled.tobytes()
    for replicate in range(len(resample.counts)):
        taken = repeated(resample.counts, replicate)
        assert np.array_equal(sums[..., replicate], values[..., taken].sum(axis=-1))


@given(value=st.floats(0, 1), subjects=st.integers(1, 4095))
def test_rounding_is_finer_than_a_millionth_of_a_millionth(value: float, subjects: int) -> None:
    rounded = exact(np.array([value, np.nan]), subjects)
    assert abs(rounded[0] - value) <= 2.0**-41
    assert np.isnan(rounded[1])


@FEW
@given(resample=resamples(), data=st.data())
def test_medians_are_those_of_the_repeated_subjects(resample: Resample, data: st.DataObject) -> None:
    replicates, subjects = resample.shape
    tied = arrays(np.float64, (2, 3, subjects), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    values = data.draw(tied)
    choice = data.draw(arrays(np.int64, (2, replicates), elements=st.integers(INFEASIBLE, 2)))
    found = medians(resample, values, choice)
    for series, point, replicate in np.ndindex(2, 2, replicates):
        taken, level = repeated(resample.counts, replicate), choice[point, replicate]
        if level == INFEASIBLE or len(taken) == 0:
            assert np.isnan(found[series, point, replicate])
        else:
            assert found[series, point, replicate] == np.median(values[series, level, taken])


@FEW
@given(data=st.data())
def test_matched_levels_are_the_smallest_that_keep_the_budget(data: st.DataObject) -> None:
    resample = Resample(data.draw(arrays(np.uint16, (3, 4), elements=st.integers(1, 3))))
    voxels = -np.sort(-data.draw(arrays(np.int64, (6, 4), elements=st.integers(0, 40))), axis=0)
    voxels[-1] = 0
    budgets = np.array(sorted(data.draw(st.sets(st.floats(0, 0.3), min_size=1, max_size=3))))
    burdens = mean_burdens(resample, voxels, 8.0)
    for budget, levels in zip(budgets, matched_levels(burdens, budgets), strict=True):
        for replicate, level in enumerate(levels):
            taken = repeated(resample.counts, replicate)
            means = [int(row[taken].sum()) * 8.0 / 1000 / len(taken) for row in voxels]
            smallest = next(k for k, mean in enumerate(means) if mean <= budget)
            assert level == (smallest if smallest > 0 else INFEASIBLE)


@FEW
@given(resample=resamples(5), largest=st.sampled_from([3, 2**22, 2**30]), data=st.data())
def test_pooled_voxels_rank_as_the_repeated_histograms(resample: Resample, largest: int, data: st.DataObject) -> None:
    shape = (7, resample.shape[1])
    counts = st.integers(0, largest)
    positive, negative = (data.draw(arrays(np.uint32, shape, elements=counts)) for _ in range(2))
    auroc, precision = pooled_voxel_ranking(resample, positive, negative)
    for replicate in range(len(resample.counts)):
        taken = repeated(resample.counts, replicate)
        weight = np.concatenate([part[:, taken].sum(axis=1, dtype=np.float64) for part in (positive, negative)])
        label, score = np.repeat([1, 0], 7), np.tile(np.arange(7), 2)
        if weight[:7].sum() == 0:
            assert np.isnan(precision[replicate])
        else:
            expected = sklearn_metrics.average_precision_score(label, score, sample_weight=weight)
            assert precision[replicate] == pytest.approx(expected, rel=1e-12)
        if weight[:7].sum() == 0 or weight[7:].sum() == 0:
            assert np.isnan(auroc[replicate])
        else:
            expected = sklearn_metrics.roc_auc_score(label, score, sample_weight=weight)
            assert auroc[replicate] == pytest.approx(expected, rel=1e-12)


@FEW
@given(resample=resamples(5), data=st.data())
def test_pooled_slices_rank_as_the_repeated_slices(resample: Resample, data: st.DataObject) -> None:
    subjects = resample.shape[1]
    slices = data.draw(st.integers(1, 20))
    score = data.draw(arrays(np.float64, slices, elements=st.sampled_from([0.0, 0.2, 0.5, 1.0])))
    subject = data.draw(arrays(np.int64, slices, elements=st.integers(0, subjects - 1)))
    positive = data.draw(arrays(np.bool_, slices))
    found = pooled_slice_auroc(resample, score, subject, positive)
    for replicate, weights in enumerate(resample.counts):
        taken = np.repeat(np.arange(slices), weights[subject])
        if len(set(positive[taken].tolist())) < 2:
            assert np.isnan(found[replicate])
        else:
            expected = sklearn_metrics.roc_auc_score(positive[taken], score[taken])
            assert found[replicate] == pytest.approx(expected, rel=1e-12)


@FEW
@given(data=st.data(), level=st.sampled_from([0.5, 0.9, 0.95]))
def test_intervals_are_linear_quantiles_of_what_is_defined(data: st.DataObject, level: float) -> None:
    elements = st.one_of(st.floats(-1, 1), st.just(np.nan))
    values = data.draw(arrays(np.float64, (3, data.draw(st.integers(1, 30))), elements=elements))
    low, high, defined = interval(values, level)
    for row, bottom, top, count in zip(values, low, high, defined, strict=True):
        kept = row[~np.isnan(row)]
        assert count == len(kept)
        if len(kept):
            assert bottom == pytest.approx(np.quantile(kept, (1 - level) / 2), abs=1e-12)
            assert top == pytest.approx(np.quantile(kept, (1 + level) / 2), abs=1e-12)
        else:
            assert np.isnan(bottom) and np.isnan(top)


def test_no_replicate_has_no_interval() -> None:
    low, high, defined = interval(np.empty((2, 0)), 0.95)
    assert np.isnan(low).all() and np.isnan(high).all() and defined.tolist() == [0, 0]


@FEW
@given(values=arrays(np.float64, st.integers(2, 15), elements=st.floats(0, 1)), seed=seeds)
def test_percentile_intervals_are_those_of_scipy(values: Floats, seed: int) -> None:
    resample = draw(len(values), 200, seed)
    means = resample.sums(exact(values, len(values))) / len(values)
    low, high, _ = interval(means[None, 1:], 0.95)
    generator = np.random.Generator(np.random.PCG64(seed))
    peer = stats.bootstrap((values,), np.mean, n_resamples=200, method="percentile", rng=generator)
    assert low[0] == pytest.approx(peer.confidence_interval.low, abs=1e-11)
    assert high[0] == pytest.approx(peer.confidence_interval.high, abs=1e-11)


@FEW
@given(values=arrays(np.float64, (2, 20), elements=st.sampled_from([-1.0, 0.0, 0.5, np.nan])))
def test_p_values_count_replicates_on_either_side(values: Floats) -> None:
    for row, p_value in zip(values, p_values(values), strict=True):
        kept = [value for value in row.tolist() if not np.isnan(value)]
        sides = min(sum(value <= 0 for value in kept), sum(value >= 0 for value in kept))
        assert p_value == min(1.0, 2 * (1 + sides) / (len(kept) + 1)) if kept else np.isnan(p_value)


def test_results_keep_the_order_of_the_items(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in (1, 4):
        monkeypatch.setattr(resampling, "THREADS", threads)
        assert in_threads(abs, range(-20, 0)) == list(range(20, 0, -1))


@settings(max_examples=15, deadline=None)
@given(
    p_values_=st.lists(st.one_of(st.none(), st.sampled_from([0.0002, 0.01, 0.02, 0.3, 1.0])), min_size=1, max_size=12),
    split=st.integers(0, 12),
)
def test_holm_is_that_of_statsmodels_inside_each_family(p_values_: list[float | None], split: int) -> None:
    rows = [
        ("first" if place < split else "second", "a", "b", "dice", "validation", float(place), "mean", p_value)
        for place, p_value in enumerate(p_values_)
    ]
    with duckdb.connect() as connection:
        connection.execute("create table protocol as select 0.95::double as interval_level")
        connection.execute(
            "create table contrast_estimate (family text, method_a text, method_b text, metric_id text,"
            " operating_point text, budget_cm3 double, aggregation_id text, p_value double, estimate double,"
            " estimate_low double, estimate_high double, n_subjects bigint, n_replicates bigint)"
        )
        connection.executemany("insert into contrast_estimate values (?,?,?,?,?,?,?,?,0,0,0,5,10000)", rows)
        body = read_mart(sql_folder() / "paired_contrast.sql").sql
        found = connection.sql(f"select budget_cm3, p_holm, is_resolvable from ({body})").pl()
    holm = {int(row[0]): (row[1], row[2]) for row in found.iter_rows()}
    for family in (range(min(split, len(rows))), range(min(split, len(rows)), len(rows))):
        tested = [place for place in family if p_values_[place] is not None]
        if tested:
            peer = multitest.multipletests([p_values_[place] for place in tested], method="holm")[1]
            assert [holm[place][0] for place in tested] == pytest.approx(peer.tolist(), abs=1e-12)
            assert all(holm[place][1] for place in tested)
        assert all(holm[place] == (None, False) for place in family if p_values_[place] is None)
