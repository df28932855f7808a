"""A simulated lake of any size, and how long its marts take: `python tests/benchmarks/simulate_lake.py LAKE`.

No images: plausible curves that fall with the threshold, lesions, rankings, histograms and slices are drawn and written
as parts, with a manifest. A third of the subjects is validation. Every method declares a legacy voxel volume, so the
multiverse is whole. An existing lake of the same size is used again.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from expectations.protocol import protocol
from expectations.store import Part, PartStore, fingerprint, owner
from expectations.tables import lake_tables
from ingest.manifest import FILE_NAME, Manifest, read_manifest
from marts.release import build_tables, open_for_building
from transforms import TRANSFORMS

Array = NDArray[Any]

REFERENCES, SUPPORTS, VOLUMES = (
    protocol().level_ids(column) for column in ("reference_id", "support_id", "voxel_volume_id")
)
POSTPROCESSES = protocol().level_ids("postprocess_id")
DEFINITIONS = ("conn6_floor", "conn6_all", "conn26_floor", "conn26_all")
LEVELS = np.arange(201)
BINS = 4096
SLICES = 120
BRAIN_VOXELS = 1_400_000
RESAMPLING = ("replicate_level", "replicate_statistic", "contrast_estimate", "operating_interval", "gap_interval")


class Subject:
    """One subject as one method sees it: sizes from the subject's draw, quality from the method's."""

    def __init__(self, method: int, subject: int) -> None:
        size = np.random.default_rng([1, subject])
        self.voxels = int(np.clip(size.lognormal(9.5, 1.1), 40, 250_000))
        self.lesions = size.integers(1, 12)
        self.draws = np.random.default_rng([2, method, subject])
        self.skill = float(np.clip(0.5 + 0.08 * method % 0.4 + self.draws.normal(0, 0.15), 0.05, 0.95))

    def falling(self, most: float, shape: float) -> Array:
        """A count by level, from `most` at level 0 to none at level 200."""
        return np.floor(most * np.clip(1 - LEVELS / 200, 0, 1) ** shape).astype(np.int64)

    def curves(self) -> tuple[Array, Array]:
        """Predicted and true positive voxels: references x supports x volumes x post-processings x levels."""
        shape = (len(REFERENCES), len(SUPPORTS), len(VOLUMES), len(POSTPROCESSES), len(LEVELS))
        false, true = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        spread, slope = self.draws.lognormal(12.3, 0.5), 2 + 4 * self.skill
        for r, s, v, p in np.ndindex(shape[:4]):
            share = 1 - 0.04 * r - 0.02 * s - 0.2 * p - 0.01 * v * (p == 2)
            true[r, s, v, p] = self.falling(self.voxels * share, 2 - 1.5 * self.skill)
            false[r, s, v, p] = self.falling(min(spread, BRAIN_VOXELS / 2) * share**2, slope)
        return true + false, true


def long(key: Sequence[tuple[str, Sequence[Any]]], columns: dict[str, Array]) -> pl.DataFrame:
    """A frame over the product of key levels, in that order."""
    index = np.indices([len(levels) for _, levels in key]).reshape(len(key), -1)
    frame = {name: pl.Series(list(levels)).gather(place) for (name, levels), place in zip(key, index, strict=True)}
    return pl.DataFrame(frame | {name: pl.Series(values.ravel()) for name, values in columns.items()})


GRID: list[tuple[str, Sequence[Any]]] = [("reference_id", REFERENCES), ("support_id", SUPPORTS)]
CURVE_GRID = [*GRID, ("voxel_volume_id", VOLUMES), ("postprocess_id", POSTPROCESSES)]


def threshold_curve(one: Subject) -> pl.DataFrame:
    """Its curve."""
    predicted, true = one.curves()
    columns = {"predicted_voxels": predicted, "true_positive_voxels": true}
    frame = long([*CURVE_GRID, ("level", LEVELS.tolist())], columns)
    return frame.with_columns(threshold=pl.col("level") / 200, reference_voxels=pl.lit(one.voxels))


def lesion_curve(one: Subject) -> pl.DataFrame:
    """Its lesion hits."""
    shape = (*(len(levels) for _, levels in CURVE_GRID), len(DEFINITIONS), len(LEVELS))
    count = np.broadcast_to((one.lesions + np.array([0, 6, 1, 7]))[:, None], shape)
    fade = np.clip(1 - LEVELS / 200, 0, 1) ** (2 - 1.5 * one.skill) * np.array([1.0, 0.9, 0.85])[:, None, None]
    share = one.draws.uniform(0.7, 1, shape[:4])[..., None, None] * fade
    names = {"hit_any_overlap": 1.0, "hit_iou_10": 0.8, "hit_iou_25": 0.5, "hit_iou_50": 0.25}
    columns = {name: np.floor(count * share * factor).astype(np.int64) for name, factor in names.items()}
    key = [*CURVE_GRID, ("lesion_definition_id", DEFINITIONS), ("level", LEVELS.tolist())]
    return long(key, columns | {"lesion_count": count}).with_columns(threshold=pl.col("level") / 200)


def voxel_ranking(one: Subject) -> pl.DataFrame:
    """Its exact rankings."""
    shape = (len(REFERENCES), len(SUPPORTS))
    auroc = np.clip(0.6 + 0.35 * one.skill + one.draws.normal(0, 0.03, shape), 0, 1)
    precision = np.clip(one.skill * 0.7 + one.draws.normal(0, 0.05, shape), 0, 1)
    columns = {"auroc": auroc, "average_precision": precision, "tied_fraction": np.zeros(shape)}
    frame = long(GRID, columns | {"ordinal_auroc": auroc, "ordinal_average_precision": precision})
    return frame.with_columns(positive_voxels=pl.lit(one.voxels), negative_voxels=pl.lit(BRAIN_VOXELS - one.voxels))


def score_histogram(one: Subject) -> pl.DataFrame:
    """Its histograms: most bins occupied."""
    place = np.linspace(0, 1, BINS)
    low, high = np.exp(-6 * place), np.exp(-(((place - one.skill) / 0.3) ** 2))
    shape = (len(REFERENCES), len(SUPPORTS), BINS)
    negative = one.draws.poisson(low / low.sum() * (BRAIN_VOXELS - one.voxels), shape)
    positive = one.draws.poisson(high / high.sum() * one.voxels, shape)
    frame = long([*GRID, ("bin", range(BINS))], {"positive_voxels": positive, "negative_voxels": negative})
    return frame.filter(pl.col("positive_voxels") + pl.col("negative_voxels") > 0)


def slice_score(one: Subject) -> pl.DataFrame:
    """Its slices."""
    reference = np.where(np.abs(np.arange(SLICES) - 60) < 5 + one.lesions, 50, 0)
    score = np.clip(one.draws.beta(2, 3, (2, SLICES)) + 0.3 * one.skill * (reference > 0), 0, 1)
    area = 4000 + 9000 * np.sin(np.linspace(0.1, 3, SLICES))
    columns: dict[str, Array] = {"score_max": score, "score_p99": 0.9 * score, "score_mean": 0.2 * score}
    columns |= {f"reference_voxels_{name}": np.stack([reference] * 2) for name in REFERENCES}
    columns |= {"brain_area_mm2": np.stack([area] * 2), "relative_position": np.stack([np.linspace(0, 1, SLICES)] * 2)}
    return long([("support_id", SUPPORTS), ("slice_index", range(SLICES))], columns)


def slice_ranking(one: Subject) -> pl.DataFrame:
    """Its slice rankings."""
    shape = (len(REFERENCES), len(SUPPORTS))
    positive = 2 * (5 + int(one.lesions)) - 1
    auroc = np.clip(0.6 + 0.3 * one.skill + one.draws.normal(0, 0.05, shape), 0, 1)
    columns = {"auroc": auroc, "placement_sum": positive * (1 - auroc) * 0.98}
    return long(GRID, columns).with_columns(
        matched_count=pl.lit(positive), positive_count=pl.lit(positive), negative_count=pl.lit(SLICES - positive)
    )


def critical_threshold(one: Subject) -> pl.DataFrame:
    """Its critical thresholds, as fine as the grid."""
    predicted, true = one.curves()
    budgets = protocol().parameters.budgets_cm3
    burden, volume = ((part[:, :, :, 0] / 1000) for part in (predicted - true, predicted))
    found = np.stack([np.stack([(c > b).sum(axis=-1) / 200 for b in budgets], -1) for c in (burden, volume)], 3)
    key = [
        *GRID,
        ("voxel_volume_id", VOLUMES),
        ("loss", ("false_positive", "predicted_volume")),
        ("budget_cm3", budgets),
    ]
    return long(key, {"threshold": found})


def shared_out(totals: Array, count: int) -> Array:
    """Totals shared out among some parts, larger ones first; the first takes what is left: levels x parts."""
    shares = np.arange(count, 0, -1) / (count * (count + 1) / 2)
    parts = np.floor(totals[:, None] * shares).astype(np.int64)
    parts[:, 0] += totals - parts.sum(axis=1)
    return parts


def region_curve(one: Subject) -> pl.DataFrame:
    """Its lesions' regions."""
    predicted, true = (part[0, 0, 0, 0] for part in one.curves())
    count = int(one.lesions) + 6
    false, hits = shared_out(predicted - true, count), shared_out(true, count)
    voxels = np.broadcast_to(shared_out(np.array([one.voxels]), count), hits.shape)
    columns = {"region_predicted_voxels": false + hits, "overlap_voxels": hits, "lesion_voxels": voxels}
    frame = long([("level", LEVELS.tolist()), ("lesion_id", range(1, count + 1))], columns)
    return frame.filter(pl.col("region_predicted_voxels") > 0, pl.col("lesion_voxels") > 0)


def component_overlap(one: Subject) -> pl.DataFrame:
    """Its components that hold reference voxels, thirty a level."""
    predicted, true = (part[0, 0, 0, 0] for part in one.curves())
    hits = shared_out(true, 30)
    columns = {"component_true_positive_voxels": hits, "component_voxels": hits + shared_out(predicted - true, 30)}
    frame = long([("level", LEVELS.tolist()), ("component", range(30))], columns)
    key = ["level", "component_voxels", "component_true_positive_voxels"]
    return frame.filter(pl.col("component_true_positive_voxels") > 0).group_by(key).len("component_count").sort(key)


MEASURES: dict[str, Callable[[Subject], pl.DataFrame]] = {
    measure.__name__: measure
    for measure in (
        *(threshold_curve, lesion_curve, voxel_ranking, score_histogram, slice_score, slice_ranking),
        *(critical_threshold, region_curve, component_overlap),
    )
}


def declared_frame(name: str, frame: pl.DataFrame) -> pl.DataFrame:
    """A frame in the table's declared columns and types."""
    return frame.select(pl.col(one).cast(kind) for one, kind in lake_tables()[name].polars_schema.items())


def own_tables(methods: Sequence[str], subjects: Sequence[str]) -> Iterator[tuple[str, str, pl.DataFrame]]:
    """Subjects and methods: table, owner and rows."""
    for place, subject_id in enumerate(subjects):
        voxels = Subject(0, place).voxels
        split = "validation" if place % 3 == 0 else "test"
        row = (subject_id, split, 240, 240, 139, 1.0, BRAIN_VOXELS, voxels, 0, float(voxels), "0" * 64, "brain_mask")
        yield (
            "subject",
            owner(None, subject_id),
            pl.DataFrame([row], lake_tables()["subject"].column_names, orient="row"),
        )
    for place, method_id in enumerate(methods):
        row = (method_id, method_id, "method", place, None, None, 1.1, "{}")
        yield "method", owner(method_id, None), pl.DataFrame([row], lake_tables()["method"].column_names, orient="row")


def write_lake(lake: Path, method_count: int, subject_count: int) -> Manifest:
    """Write a simulated lake; each table's first part is checked against its declaration."""
    methods = [f"method_{place}" for place in range(method_count)]
    subjects = [f"s{place:05d}" for place in range(subject_count)]
    parts: dict[str, list[str]] = {}

    def write(table: str, of: str, frame: pl.DataFrame) -> None:
        part = Part(table, of, fingerprint({"simulated": of}))
        frame, store = declared_frame(table, frame), PartStore(lake)
        if table in parts:  # synced and checked parts take half an hour where there are thirteen thousand a table
            frame.write_parquet(store.path(part), compression="zstd", compression_level=3)
        else:
            store.write(part, lake_tables()[table], frame)
        parts.setdefault(table, []).append(part.relative_path)

    for table, of, frame in own_tables(methods, subjects):
        write(table, of, frame)
    for (m, method_id), (s, subject_id) in product(enumerate(methods), enumerate(subjects)):
        for table, measure in MEASURES.items():
            frame = measure(Subject(m, s)).with_columns(method_id=pl.lit(method_id), subject_id=pl.lit(subject_id))
            write(table, owner(method_id, subject_id), frame)
    manifest = Manifest(
        study="simulated",
        overrides={},
        sql_folder=None,
        subject_count=subject_count,
        method_ids=tuple(methods),
        parts={table: tuple(paths) for table, paths in parts.items()},
        failures=(),
    )
    manifest.write(lake)
    return manifest


def peak_gib() -> float:
    """Peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def measure_build(lake: Path, manifest: Manifest, is_defensible_only: bool) -> None:
    """Build every mart in memory and print the seconds of each part; or the resampling of the defensible set alone."""
    seconds: dict[str, float] = {}
    started, current = time.perf_counter(), ""

    def step(name: str) -> None:
        nonlocal started, current
        now = time.perf_counter()
        seconds[current] = seconds.get(current, 0.0) + now - started
        started, current = now, name

    with open_for_building(None, lake) as connection:
        if is_defensible_only:
            build_tables(connection, manifest, ["universe", "operating_subject", "replicate_level"], step)
            step("")
            print(f"SQL before the resampling: {sum(seconds.values()):.1f} s; peak {peak_gib():.2f} GiB")
            connection.execute("delete from universe where not is_defensible")
            for name in RESAMPLING:
                before = time.perf_counter()
                frame = TRANSFORMS[name].run(manifest.protocol, lambda query: connection.sql(query).pl())
                connection.register("incoming", frame)
                connection.execute(f"create or replace table {name} as from incoming")
                connection.unregister("incoming")
                print(f"{name}, defensible: {time.perf_counter() - before:.1f} s; peak {peak_gib():.2f} GiB")
        else:
            build_tables(connection, manifest, on_step=step)
            step("")
    resampling = sum(seconds.get(name, 0.0) for name in RESAMPLING)
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:12]
    print(", ".join(f"{name} {spent:.1f}" for name, spent in slowest))
    print(f"all steps {sum(seconds.values()):.1f} s, of these resampling {resampling:.1f} s; peak {peak_gib():.2f} GiB")


def main() -> None:
    """Write (where it is not there yet) and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lake", type=Path)
    parser.add_argument("--methods", type=int, default=4)
    parser.add_argument("--subjects", type=int, default=336)
    parser.add_argument("--defensible", action="store_true", help="resample the defensible universes alone")
    arguments = parser.parse_args()
    before = time.perf_counter()
    is_there = (arguments.lake / FILE_NAME).exists()
    manifest = (
        read_manifest(arguments.lake) if is_there else write_lake(arguments.lake, arguments.methods, arguments.subjects)
    )
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"lake: {len(manifest.method_ids)} methods x {manifest.subject_count} subjects, load {load}")
    print(f"{'read' if is_there else 'written'} in {time.perf_counter() - before:.1f} s")
    measure_build(arguments.lake, manifest, arguments.defensible)


if __name__ == "__main__":
    main()
