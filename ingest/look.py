"""A picture of one map with its two references, under the declared transform and under the candidate that rivals it.

A misregistration that the gate tells in numbers is seen here: outlines that ought to coincide lie apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from expectations.study import Study
from ingest.gate import CandidateOverlaps, candidate_overlaps
from ingest.grid import Candidate, Transform, field_of_view, map_linear, map_nearest
from ingest.nifti import read_scores
from ingest.plan import Entry, MapInputs, SubjectInputs, plan_study
from ingest.problems import BadInput
from ingest.volumes import Box, Mask, Scores, declared_transform, load_own_reference, load_reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

QUARTILES = (0.25, 0.5, 0.75)  # of the reference's extent through the plane: where slices are shown
# Quantile of the positive scores at which the grey scale ends, so that a few voxels do not dim the rest.
BRIGHTEST = 0.995
# From the palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), told apart in every kind of colour vision.
REFERENCE_COLOUR, OWN_COLOUR = "#E69F00", "#56B4E9"
Dashes = str | tuple[int, tuple[float, float]]
PANEL_INCHES = 3.6
MARGIN = 4  # voxels shown around what holds anything
DASHES = (0, (1.5, 1.5))


@dataclass(frozen=True)
class View:
    """One map under one transform, on the canonical grid.

    Attributes:
        name: The candidate, as changes to the declared transform.
        scores: The map, linearly mapped.
        own: The own reference, mapped by the nearest voxel; None where there is none.
        dice: Of the own reference with the canonical one in the field of view; None without one, or where both are
            empty.
    """

    name: str
    scores: Scores
    own: Mask | None
    dice: float | None


@dataclass(frozen=True)
class Look:
    """What a picture shows: the declared transform, then its best rival where there is an own reference."""

    method_id: str
    subject_id: str
    reference: Mask
    views: tuple[View, ...]
    box: Box
    voxel_mm: tuple[float, float, float]
    is_misplaced: bool

    @property
    def title(self) -> str:
        """Whose map it is, and whether another candidate fits better by the gate's criterion (ii-b)."""
        name, declared = f"{self.method_id}, {self.subject_id}", self.views[0]
        if declared.own is None:
            return f"{name}: the map and the canonical reference"
        if declared.dice is None:
            return f"{name}: no reference in view on either side"
        if self.is_misplaced:
            return f"{name}: MISREGISTERED, {self.views[1].name} fits better than the declared transform"
        return f"{name}: no candidate fits better than the declared transform"

    @property
    def slices(self) -> list[int]:
        """Slices to show: at the quartiles of the reference's extent, each where it holds voxels, without repeats.

        Where the reference is empty: of the own reference's extent; where that is too: of the field of view's.
        """
        own = self.views[0].own
        masks = [self.reference] if own is None else [self.reference, own]
        in_masks = [[int(index) for index in np.flatnonzero(mask.any(axis=(0, 1)))] for mask in masks]
        view, whole = list(range(self.box[2].start, self.box[2].stop)), list(range(self.reference.shape[2]))
        held = next(indices for indices in (*in_masks, view, whole) if indices)
        targets = [held[0] + (held[-1] - held[0]) * share for share in QUARTILES]
        return list(dict.fromkeys(min(held, key=lambda index: abs(index - target)) for target in targets))

    @property
    def frame(self) -> tuple[slice, slice]:
        """In-plane part of the grid that holds a score or a reference, with a margin; the whole where nothing does."""
        masks = [self.reference, *(view.scores != 0 for view in self.views)]
        masks += [view.own for view in self.views if view.own is not None]
        shown = np.any([mask.any(axis=2) for mask in masks], axis=0)
        spans: list[slice] = []
        for axis in (0, 1):
            held = np.flatnonzero(shown.any(axis=1 - axis))
            first, last = (int(held[0]), int(held[-1])) if held.size else (0, shown.shape[axis] - 1)
            spans.append(slice(max(first - MARGIN, 0), min(last + MARGIN + 1, shown.shape[axis])))
        return spans[0], spans[1]


def look_at(study: Study, method_id: str, subject_id: str) -> Look:
    """Read a map with its references and bring them to the canonical grid.

    Args:
        study: The study.
        method_id: A method, or a baseline (which has no own reference).
        subject_id: A subject.

    Raises:
        BadInput: The study has no such method or subject, or a file is refused.
    """
    plan = plan_study(study)
    entry = next((entry for entry in plan.entries if entry.method_id == method_id), None)
    subject = next((subject for subject in plan.subjects if subject.subject_id == subject_id), None)
    if entry is None:
        known = ", ".join(entry.method_id for entry in plan.entries)
        raise BadInput(str(study.path), f"declares no method {method_id} (declared: {known})", "Name one of them")
    if subject is None:
        found = f"has no subject {subject_id}"
        raise BadInput(str(study.path), found, f"Name one of those that {study.file.study.subjects} lists")
    tolerance = plan.parameters.overlap_tolerance
    return _look(entry, subject, plan.maps[method_id, subject_id], plan.voxel_size_mm, tolerance)


def _look(
    entry: Entry,
    subject: SubjectInputs,
    inputs: MapInputs,
    voxel_mm: tuple[float, float, float],
    tolerance: float,
) -> Look:
    reference, values = load_reference(subject.reference), read_scores(inputs.map.url).values
    finite = np.where(np.isfinite(values), values, np.float32(0))  # in the picture alone: measuring refuses them
    transform = declared_transform(entry, inputs.map, values.shape, reference.shape)
    own = None if inputs.own_reference is None else load_own_reference(inputs.own_reference, values.shape)
    members = [(Candidate(False, False, False, 0), None)]
    is_misplaced = False
    if own is not None:
        overlaps = candidate_overlaps(own, reference, transform, voxel_mm)
        members = _declared_and_rival(overlaps)
        (_, declared), (_, rival) = members
        is_misplaced = declared is not None and rival is not None and declared < rival - tolerance
    return Look(
        method_id=entry.method_id,
        subject_id=subject.subject_id,
        reference=reference,
        views=tuple(_view(member, dice, finite, own, transform, reference.shape) for member, dice in members),
        box=field_of_view(transform, _three(reference.shape)),
        voxel_mm=voxel_mm,
        is_misplaced=is_misplaced,
    )


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = shape
    return first, second, third


def _declared_and_rival(found: CandidateOverlaps) -> list[tuple[Candidate, float | None]]:
    """The declared transform and the best of the other candidates, of equal ones that of fewest changes, with Dice."""
    members = [
        Candidate(bool(t), bool(f_0), bool(f_1), int(dz))
        for t, f_0, f_1, dz in zip(found.transposed, found.flip_0, found.flip_1, found.dz, strict=True)
    ]
    dice = [None if np.isnan(value) else float(value) for value in found.dice]
    applied = int(found.is_applied.argmax())
    others = [number for number in range(len(members)) if number != applied]
    changes = [abs(m.dz) + m.transposed + m.flip_0 + m.flip_1 for m in members]
    rival = min(others, key=lambda number: (-(dice[number] or 0.0), changes[number], members[number]))
    return [(members[number], dice[number]) for number in (applied, rival)]


def _view(
    member: Candidate,
    dice: float | None,
    values: Scores,
    own: Mask | None,
    transform: Transform,
    shape: tuple[int, ...],
) -> View:
    moved, grid = transform.candidate(member.transposed, member.flip_0, member.flip_1), _three(shape)
    return View(
        name=candidate_name(member),
        scores=map_linear(values, moved, grid, member.dz),
        own=None if own is None else map_nearest(own, moved, grid, member.dz),
        dice=dice,
    )


def candidate_name(member: Candidate) -> str:
    """A candidate as changes to the declared transform, named as the marts name it."""
    changes = {"transpose": member.transposed, "flip 0": member.flip_0, "flip 1": member.flip_1}
    changes[f"offset {member.dz:+d}"] = member.dz != 0
    return " + ".join(name for name, is_made in changes.items() if is_made) or "as declared"


def draw(look: Look, file: Path) -> None:
    """Draw a picture: a row per view, a column per slice, with the outlines of both references.

    Args:
        look: What to draw.
        file: The PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    slices = look.slices
    width, height = ((s.stop - s.start) * mm for s, mm in zip(look.frame, look.voxel_mm[:2], strict=True))
    ratio = min(max(height / width, 0.5), 2.0)
    size = (PANEL_INCHES * max(len(slices), 2) + 1.8, (PANEL_INCHES * ratio + 0.3) * len(look.views) + 1.0)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(look.views), len(slices), squeeze=False)
    brightest = _brightest(look.views[0].scores)
    image = None
    for place, view in enumerate(look.views):
        for column, slice_index in enumerate(slices):
            image = _panel(grid[place, column], look, view, slice_index, brightest)
            grid[place, column].set_title(f"slice {slice_index}", fontsize=10)
        grid[place, 0].set_ylabel(_row_title(look, place), fontsize=12, labelpad=8)
    figure.suptitle(look.title, fontsize=14)
    if image is not None:
        bar = figure.colorbar(image, ax=grid, shrink=0.6, aspect=30, pad=0.02, extend="max")
        bar.set_label("score, linearly mapped")
    _legend(figure, look)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _brightest(scores: Scores) -> float:
    positive = scores[scores > 0]
    return float(np.quantile(positive, BRIGHTEST)) if positive.size else 1.0


def _row_title(look: Look, place: int) -> str:
    view = look.views[place]
    if view.own is None:
        return "as declared (no own reference)"
    overlap = "both references empty in view" if view.dice is None else f"Dice {view.dice:.3f}"
    what = view.name if place == 0 else f"best other candidate:\n{view.name}"
    return f"{what}\n{overlap}"


def _panel(axes: "Axes", look: Look, view: View, slice_index: int, brightest: float) -> "AxesImage":
    """One slice of one view: axis 0 to the right, axis 1 upwards."""
    image = axes.imshow(
        view.scores[:, :, slice_index].T,
        cmap="gray",
        vmin=0.0,
        vmax=brightest,
        origin="lower",
        interpolation="nearest",
        aspect=look.voxel_mm[1] / look.voxel_mm[0],
    )
    _outline(axes, look.reference[:, :, slice_index], REFERENCE_COLOUR, "solid", 2.6)
    if view.own is not None:
        _outline(axes, view.own[:, :, slice_index], OWN_COLOUR, DASHES, 2.0)
    if not look.box[2].start <= slice_index < look.box[2].stop:
        words = "outside the field of view"
        axes.annotate(words, (0.5, 0.97), xycoords="axes fraction", color="white", ha="center", va="top")
    across, up = look.frame
    axes.set_xlim(across.start - 0.5, across.stop - 0.5)
    axes.set_ylim(up.start - 0.5, up.stop - 0.5)
    axes.set_xticks([])
    axes.set_yticks([])
    return image


def _outline(axes: "Axes", mask: NDArray[np.bool_], colour: str, style: Dashes, width: float) -> None:
    """The outline of a mask along the edges of its voxels; nothing where it is empty."""
    from matplotlib.collections import LineCollection

    segments = edges(mask)
    if len(segments):
        axes.add_collection(LineCollection(list(segments), colors=colour, linestyles=style, linewidths=width))


def edges(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Sides of voxels between a mask and what surrounds it.

    Args:
        mask: A slice, indexed by (axis 0, axis 1).

    Returns:
        Shape (n, 2, 2): the two ends of each side as (axis 0, axis 1), where voxel centres are whole numbers; sides in
        one line that meet are one. Shape (0, 2, 2) for an empty mask.
    """
    padded = np.pad(mask, 1)
    found: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for axis in (0, 1):
        borders = np.diff(padded.astype(np.int8), axis=axis) != 0
        lines = borders if axis == 0 else borders.T
        for line in map(int, np.flatnonzero(lines.any(axis=1))):
            for first, stop in _runs(lines[line]):
                at, start, end = line - 0.5, first - 1.5, stop - 1.5
                found.append(((at, start), (at, end)) if axis == 0 else ((start, at), (end, at)))
    return np.array(found, np.float64).reshape(-1, 2, 2)


def _runs(flags: NDArray[np.bool_]) -> Sequence[tuple[int, int]]:
    """First index of each run of flags that are set, and one past its last."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(first), int(stop)) for first, stop in changes.reshape(-1, 2)]


def _legend(figure: "Figure", look: Look) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=REFERENCE_COLOUR, linewidth=2.6, label="canonical reference")]
    if look.views[0].own is not None:
        label = "the method's own reference, mapped"
        handles.append(Line2D([], [], color=OWN_COLOUR, linewidth=2.0, linestyle=DASHES, label=label))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, facecolor="#333333", labelcolor="white", framealpha=1.0
    )
