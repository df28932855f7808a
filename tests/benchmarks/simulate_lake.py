"""A simulated lake of any size, and how long its marts take: `python tests/benchmarks/simulate_lake.py LAKE`.

No images: plausible curves that fall with the threshold, lesions, rankings, histograms and slices are drawn and written
as parts, with a manifest. A third of the subjects is validation. Every method declares a legacy voxel volume, so the
multiverse is whole. An existing lake is used again. The release is built, checked and published as `mirto build` does;
with `--defensible` every mart is built in a file, unchecked, and the defensible universes alone are resampled.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from expectations.protocol import protocol
from expectations.store import Part, PartStore, fingerprint, owner
from expectations.tables import ContractBroken, breaches, lake_tables
from ingest.bundles import bundle_parts
from ingest.manifest import FILE_NAME, Manifest, read_manifest
from marts.lake import build_release
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
MATCHED_IOU = 0.8  # of the share of a lesion that is seen
BRAIN_VOXELS = 1_400_000
MULTIVERSE = ("replicate_level", "replicate_statistic")  # the transforms that read the table of universes


class Subject:
    """One subject as one method sees it: sizes from the subject's draw, quality from the method's."""

    def __init__(self, method: int, subject: int) -> None:
        self.method, self.subject = method, subject
        size = np.random.default_rng([1, subject])
        self.voxels = int(np.clip(size.lognormal(9.5, 1.1), 40, 250_000))
        self.lesions = size.integers(1, 12)
        self.draws = np.random.default_rng([2, method, subject])
        self.skill = float(np.clip(0.5 + 0.08 * method % 0.4 + self.draws.normal(0, 0.15), 0.05, 0.95))

    def falling(self, most: float, shape: float) -> Array:
        """A count by level, from `most` at level 0 to none at level 200."""
        return np.floor(most * np.clip(1 - LEVELS / 200, 0, 1) ** shape).astype(np.int64)

    def seen(self) -> Array:
        """The share of each lesion that is predicted: lesions x post-processings x levels."""
        draws = np.random.default_rng([3, self.method, self.subject]).uniform(
            0, 1, (int(self.lesions), len(POSTPROCESSES))
        )
        return draws[..., None] * np.clip(1 - LEVELS / 200, 0, 1) ** (2 - 1.5 * self.skill)

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

    def histograms(self) -> tuple[Array, Array]:
        """Positive and negative voxels by bin: references x supports x bins."""
        predicted, true = (counts[:, :, 0, 0, 0] for counts in self.curves())
        place = np.linspace(0, 1, BINS)
        densities = np.exp(-(((place - self.skill) / 0.3) ** 2)), np.exp(-6 * place)
        counts = (true, self.voxels), (predicted - true, BRAIN_VOXELS - self.voxels)
        positive, negative = (
            np.stack([[by_bin(self.draws, int(one), every, density) for one in row] for row in own])
            for (own, every), density in zip(counts, densities, strict=True)
        )
        return positive, negative


def by_bin(draws: np.random.Generator, predicted: int, every: int, density: Array) -> Array:
    """Voxels by bin: those predicted at level 0 by a density, the rest in bin 0."""
    shares = density[1:] / density[1:].sum()
    return np.concatenate([[every - predicted], draws.multinomial(predicted, shares)])


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
    """Its lesion hits: those of `lesion_match` where both count the same lesions."""
    shape = (*(len(levels) for _, levels in CURVE_GRID), len(DEFINITIONS), len(LEVELS))
    count = np.broadcast_to((one.lesions + np.array([0, 6, 1, 7]))[:, None], shape)
    fade = np.clip(1 - LEVELS / 200, 0, 1) ** (2 - 1.5 * one.skill) * np.array([1.0, 0.9, 0.85])[:, None, None]
    share = one.draws.uniform(0.7, 1, shape[:4])[..., None, None] * fade
    names = {"hit_any_overlap": 1.0, "hit_iou_10": 0.8, "hit_iou_25": 0.5, "hit_iou_50": 0.25}
    columns = {name: np.floor(count * share * factor).astype(np.int64) for name, factor in names.items()}
    seen = one.seen()
    for name, hits in columns.items():
        least = float(name.removeprefix("hit_iou_")) / 100 if "iou" in name else None
        hit = overlap_voxels(seen) > 0 if least is None else MATCHED_IOU * seen >= least
        hits[0, 0, 0, :, 0] = hit.sum(axis=0)
    key = [*CURVE_GRID, ("lesion_definition_id", DEFINITIONS), ("level", LEVELS.tolist())]
    return long(key, columns | {"lesion_count": count}).with_columns(threshold=pl.col("level") / 200)


def voxel_ranking(one: Subject) -> pl.DataFrame:
    """Its rankings, as if all scores of a bin were one."""
    positive, negative = one.histograms()
    below = negative.cumsum(axis=-1) - negative
    pairs = positive.sum(axis=-1) * negative.sum(axis=-1).astype(np.float64)
    auroc = (positive * (below + negative / 2)).sum(axis=-1) / pairs
    at_least = [counts[..., ::-1].cumsum(axis=-1)[..., ::-1] for counts in (positive, positive + negative)]
    precision = (positive * at_least[0] / np.maximum(at_least[1], 1)).sum(axis=-1) / positive.sum(axis=-1)
    columns = {"auroc": auroc, "average_precision": precision, "tied_fraction": np.zeros(auroc.shape)}
    frame = long(GRID, columns | {"ordinal_auroc": auroc, "ordinal_average_precision": precision})
    return frame.with_columns(positive_voxels=pl.lit(one.voxels), negative_voxels=pl.lit(BRAIN_VOXELS - one.voxels))


def score_histogram(one: Subject) -> pl.DataFrame:
    """Its histograms: most bins occupied."""
    positive, negative = one.histograms()
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


def filled(totals: Array, sizes: Array) -> Array:
    """Totals put into parts of some sizes, one part after the other: levels x parts."""
    return np.clip(totals[:, None] - (sizes.cumsum() - sizes), 0, sizes)


def region_curve(one: Subject) -> pl.DataFrame:
    """Its lesions' regions."""
    predicted, true = (part[0, 0, 0, 0] for part in one.curves())
    count = int(one.lesions) + 6
    sizes = shared_out(np.array([one.voxels]), count)[0]
    false, hits = shared_out(predicted - true, count), filled(true, sizes)
    voxels = np.broadcast_to(sizes, hits.shape)
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


def lesion_evidence(one: Subject) -> pl.DataFrame:
    """Its lesions against their shells; every fifth has none."""
    count = int(one.lesions)
    auroc = np.clip(0.4 + 0.5 * one.skill + one.draws.normal(0, 0.2, count), 0, 1)
    precision = np.clip(auroc + one.draws.normal(0, 0.05, count), 0, 1)
    columns: dict[str, Array] = {"local_auroc": auroc, "local_average_precision": precision}
    columns |= {"lesion_voxels": np.full(count, 50), "shell_voxels": np.where(np.arange(count) % 5 == 4, 0, 50)}
    measured = [
        pl.when(pl.col("shell_voxels") > 0).then(pl.col(f"local_{name}")) for name in ("auroc", "average_precision")
    ]
    return long([("lesion_id", range(1, count + 1))], columns).with_columns(measured)


def lesion_match(one: Subject) -> pl.DataFrame:
    """Its lesions at every level."""
    seen = one.seen()
    columns = {"matched_iou": MATCHED_IOU * seen, "overlap_voxels": overlap_voxels(seen)}
    columns["max_score"] = np.broadcast_to(seen.max(axis=(1, 2), keepdims=True), seen.shape)
    key = [("lesion_id", range(1, len(seen) + 1)), ("postprocess_id", POSTPROCESSES), ("level", LEVELS.tolist())]
    return long(key, columns)


def overlap_voxels(seen: Array) -> Array:
    """Voxels of fifty that are predicted where some share of a lesion is seen."""
    return np.floor(50 * seen).astype(np.int64)


def lesion(one: Subject) -> pl.DataFrame:
    """Its lesions above the floor, in view and after the trip to the method's grid."""
    return pl.concat([lesions(one, "canonical", "brain_in_view"), lesions(one, "round_trip", "brain")])


def lesions(one: Subject, reference_id: str, support_id: str) -> pl.DataFrame:
    """The subject's lesions above the floor, largest first."""
    count = int(one.lesions)
    volume = one.voxels * np.arange(count, 0, -1) / (count * (count + 1) / 2)
    key = [("reference_id", [reference_id]), ("support_id", [support_id]), ("lesion_id", range(1, count + 1))]
    centre = {f"centroid_{axis}": pl.lit(60.0) for axis in range(3)}
    nothing = pl.lit(None, pl.Float64)
    return long([*key, ("lesion_definition_id", ["conn6_floor"])], {"volume_mm3": volume}).with_columns(
        **centre, mean_contrast=nothing
    )


MEASURES: dict[str, Callable[[Subject], pl.DataFrame]] = {
    measure.__name__: measure
    for measure in (
        *(threshold_curve, lesion_curve, voxel_ranking, score_histogram, slice_score, slice_ranking),
        *(critical_threshold, region_curve, component_overlap, lesion_evidence, lesion_match, lesion),
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
        own = {"method_id": pl.lit(None, pl.String), "subject_id": pl.lit(subject_id)}
        yield "lesion", owner(None, subject_id), lesions(Subject(0, place), "canonical", "brain").with_columns(**own)
    for place, method_id in enumerate(methods):
        row = (method_id, method_id, "method", place, None, None, 1.1, "{}")
        yield "method", owner(method_id, None), pl.DataFrame([row], lake_tables()["method"].column_names, orient="row")


def write_part(lake: Path, table: str, of: str, frame: pl.DataFrame) -> str:
    """Write a part unsynced and unchecked (thousands a table would take half an hour), and say where."""
    part = Part(table, of, fingerprint({"simulated": of}))
    frame.write_parquet(PartStore(lake).path(part), compression="zstd", compression_level=3)
    return part.relative_path


def write_pair(lake: Path, method: int, subject: int) -> dict[str, str]:
    """Write what one method's map of one subject gives; the part of each table."""
    method_id, subject_id = f"method_{method}", f"s{subject:05d}"
    parts: dict[str, str] = {}
    for table, measure in MEASURES.items():
        frame = measure(Subject(method, subject)).with_columns(
            method_id=pl.lit(method_id), subject_id=pl.lit(subject_id)
        )
        parts[table] = write_part(lake, table, owner(method_id, subject_id), declared_frame(table, frame))
    return parts


def check_declarations() -> None:
    """Refuse a simulated table that breaks its declaration."""
    for table, measure in MEASURES.items():
        frame = measure(Subject(0, 0)).with_columns(method_id=pl.lit("method_0"), subject_id=pl.lit("s00000"))
        if found := breaches(declared_frame(table, frame), lake_tables()[table]):
            raise ContractBroken(found)


def write_lake(lake: Path, method_count: int, subject_count: int) -> Manifest:
    """Write a simulated lake, on every core."""
    check_declarations()
    methods = [f"method_{place}" for place in range(method_count)]
    subjects = [f"s{place:05d}" for place in range(subject_count)]
    for table in ("subject", "method", *MEASURES):
        (lake / "parts" / table).mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {}
    for table, of, frame in own_tables(methods, subjects):
        parts.setdefault(table, []).append(write_part(lake, table, of, declared_frame(table, frame)))
    pairs = list(product([lake], range(method_count), range(subject_count)))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for written in pool.map(write_pair, *zip(*pairs, strict=True), chunksize=16):
            for table, path in written.items():
                parts.setdefault(table, []).append(path)
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


class Stopwatch:
    """Seconds by step, for a callback that is told each step's name before it begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.step, self.started = "", time.perf_counter()

    def __call__(self, name: str) -> None:
        """Begin a step."""
        now = time.perf_counter()
        self.seconds[self.step] = self.seconds.get(self.step, 0.0) + now - self.started
        self.step, self.started = name, now

    def report(self) -> None:
        """End the last step and print all."""
        self("")
        numerics = sum(spent for name, spent in self.seconds.items() if name in TRANSFORMS)
        checks = self.seconds.pop("checks", 0.0)
        every = sum(self.seconds.values())
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:16]
        print(", ".join(f"{name} {spent:.1f}" for name, spent in slowest))
        print(
            f"SQL {every - numerics:.1f} s + transforms {numerics:.1f} s + checks and publication {checks:.1f} s"
            f" = {every + checks:.1f} s; peak {peak_gib():.2f} GiB"
        )


def measure_release(lake: Path, manifest: Manifest) -> None:
    """Build, check and publish a release, and print the seconds of each part."""
    watch = Stopwatch()
    outcome = build_release(lake, manifest, watch)
    watch.report()
    for finding in outcome.stopped:
        print(f"stopped: {finding}")
    if outcome.release is not None:
        print(f"content hash {outcome.release.content_hash}")


def measure_defensible(lake: Path, manifest: Manifest) -> None:
    """Build every mart in a file, the multiverse resampled over its defensible universes alone."""
    watch = Stopwatch()
    with TemporaryDirectory() as folder, open_for_building(Path(folder) / "marts.duckdb", lake) as connection:

        def step(name: str) -> None:
            if name in MULTIVERSE and watch.step not in MULTIVERSE:
                connection.execute("alter table universe rename to every_universe")
                connection.execute("create table universe as from every_universe where is_defensible")
            elif name not in MULTIVERSE and watch.step in MULTIVERSE:
                connection.execute("drop table universe")
                connection.execute("alter table every_universe rename to universe")
            watch(name)

        build_tables(connection, manifest, on_step=step)
    watch.report()


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
    before = time.perf_counter()
    bundles = bundle_parts(arguments.lake, manifest.parts)
    manifest = manifest.model_copy(update={"bundles": bundles})
    manifest.write(arguments.lake)
    print(f"{len(bundles)} bundles in {time.perf_counter() - before:.1f} s")
    (measure_defensible if arguments.defensible else measure_release)(arguments.lake, manifest)


if __name__ == "__main__":
    main()
