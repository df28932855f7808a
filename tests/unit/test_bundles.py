"""Bundles: every part in one, every row in it, and as few new ones as may be when a study grows."""

import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expectations.store import Part, PartStore, owner
from expectations.tables import lake_tables
from ingest.bundles import FEWEST, Bundle, bundle_parts, bundles_of, files_of, write_bundle

TABLE = lake_tables()["slice_ranking"]


def paths(methods: int, subjects: int, stamp: str = "0" * 24) -> list[str]:
    """Paths of the parts of some methods and subjects."""
    owners = [owner(f"m{method}", f"s{subject}") for method in range(methods) for subject in range(subjects)]
    return [Part(TABLE.name, of, stamp).relative_path for of in owners]


def subject_of(part: str) -> str:
    return part.split("@")[1].split(".")[0]


@given(st.integers(1, 4), st.integers(0, 400))
def test_every_part_is_in_one_bundle_with_the_other_methods_of_its_subject(methods: int, subjects: int) -> None:
    parts = paths(methods, subjects)
    bundles = bundles_of(TABLE.name, parts)
    assert bool(bundles) == (len(parts) >= FEWEST)
    if bundles:
        assert sorted(part for bundle in bundles for part in bundle.parts) == sorted(parts)
        assert len(parts) / len(bundles) >= FEWEST / 2
    held = [{subject_of(part) for part in bundle.parts} for bundle in bundles]
    assert sum(map(len, held)) == len({subject for subjects in held for subject in subjects})


def test_a_new_subject_makes_one_new_bundle_and_a_new_stamp_one_for_each_it_touches() -> None:
    before = {bundle.path for bundle in bundles_of(TABLE.name, paths(4, 200))}
    after = {bundle.path for bundle in bundles_of(TABLE.name, paths(4, 201))}
    assert len(before) == len(after) == 8
    assert len(after - before) == 1
    again = [*paths(4, 200)[:-1], paths(4, 200, "1" * 24)[-1]]
    assert len({bundle.path for bundle in bundles_of(TABLE.name, again)} - before) == 1


def test_subjects_whose_names_hold_dots_are_told_apart() -> None:
    parts = [Part(TABLE.name, owner("m", f"site.a-{n:03d}.v1"), "0" * 24).relative_path for n in range(4 * FEWEST)]
    assert len(bundles_of(TABLE.name, parts)) == 4


def test_the_order_of_parts_makes_no_difference() -> None:
    parts = paths(2, 64)
    assert bundles_of(TABLE.name, parts) == bundles_of(TABLE.name, parts[::-1])


def written(lake: Path, methods: int, subjects: int, skipped: str = "") -> dict[str, list[str]]:
    """A lake of parts of two settings each, whose AUROC tells them apart."""
    store = PartStore(lake)
    for number, path in enumerate(paths(methods, subjects)):
        method, subject = Path(path).name.split(".")[0].split("@")
        rows = [
            (method, subject, reference, "brain", number / 1000, 1.0, 2, 3, 4)
            for reference in ("round_trip", "canonical")
        ]
        if subject != skipped:
            store.write(Part(TABLE.name, owner(method, subject), "0" * 24), TABLE, TABLE.frame(rows))
    return {TABLE.name: paths(methods, subjects)}


def test_a_bundle_holds_the_rows_of_its_parts_a_setting_after_the_other(tmp_path: Path) -> None:
    parts = written(tmp_path, 1, 5)[TABLE.name]
    bundle = Bundle("bundles/slice_ranking/0.x.parquet", tuple(parts))
    write_bundle(tmp_path, TABLE.name, bundle)
    rows = pl.read_parquet(tmp_path / bundle.path)
    every = pl.concat([pl.read_parquet(tmp_path / part) for part in parts])
    assert rows.sort(TABLE.key).equals(every.sort(TABLE.key))
    assert rows.get_column("reference_id").to_list() == ["canonical"] * 5 + ["round_trip"] * 5
    assert rows.get_column("subject_id").to_list() == [f"s{number}" for number in range(5)] * 2
    assert json.loads(pl.read_parquet_metadata(tmp_path / bundle.path)["mirto.parts"]) == parts


def test_bundles_are_written_once(tmp_path: Path) -> None:
    parts = written(tmp_path, 2, FEWEST)
    told: list[int] = []
    bundles = bundle_parts(tmp_path, parts, told.append)
    assert len(bundles) == 2 and told == [2]
    assert bundle_parts(tmp_path, parts, told.append) == bundles and told == [2]
    assert files_of(TABLE.name, parts[TABLE.name], bundles) == list(bundles)
    rows = pl.concat([pl.read_parquet(tmp_path / bundle) for bundle in bundles])
    assert rows.height == rows.select(TABLE.key).n_unique() == 4 * FEWEST


def test_parts_in_no_bundle_are_read_themselves() -> None:
    parts = paths(2, FEWEST)
    first, second = bundles_of(TABLE.name, parts)
    assert files_of(TABLE.name, parts, [second.path]) == [second.path, *(p for p in parts if p in first.parts)]
    assert files_of(TABLE.name, parts, ["bundles/slice_ranking/0.stale.parquet"]) == parts
    assert files_of(TABLE.name, [], []) == []


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "broken"])
def test_a_part_that_cannot_be_read_leaves_the_others_of_its_bundle_as_they_are(tmp_path: Path, is_there: bool) -> None:
    parts = written(tmp_path, 1, FEWEST, skipped="s7")
    broken = next(part for part in parts[TABLE.name] if "@s7." in part)
    if is_there:
        (tmp_path / broken).write_bytes(b"PAR1 and no more")
    assert bundle_parts(tmp_path, parts) == ()
    assert files_of(TABLE.name, parts[TABLE.name], ()) == parts[TABLE.name]


def test_a_table_without_rows_is_bundled_too(tmp_path: Path) -> None:
    names = paths(1, FEWEST)
    for path in names:
        method, subject = Path(path).name.split(".")[0].split("@")
        PartStore(tmp_path).write(Part(TABLE.name, owner(method, subject), "0" * 24), TABLE, TABLE.frame())
    [bundle] = bundle_parts(tmp_path, {TABLE.name: names})
    assert pl.read_parquet(tmp_path / bundle).equals(TABLE.frame())
