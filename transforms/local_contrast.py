"""Intervals of the mean local AUROC and average precision of lesions, over resampled cohorts (protocol, sections 4, 9).

Lesions of one subject are not independent: a replicate takes subjects, each with all its lesions, from the draws that
all contrasts share. Every lesion counts once wherever its subject is taken, so a mean is a ratio of two sums.
"""

import numpy as np
import polars as pl

from expectations.protocol import Protocol
from transforms.catalog import Inputs, declared
from transforms.contrasts import nullable
from transforms.replicates import SUBJECT_QUERY, TEST_SUBJECT, numbers
from transforms.resampling import Floats, Integers, Resample, divided, draw, exact, interval

MEASURES = ("local_auroc", "local_average_precision")
QUERIES = {
    "test_subject": SUBJECT_QUERY,
    "evidence": f"""
        with {TEST_SUBJECT},
        long as (
            select
                e.method_id, t.subject, e.lesion_id, e.local_auroc, e.local_average_precision,
                unnest(['all', l.size_class]) as size_class
            from lesion_evidence as e
            join lesion_size as l using (subject_id, lesion_id)
            join test_subject as t using (subject_id)
            join ranked_method as m on m.method_id = e.method_id and m.is_ranked
            where e.local_auroc is not null
        )
        from long
        where size_class is not null
        order by method_id, size_class, subject, lesion_id""",
}


@declared(
    name="local_contrast_interval",
    row="One row per method and size class: intervals of the mean local AUROC and average precision over test lesions.",
    key=("method_id", "size_class"),
    columns=(*(f"{measure}_mean_{end}?" for measure in MEASURES for end in ("low", "high")), "n_replicates"),
    inputs=("cohort_subject", "ranked_method", "lesion_evidence", "lesion_size"),
    queries=QUERIES,
)
def local_contrast_interval(protocol: Protocol, inputs: Inputs) -> pl.DataFrame:
    """Percentile intervals; `n_replicates` counts those that take a subject with a lesion of the class.

    No row where the lesions of a class are all one subject's: how subjects differ is unknown then, and an interval of
    no width would hide it. No rows without test subjects, or where no lesion was measured.
    """
    parameters = protocol.parameters
    resample = draw(inputs["test_subject"].height, parameters.contrast_replicates, parameters.seed)
    rows: list[tuple[object, ...]] = []
    for key, part in inputs["evidence"].group_by("method_id", "size_class", maintain_order=True):
        subject = numbers(part, "subject").astype(np.int64)
        if len(np.unique(subject)) < 2:
            continue
        means = np.stack([lesion_means(resample, subject, numbers(part, name)) for name in MEASURES])
        low, high, defined = interval(means[:, 1:], parameters.interval_level)
        ends = np.stack([low, high], axis=1).ravel()
        rows.append((*key, *nullable(ends), int(defined[0])))
    return local_contrast_interval.table.frame(rows)


def lesion_means(resample: Resample, subject: Integers, values: Floats) -> Floats:
    """Mean over the lesions of each resampled cohort.

    Args:
        resample: Replicates of the subjects.
        subject: Position of each lesion's subject.
        values: A value in [0, 1] for each lesion.

    Returns:
        One mean per replicate; NaN where it takes no subject with a lesion.
    """
    subjects = resample.shape[1]
    lesions = np.bincount(subject, minlength=subjects)
    rounded = exact(values, subjects * int(lesions.max(initial=1)))
    return divided(resample.sums(np.bincount(subject, rounded, subjects)), resample.sums(lesions))
