"""Transforms proposed from masks alone: what was stored in a known way must be found again."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

import ingest.propose
import mirto
from expectations.study import TransformTable, load_study
from ingest.grid import Transform, map_nearest
from ingest.phantom import Storage
from ingest.problems import BadInput
from ingest.propose import Pair, Proposal, Search, propose, search_transforms, study_lines
from ingest.volumes import resolve_transform

Triple = tuple[int, int, int]
Mask = NDArray[np.bool_]

SHAPE = (36, 44, 40)
ORDERS: list[Triple] = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
NOT_REVERSED = (False, False, False)


def blobs(seed: int, shape: Triple = SHAPE, share: float = 0.02) -> Mask:
    """Lesion-like blobs inside the middle of the grid."""
    noise = gaussian_filter(np.random.default_rng(seed).standard_normal(shape), 1.5)
    inside = np.zeros(shape, np.bool_)
    inside[tuple(slice(n // 6, n - n // 6) for n in shape)] = True
    return inside & (noise > np.quantile(noise[inside], 1 - share * 4))


def stored_pairs(storage: Storage, count: int = 4, share: float = 0.02) -> list[Pair]:
    masks = [blobs(seed, share=share) for seed in range(count)]
    return [Pair(f"s{i}", np.asarray(storage.store_labels(m), np.bool_), m) for i, m in enumerate(masks)]


STORES = {
    "plain": Storage((0, 1, 2), (0, 0, 0), SHAPE, SHAPE, NOT_REVERSED, ""),
    "permuted and reversed": Storage((1, 2, 0), (0, 0, 0), SHAPE, SHAPE, (True, False, True), ""),
    "cropped, centred": Storage((0, 1, 2), (0, 0, 6), (36, 44, 28), (36, 44, 28), NOT_REVERSED, ""),
    "cropped at the low end": Storage((2, 1, 0), (0, 0, 0), (36, 36, 40), (36, 36, 40), (False, True, False), ""),
    "cropped at the high end": Storage((0, 2, 1), (4, 0, 0), (32, 44, 40), (32, 44, 40), NOT_REVERSED, ""),
    "cropped anywhere": Storage((1, 0, 2), (3, 5, 2), (29, 34, 35), (29, 34, 35), (False, False, True), ""),
    "at two thirds": Storage((0, 1, 2), (0, 0, 0), SHAPE, (24, 29, 40), (False, False, True), ""),
    "at a third, cropped": Storage((2, 0, 1), (0, 1, 5), (36, 42, 30), (12, 14, 10), (False, True, False), ""),
    "cut through the lesions": Storage((0, 1, 2), (0, 0, 0), (36, 44, 22), (36, 44, 22), NOT_REVERSED, ""),
}


@pytest.mark.parametrize("name", STORES)
def test_what_was_stored_in_a_known_way_is_found(name: str) -> None:
    storage = STORES[name]
    pairs = stored_pairs(storage, share=0.1 if "third" in name else 0.02)
    best, *others = search_transforms(pairs)
    found = resolve_transform(best.table, pairs[0].own.shape, SHAPE)
    expected = Transform(storage.source_axis, storage.start, storage.extent, storage.size, storage.reversed)
    assert found == expected
    assert others and all(other.overlap < best.overlap for other in others)
    if storage.size == storage.extent:
        assert best.dice_in_view == 1


def test_a_small_field_of_view_does_not_win() -> None:
    """A view of a voxel deep inside a lesion has Dice 1; of the whole reference it shows nothing."""
    pairs = stored_pairs(STORES["cut through the lesions"])
    best = search_transforms(pairs)[0]
    assert 0.3 < best.in_view_fraction < 0.8
    assert best.overlap == pytest.approx(
        np.mean([2 * f / (1 + f) for f in (p.own.sum() / p.reference.sum() for p in pairs)]), abs=1e-12
    )


def judged(table: TransformTable, pair: Pair) -> tuple[float, float, float]:
    """Overlap, Dice in view and share in view, by mapping the mask."""
    transform = resolve_transform(table, pair.own.shape, pair.shape)
    mapped = map_nearest(pair.own, transform, pair.shape)
    inside = map_nearest(np.ones(pair.own.shape, np.bool_), transform, pair.shape)
    shared, in_view = int((mapped & pair.reference).sum()), int((inside & pair.reference).sum())
    total = int(mapped.sum()) + in_view
    whole = int(pair.reference.sum())
    return 2 * shared / (int(mapped.sum()) + whole), 2 * shared / total if total else 0.0, in_view / whole


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(ORDERS),
    st.tuples(*[st.integers(-4, 6)] * 3),
    st.tuples(*[st.integers(2, 14)] * 3),
    st.tuples(*[st.booleans()] * 3),
    st.integers(0, 99),
)
def test_overlaps_are_those_of_the_mapped_mask(
    source: Triple, start: Any, extent: Any, is_reversed: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    own, reference = rng.random((7, 6, 9)) < 0.3, rng.random((8, 10, 9)) < 0.3
    table = TransformTable(source_axis=source, start=start, extent=extent, reversed=is_reversed)
    pair = Pair("s", own, reference)
    found = ingest.propose.judged(table, [pair])
    expected = judged(table, pair)
    assert (found.overlaps[0], found.dice_in_view, found.in_view_fraction) == pytest.approx(expected, abs=1e-12)
    assert 0 <= found.overlap <= found.dice_in_view + 1e-12


def test_thinned_pairs_estimate_the_overlap() -> None:
    pair = stored_pairs(STORES["at two thirds"], 1, share=0.2)[0]
    thin = Pair("s", pair.own, pair.reference, thinned_to=500)
    assert len(thin.own_voxels) <= 500 and len(thin.reference_voxels) <= 500
    table = TransformTable(reversed=(False, False, True))
    whole, estimate = (ingest.propose.judged(table, [p]).overlap for p in (pair, thin))
    assert estimate == pytest.approx(whole, abs=0.08)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 99))
def test_profile_overlaps_equal_their_definition(extent: int, length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    own, reference = rng.random(extent), rng.random(length)
    own, reference = own / own.sum(), reference / reference.sum()
    found = ingest.propose.profile_overlaps(own, reference, -8, 9)
    for start, score in zip(range(-8, 9), found, strict=True):
        inside = [x for x in range(length) if 0 <= x - start < extent]
        in_view = sum(reference[x] for x in inside)
        shared = sum(min(own[x - start] * in_view, reference[x]) for x in inside)
        assert score == pytest.approx(2 * shared / (1 + in_view), abs=1e-12)


def sphere(centre: Triple, radius: float) -> Mask:
    offset = np.indices(SHAPE) - np.reshape(centre, (3, 1, 1, 1))
    return np.square(offset).sum(axis=0) <= radius**2


def test_exact_ties_are_named_and_the_simplest_comes_first() -> None:
    """A sphere in the middle of axis 1 looks the same when that axis runs backwards."""
    masks = [np.maximum(mask, np.flip(mask, 1)) for mask in (sphere((12, 18, 11), 6), sphere((14, 20, 25), 5))]
    pairs = [Pair(f"s{i}", mask, mask) for i, mask in enumerate(masks)]
    proposals = search_transforms(pairs)
    assert proposals[0].table.reversed == NOT_REVERSED
    assert proposals[0].overlaps == proposals[1].overlaps == (1, 1)
    assert proposals[1].table.reversed == (False, True, False)
    search = Search(("s0", "s1"), proposals, None, None)
    assert "too symmetric" in str(search.likeness(proposals[1], 0.01))


def test_near_ties_are_named() -> None:
    first, second, third = (Proposal(TransformTable(), overlaps, 1, 1) for overlaps in [(0.9,), (0.895,), (0.5,)])
    search = Search(("s",), (first, second, third), None, None)
    assert "0.0050 below the best: too close" in str(search.likeness(second, 0.01))
    assert search.likeness(third, 0.01) is None


def test_grids_that_differ_between_subjects_are_declared_by_word() -> None:
    shapes: list[Triple] = [(36, 44, 40), (30, 40, 44), (34, 42, 38)]
    masks = [blobs(seed, shape) for seed, shape in enumerate(shapes)]
    whole = [Pair(f"s{i}", np.flip(mask, 0).transpose(2, 0, 1), mask) for i, mask in enumerate(masks)]
    found = search_transforms(whole)[0]
    assert (found.table.source_axis, found.table.reversed) == ((1, 2, 0), (True, False, False))
    assert (found.table.start, found.table.extent, found.overlap) == ((0, 0, 0), ("full", "full", "full"), 1)
    cropped = [
        Pair(f"s{i}", mask[:, :, (n := mask.shape[2] - 30) // 2 : n // 2 + 30], mask) for i, mask in enumerate(masks)
    ]
    found = search_transforms(cropped)[0]
    assert (found.table.start[2], found.table.extent[2], found.dice_in_view) == ("centre", 30, 1)


def test_one_slice() -> None:
    masks = [blobs(seed)[:, :, 18:19] for seed in range(3)]
    pairs = [Pair(f"s{i}", np.flip(mask, 1), mask) for i, mask in enumerate(masks)]
    found = search_transforms(pairs)[0]
    assert (found.table.source_axis, found.table.reversed, found.overlap) == ((0, 1, 2), (False, True, False), 1)


@given(
    st.sampled_from(ORDERS),
    st.tuples(*[st.one_of(st.integers(-9, 99), st.just("centre"))] * 3),
    st.tuples(*[st.one_of(st.integers(1, 99), st.just("full"))] * 3),
    st.tuples(*[st.booleans()] * 3),
)
def test_study_lines_are_read_back_as_the_transform(source: Triple, start: Any, extent: Any, flags: Any) -> None:
    table = TransformTable(source_axis=source, start=start, extent=extent, reversed=flags)
    assert TransformTable.model_validate(tomllib.loads(study_lines(table))) == table


@pytest.mark.parametrize("method", ["diffuse", "sharp", "sharp_twin", "coarse"])
def test_the_phantoms_stores_are_found_whatever_is_declared(phantom_study: Path, method: str) -> None:
    study = load_study(phantom_study)
    search = propose(study, method, 6)
    assert len(search.subject_ids) == 6
    assert search.declared_place == 0
    assert search.declared is not None and search.declared.overlaps == search.proposals[0].overlaps


def test_methods_that_cannot_be_searched_are_refused(phantom_study: Path) -> None:
    study = load_study(phantom_study)
    with pytest.raises(BadInput, match="declares no method nothing"):
        propose(study, "nothing")
    blind = study.file.method[0].model_copy(update={"own_reference": None})
    blinded = study.file.model_copy(update={"method": (blind,)})
    with pytest.raises(BadInput, match="scores must not choose"):
        propose(type(study)(study.path, blinded, study.subjects, study.protocol), blind.id)


def test_the_command_prints_lines_and_refuses_with_2(
    phantom_study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mirto", "propose", str(phantom_study), "diffuse", "--subjects", "3"])
    with pytest.raises(SystemExit) as end:
        mirto.main()
    assert not end.value.code
    out = capsys.readouterr().out
    assert "No transform brings" not in out
    assert "From the own references of 3 subjects" in out and "(as declared)" in out
    assert "source_axis = [1, 0, 2]" in out and "reversed = [false, true, false]" in out
    monkeypatch.setattr(sys, "argv", ["mirto", "propose", str(phantom_study), "nothing"])
    with pytest.raises(SystemExit) as end:
        mirto.main()
    assert end.value.code == mirto.BAD_INPUT
    assert "declared: diffuse, sharp, sharp_twin, coarse" in capsys.readouterr().err
