"""Means over the lesions of resampled cohorts, against lesions that are written out subject by subject."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expectations.protocol import protocol
from transforms.local_contrast import lesion_means, local_contrast_interval
from transforms.resampling import draw

SUBJECTS = 5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SUBJECTS - 1), st.floats(0, 1)), min_size=1, max_size=12), st.integers(0, 99))
def test_means_are_those_of_repeated_subjects(lesions: list[tuple[int, float]], seed: int) -> None:
    resample = draw(SUBJECTS, 20, seed)
    subject, values = np.array([s for s, _ in lesions]), np.array([value for _, value in lesions])
    found = lesion_means(resample, subject, values)
    for counts, mean in zip(resample.counts.tolist(), found.tolist(), strict=True):
        repeated = [value for s, value in lesions for _ in range(counts[s])]
        assert mean == pytest.approx(np.mean(repeated) if repeated else np.nan, abs=1e-12, nan_ok=True)
    order = np.random.default_rng(seed).permutation(len(lesions))
    assert np.array_equal(lesion_means(resample, subject[order], values[order]), found, equal_nan=True)


def test_lesions_of_one_subject_have_no_interval() -> None:
    rows = [
        ("a", "all", 0, 0.4, 0.5),
        ("a", "all", 2, 0.8, 0.6),
        ("a", "small", 2, 0.8, 0.6),
        ("a", "small", 2, 0.1, 0.2),
    ]
    names = ["method_id", "size_class", "subject", "local_auroc", "local_average_precision"]
    given_rows = {
        "test_subject": pl.DataFrame({"subject_id": ["1", "2", "3"]}),
        "evidence": pl.DataFrame(rows, schema=names, orient="row"),
    }
    found = local_contrast_interval.compute(protocol({"contrast_replicates": 500}), given_rows)
    (row,) = found.to_dicts()
    assert (row["method_id"], row["size_class"]) == ("a", "all")
    assert (row["local_auroc_mean_low"], row["local_auroc_mean_high"]) == pytest.approx((0.4, 0.8), abs=1e-12)
    assert 450 < row["n_replicates"] < 500  # one in 27 takes the subject without a lesion three times
