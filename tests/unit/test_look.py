"""Pictures of maps with their references: what is drawn, and that it is drawn."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import mirto
from expectations.study import Study, load_study
from ingest.grid import Candidate
from ingest.look import Look, View, candidate_name, draw, edges, look_at
from ingest.problems import BadInput

Mask = NDArray[np.bool_]


def spoilt(study: Study) -> Study:
    """The study with the first method's reversal forgotten."""
    first, *others = study.file.method
    transform = first.transform.model_copy(update={"reversed": (False, False, False)})
    methods = (first.model_copy(update={"transform": transform}), *others)
    return replace(study, file=study.file.model_copy(update={"method": methods}))


def test_a_good_transform_stands_above_its_best_rival(phantom_study: Path) -> None:
    look = look_at(load_study(phantom_study), "diffuse", "phantom01")
    declared, rival = look.views
    assert declared.name == "as declared" and rival.name != "as declared"
    assert declared.dice == 1 and rival.dice is not None and rival.dice < 0.9
    assert declared.own is not None and np.array_equal(declared.own, look.reference)
    assert not look.is_misplaced


def test_a_forgotten_reversal_stands_below_what_mends_it(phantom_study: Path) -> None:
    study = load_study(phantom_study)
    look, good = look_at(spoilt(study), "diffuse", "phantom01"), look_at(study, "diffuse", "phantom01")
    declared, rival = look.views
    assert look.title == "diffuse, phantom01: MISREGISTERED, flip 1 fits better than the declared transform"
    assert (rival.name, rival.dice) == ("flip 1", 1)
    assert declared.dice is not None and declared.dice < 0.5
    assert np.array_equal(rival.scores, good.views[0].scores)
    assert rival.own is not None and np.array_equal(rival.own, look.reference)


def test_a_baseline_has_one_view(phantom_study: Path) -> None:
    (view,) = look_at(load_study(phantom_study), "FLAIR", "phantom01").views
    assert (view.name, view.own, view.dice) == ("as declared", None, None)


def test_a_subject_without_reference_is_drawn(phantom_study: Path, tmp_path: Path) -> None:
    look = look_at(load_study(phantom_study), "sharp", "phantom15")
    assert not look.reference.any() and look.views[0].dice is None
    assert look.slices and all(look.box[2].start <= index < look.box[2].stop for index in look.slices)
    draw(look, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_declared_is_refused(phantom_study: Path) -> None:
    study = load_study(phantom_study)
    with pytest.raises(BadInput, match="no method nothing"):
        look_at(study, "nothing", "phantom01")
    with pytest.raises(BadInput, match="no subject nobody"):
        look_at(study, "diffuse", "nobody")


def look_of(reference: Mask) -> Look:
    scores = np.zeros(reference.shape, np.float32)
    first, second, third = (slice(0, n) for n in reference.shape)
    view = View("as declared", scores, None, None)
    return Look("m", "s", reference, (view,), (first, second, third), (1.0, 1.0, 1.0), False)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.sampled_from([0.0, 0.02, 0.2]), st.integers(0, 99))
def test_slices_hold_the_reference_at_the_quartiles(depth: int, share: float, seed: int) -> None:
    reference = np.random.default_rng(seed).random((5, 4, depth)) < share
    slices = look_of(reference).slices
    held = np.flatnonzero(reference.any(axis=(0, 1))) if reference.any() else np.arange(depth)
    assert 1 <= len(slices) <= 3 and slices == sorted(set(slices))
    assert set(slices) <= set(held.tolist())
    middle = (held[0] + held[-1]) / 2
    assert min(abs(index - middle) for index in slices) == np.abs(held - middle).min()


def test_the_frame_leaves_out_what_holds_nothing() -> None:
    reference = np.zeros((60, 50, 3), np.bool_)
    reference[20:25, 30:40, 1] = True
    assert look_of(reference).frame == (slice(16, 29), slice(26, 44))
    assert look_of(np.zeros((6, 5, 3), np.bool_)).frame == (slice(0, 6), slice(0, 5))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 6), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 99))
def test_edges_are_the_sides_between_a_mask_and_the_rest(width: int, height: int, share: float, seed: int) -> None:
    mask = np.random.default_rng(seed).random((width, height)) < share
    sides: set[tuple[float, float]] = set()  # centres of unit sides
    for i, j in np.argwhere(mask):
        for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            inside = 0 <= i + di < width and 0 <= j + dj < height
            if not (inside and mask[i + di, j + dj]):
                sides.add((i + di / 2, j + dj / 2))
    found: list[tuple[float, float]] = []
    for start, end in edges(mask):
        length = float(np.abs(end - start).sum())
        for step in np.arange(0.5, length, 1.0):
            x, y = start + (end - start) * step / length
            found.append((float(x), float(y)))
    assert sorted(found) == sorted(sides)


def test_candidates_are_named_as_in_the_marts() -> None:
    assert candidate_name(Candidate(False, False, False, 0)) == "as declared"
    assert candidate_name(Candidate(True, False, True, -2)) == "transpose + flip 1 + offset -2"
    assert candidate_name(Candidate(False, True, False, 3)) == "flip 0 + offset +3"


def test_the_command_draws_a_png_and_refuses_with_2(
    phantom_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, code in ((["sharp_twin", "phantom02"], 0), (["sharp_twin", "nobody"], mirto.BAD_INPUT)):
        monkeypatch.setattr(sys, "argv", ["mirto", "look", str(phantom_study), *arguments])
        with pytest.raises(SystemExit) as end:
            mirto.main()
        assert (end.value.code or 0) == code
    captured = capsys.readouterr()
    assert "sharp_twin, phantom02: no candidate fits better than the declared transform." in captured.out
    assert "Drawn in look_sharp_twin_phantom02.png" in captured.out
    assert "no subject nobody" in captured.err
    assert Path("look_sharp_twin_phantom02.png").read_bytes().startswith(b"\x89PNG")
