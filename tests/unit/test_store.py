import errno
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expectations.store import FINGERPRINT_HEX, Part, PartStore, fingerprint, owner, publish, write_text
from expectations.tables import ContractBroken, lake_tables

TABLE = lake_tables()["score_quantile"]
STAMP = "0123456789abcdef01234567"
PART = Part("score_quantile", "m@s", STAMP)
ROWS: list[tuple[object, ...]] = [("m", "s2", 0.0, 0.5), ("m", "s1", -1.0, 1.0), ("m", "s3", 0.25, 0.75)]


def files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def test_round_trip(tmp_path: Path) -> None:
    store, frame = PartStore(tmp_path), TABLE.frame(ROWS)
    assert not store.has(PART)
    store.write(PART, TABLE, frame)
    assert store.has(PART)
    assert pl.read_parquet(store.path(PART)).equals(frame.sort("subject_id"))
    assert pl.read_parquet_schema(store.path(PART)) == TABLE.polars_schema
    assert files(tmp_path) == [Path(PART.relative_path)]


def test_metadata_says_whose_rows_a_part_holds(tmp_path: Path) -> None:
    store = PartStore(tmp_path)
    store.write(PART, TABLE, TABLE.frame(ROWS))
    metadata = pl.read_parquet_metadata(store.path(PART))
    assert metadata["mirto.table"] == "score_quantile"
    assert metadata["mirto.owner"] == "m@s"
    assert metadata["mirto.fingerprint"] == STAMP


def test_an_empty_part_keeps_its_schema(tmp_path: Path) -> None:
    store = PartStore(tmp_path)
    store.write(PART, TABLE, TABLE.frame())
    found = pl.read_parquet(store.path(PART))
    assert found.is_empty()
    assert found.schema == TABLE.polars_schema


@settings(deadline=None, max_examples=20)
@given(st.permutations(ROWS))
def test_the_bytes_of_a_part_do_not_depend_on_the_order_of_its_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: Sequence[Sequence[object]]
) -> None:
    store = PartStore(tmp_path_factory.mktemp("lake"))
    other = Part("score_quantile", "n@s", STAMP)
    for part, content in ((PART, ROWS), (other, rows)):
        store.write(part, TABLE, TABLE.frame(content))
    written = [store.path(part).read_bytes().replace(b"n@s", b"m@s") for part in (PART, other)]
    assert written[0] == written[1]


def test_rows_come_back_sorted_by_key(tmp_path: Path) -> None:
    store, table = PartStore(tmp_path), lake_tables()["score_histogram"]
    rows = [("m", "s", "canonical", support, b, 1, 1) for b in (7, 0, 4095) for support in ("brain_in_view", "brain")]
    part = Part("score_histogram", "m@s", STAMP)
    store.write(part, table, table.frame(rows))
    assert pl.read_parquet(store.path(part)).select("support_id", "bin").rows() == [
        (support, b) for support in ("brain", "brain_in_view") for b in (0, 7, 4095)
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [*ROWS, ROWS[0]],
        [("m", None, 0.0, 1.0)],
        [("m", "s", float("nan"), 1.0)],
        [("m", "s", None, 1.0)],
    ],
    ids=["key repeats", "null key", "NaN", "null"],
)
def test_a_broken_contract_writes_nothing(tmp_path: Path, rows: list[tuple[object, ...]]) -> None:
    store = PartStore(tmp_path)
    with pytest.raises(ContractBroken, match="score_quantile"):
        store.write(PART, TABLE, TABLE.frame(rows))
    assert list(tmp_path.iterdir()) == []
    assert not store.has(PART)


def test_a_wrong_schema_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ContractBroken, match="declared"):
        PartStore(tmp_path).write(PART, TABLE, TABLE.frame(ROWS).drop("high"))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_contract_leaves_the_part_that_is_there(tmp_path: Path) -> None:
    store = PartStore(tmp_path)
    store.write(PART, TABLE, TABLE.frame(ROWS))
    before = store.path(PART).read_bytes()
    with pytest.raises(ContractBroken):
        store.write(PART, TABLE, TABLE.frame([*ROWS, ROWS[0]]))
    assert store.path(PART).read_bytes() == before
    assert files(tmp_path) == [Path(PART.relative_path)]


class Killed(BaseException):
    """Stands for whatever ends a process in the middle of a write."""


def half_written(_frame: pl.DataFrame, file: Path, **_options: object) -> None:
    file.write_bytes(b"PAR1 half of")
    raise Killed


def left_behind(_file: Path, **_options: object) -> None:
    """A killed process cleans nothing up."""


def full_disk(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_end_in_the_middle_of_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PartStore(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(pl.DataFrame, "write_parquet", half_written)
        store.write(PART, TABLE, TABLE.frame(ROWS))
    assert not store.has(PART)
    assert files(tmp_path) == []
    store.write(PART, TABLE, TABLE.frame(ROWS))
    assert store.has(PART)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PartStore(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fsync", full_disk)
        store.write(PART, TABLE, TABLE.frame(ROWS))
    assert not store.has(PART)
    assert files(tmp_path) == []


def test_sweep_removes_what_a_killed_writer_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PartStore(tmp_path)
    assert store.sweep() == 0
    store.write(PART, TABLE, TABLE.frame(ROWS))
    killed = Part("score_quantile", "killed@s", STAMP)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(pl.DataFrame, "write_parquet", half_written)
        patched.setattr(Path, "unlink", left_behind)
        store.write(killed, TABLE, TABLE.frame(ROWS))
    assert len(files(tmp_path)) == 2
    assert not store.has(killed)
    assert store.sweep() == 1
    assert files(tmp_path) == [Path(PART.relative_path)]


def test_publish_replaces_what_is_there(tmp_path: Path) -> None:
    beside, target = tmp_path / "beside", tmp_path / "target"
    beside.write_text("new")
    target.write_text("old")
    publish(beside, target)
    assert target.read_text() == "new"
    assert files(tmp_path) == [Path("target")]


def test_write_text_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep/folder/manifest.json"
    write_text(target, "first, Jörg 患者")
    assert target.read_text(encoding="utf-8") == "first, Jörg 患者"
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fsync", full_disk)
        write_text(target, "second")
    assert target.read_text(encoding="utf-8") == "first, Jörg 患者"
    assert files(tmp_path) == [Path("deep/folder/manifest.json")]


def test_owners() -> None:
    assert owner("m", "s") == "m@s"
    assert owner("m", None) == "m@"
    assert owner(None, "s") == "@s"


ODD = [
    "s 1",
    "s%201",
    "s+1",
    "s_1",
    "Jörg",
    "Jo\u0308rg",
    "患者1",
    "it's",
    'a"b',
    "a@b",
    "a.b",
    "*",
    "[1]",
    "?",
    "a=1",
    "é%",
    "~",
    "#1",
]


def test_odd_subject_ids_give_distinct_parts_that_read_back(tmp_path: Path) -> None:
    store = PartStore(tmp_path)
    parts = [Part("score_quantile", owner("m", subject), STAMP) for subject in ODD]
    assert len({part.relative_path.casefold() for part in parts}) == len(ODD)
    for part, subject in zip(parts, ODD, strict=True):
        store.write(part, TABLE, TABLE.frame([("m", subject, 0.0, 1.0)]))
    assert len(files(tmp_path)) == len(ODD)
    for part, subject in zip(parts, ODD, strict=True):
        assert pl.read_parquet(store.path(part)).rows() == [("m", subject, 0.0, 1.0)]
        assert pl.read_parquet_metadata(store.path(part))["mirto.owner"] == f"m@{subject}"


SUBJECT_IDS = st.text("abAB0 .%25@~*?[]{}'\"=#+&é\u0301e患", min_size=1, max_size=4)


@given(st.lists(SUBJECT_IDS, min_size=2, max_size=2, unique=True))
def test_two_owners_never_share_a_file(subjects: list[str]) -> None:
    first, second = (Part("subject", owner(None, subject), STAMP).relative_path for subject in subjects)
    assert first != second
    for path in (first, second):
        assert path.isascii()
        assert path.count("/") == 2
        assert not Path(path).name.startswith(".")
        assert not set(path) & set("*?[]{}'\" ")


@pytest.mark.parametrize(
    "letter", ["x", " ", "é", "患", "\U0001f9e0"], ids=["ascii", "blank", "accent", "CJK", "emoji"]
)
def test_the_longest_ids_that_a_study_may_declare_can_be_written(tmp_path: Path, letter: str) -> None:
    store, method = PartStore(tmp_path), "m" * 64
    subjects = ["s" + letter * 126 + last for last in "ab"]
    for subject in subjects:
        part = Part("score_quantile", owner(method, subject), STAMP)
        store.write(part, TABLE, TABLE.frame([(method, subject, 0.0, 1.0)]))
        assert pl.read_parquet(store.path(part)).rows() == [(method, subject, 0.0, 1.0)]
    assert len(files(tmp_path)) == 2


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(-9, 9), st.text("ab", max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text("ab", max_size=2), inner, max_size=2)),
    max_leaves=5,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), JSON, max_size=4))
def test_a_fingerprint_does_not_depend_on_the_order_of_its_ingredients(ingredients: dict[str, object]) -> None:
    backwards = dict(reversed(ingredients.items()))
    assert fingerprint(ingredients) == fingerprint(backwards)
    assert len(fingerprint(ingredients)) == FINGERPRINT_HEX
    assert fingerprint(ingredients | {"z": 1}) != fingerprint(ingredients)


def test_a_fingerprint_is_the_same_on_every_machine() -> None:
    text = rb'{"a":"\u00e9","b":[1,2.5,null]}'
    assert fingerprint({"b": [1, 2.5, None], "a": "é"}) == hashlib.sha256(text).hexdigest()[:24]


@pytest.mark.parametrize(
    ("first", "second"),
    [(["a", "b"], ["ab"]), ([1, 2], [2, 1]), ("1", 1), (None, "null"), (True, 1), ({"a": 1}, {"a": "1"}), ([], {})],
)
def test_a_fingerprint_tells_values_apart(first: object, second: object) -> None:
    assert fingerprint({"x": first}) != fingerprint({"x": second})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_fingerprint_refuses_what_json_cannot_say(value: float) -> None:
    with pytest.raises(ValueError):
        fingerprint({"x": [value]})
