"""`mirto gate` on synthetic spheres, off centre and off the diagonal: every verdict, and the lines that mend it."""

import json
import os
import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion

import mirto
from expectations.study import TransformTable, load_study
from expectations.tables import lake_tables
from ingest.digests import digest_all
from ingest.grid import Candidate
from ingest.jobs import InProcess
from ingest.look import candidate_name
from ingest.phantom import write_volume
from ingest.plan import Fingerprints, plan_study
from ingest.run import Ingest
from ingest.volumes import resolve_transform
from marts.gate import judge
from marts.release import build_tables, open_for_building

Mask = NDArray[np.bool_]
Run = Callable[..., tuple[int, str, str]]
Rows = dict[str, dict[str, Any]]

SHAPE = (40, 44, 32)
SPHERES = {"s1": ((14, 28, 14), 10.0), "s2": ((13, 29, 16), 10.5), "s3": ((15, 27, 13), 11.0)}
UNIT_MM = (1.0, 1.0, 1.0)
VIEW = 17  # of 40 voxels along axis 0: the view of `cropped` removes 40 % of the largest sphere, less of the others


def sphere(centre: tuple[int, int, int], radius: float) -> Mask:
    offset = np.indices(SHAPE) - np.reshape(centre, (3, 1, 1, 1))
    return np.square(offset).sum(axis=0) <= radius**2


def resized(subject: str, volume_ratio: float) -> Mask:
    """The subject's sphere at another volume; nothing for the subject without a lesion."""
    if subject not in SPHERES:
        return np.zeros(SHAPE, np.bool_)
    centre, radius = SPHERES[subject]
    return sphere(centre, radius * volume_ratio ** (1 / 3))


# How each method stores its own reference of a subject; all but `cropped` declare the whole grid as it stands.
Stores = Mapping[str, Callable[[str, Mask], Mask]]
STORES: Stores = {
    "identity": lambda _, mask: mask,
    "cropped": lambda _, mask: mask[:VIEW],
    "eroded": lambda _, mask: binary_erosion(mask),
    "dilated": lambda subject, _: resized(subject, 1.2),
    "flipped_0": lambda _, mask: np.flip(mask, 0),
    "flipped_1": lambda _, mask: np.flip(mask, 1),
    "transposed": lambda _, mask: mask.transpose(1, 0, 2),
    "offset": lambda _, mask: np.roll(mask, 2, axis=2),
    "nested": lambda subject, _: resized(subject, 0.2),
    "away": lambda _, mask: mask,
    "empty": lambda _, mask: np.zeros_like(mask),
    "one_flipped": lambda subject, mask: np.flip(mask, 0) if subject == "s2" else mask,
}
TRANSFORMS = {
    "cropped": f"extent = [{VIEW}, 44, 32]",
    "away": "start = [60, 0, 0]",
    "offset": 'start = [0, 0, "centre"]',
    "flipped_1": "reversed = [false, false, true]",  # what it is is seen on the axes in plane alone
    "transposed": "source_size = [44, 40, 32]",
}


def declared(name: str) -> str:
    own = "" if name == "no_own" else f'own_reference = "{name}/{{subject_id}}_label.nii.gz"\n'
    return f"""
[[method]]
id = "{name}"
map = "{name}/{{subject_id}}.nii.gz"
{own}[method.transform]
{TRANSFORMS.get(name, "")}
"""


def write_study(folder: Path, shape: tuple[int, ...], stores: Stores, references: dict[str, Mask]) -> Path:
    study = """[study]
name = "spheres"
voxel_size_mm = [1.0, 1.0, 1.0]
subjects = "subjects.csv"

[files]
reference = "reference/{subject_id}.nii.gz"
brain = "brain/{subject_id}.nii.gz"
"""
    for subject, reference in references.items():
        write_volume(folder / f"reference/{subject}.nii.gz", reference.astype(np.uint8), UNIT_MM)
        for name, store in stores.items():
            own = store(subject, reference)
            if name == "flipped_1":
                own = np.flip(own, 2)
            write_volume(folder / f"{name}/{subject}_label.nii.gz", own.astype(np.uint8), UNIT_MM)
            write_volume(folder / f"{name}/{subject}.nii.gz", np.full(own.shape, np.nan, np.float32), UNIT_MM)
        write_volume(folder / f"no_own/{subject}.nii.gz", np.zeros(shape, np.float32), UNIT_MM)
    rows = "".join(f"{subject},test\n" for subject in references)
    (folder / "subjects.csv").write_text(f"subject_id,split\n{rows}")
    (folder / "study.toml").write_text(study + "".join(map(declared, [*stores, "no_own"])))
    return folder / "study.toml"


@pytest.fixture(scope="module")
def spheres(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of spheres; its maps hold nothing but NaN and there are no brains: a gate that reads either fails."""
    references = {subject: sphere(*sphere_of) for subject, sphere_of in SPHERES.items()}
    references["s4"] = np.zeros(SHAPE, np.bool_)
    return write_study(tmp_path_factory.mktemp("spheres"), SHAPE, STORES, references)


@pytest.fixture(scope="module")
def gate(spheres: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, dict[tuple[str, str], Any], list[str]]:
    """Rows of `gate_summary` by method, of `gate_subject` by method and subject, and the messages."""
    lake = tmp_path_factory.mktemp("gate")
    measured = Ingest(load_study(spheres), lake, InProcess()).run_gate(is_kept=False)
    assert not measured.report.manifest.failures
    verdicts = judge(lake, measured)
    subjects = {(row["method_id"], row["subject_id"]): row for row in verdicts.subjects.to_dicts()}
    return {row["method_id"]: row for row in verdicts.methods.to_dicts()}, subjects, verdicts.messages


@pytest.mark.parametrize("method", ["identity", "cropped", "eroded", "dilated"])
def test_what_the_gate_must_pass(gate: Any, method: str) -> None:
    methods, subjects, messages = gate
    assert methods[method]["verdict"] == "passed"
    assert {subject: subjects[method, subject]["verdict"] for subject in SPHERES} == dict.fromkeys(SPHERES, "passed")
    assert methods[method]["study_lines"] is None
    assert not [message for message in messages if message.startswith(f"{method}:") and "would give" in message]


def test_the_view_removes_40_percent(gate: Any) -> None:
    _, subjects, _ = gate
    assert min(subjects["cropped", subject]["in_view_fraction"] for subject in SPHERES) == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize(
    ("method", "candidate", "lines"),
    [
        ("flipped_0", "flip 0", "reversed = [true, false, false]"),
        ("flipped_1", "flip 1", "reversed = [false, true, true]"),
        ("transposed", "transpose", "source_axis = [1, 0, 2]\nsource_size = [40, 44, 32]"),
        ("offset", "offset +2", "start = [0, 0, -2]  # moves the field of view too"),
    ],
)
def test_what_the_gate_must_fail_and_how_to_mend_it(gate: Any, method: str, candidate: str, lines: str) -> None:
    methods, subjects, messages = gate
    row = methods[method]
    assert (row["verdict"], row["best_candidate"], row["study_lines"]) == ("failed", candidate, lines)
    assert row["margin"] < -0.05
    assert row["misregistered_count"] == len(SPHERES)
    for subject in SPHERES:
        found = subjects[method, subject]
        assert (found["verdict"], found["best_candidate"], found["study_lines"]) == ("misregistered", candidate, lines)
    (message,) = [message for message in messages if message.startswith(f"{method}:")]
    assert f"{row['best_mean_dice']:.2f}" in message and f"{row['applied_mean_dice']:.2f}" in message
    assert message.endswith(f"under [method.transform] of {method}, write\n{lines}")


def test_the_lines_mend_the_study(spheres: Path, gate: Any, tmp_path: Path) -> None:
    """Pasted into the study, every line that the gate gives makes its method pass."""
    methods, _, _ = gate
    folder = tmp_path / "study"
    folder.symlink_to(spheres.parent)
    text = spheres.read_text()
    for name, row in methods.items():
        if row["verdict"] == "failed":
            fields = {line.split(" = ")[0] for line in row["study_lines"].splitlines()}
            kept = [line for line in TRANSFORMS.get(name, "").splitlines() if line.split(" = ")[0] not in fields]
            pasted = declared(name).replace(TRANSFORMS.get(name, "") or "\x00", "").rstrip()
            mended = "\n".join([pasted, *kept, row["study_lines"]]) + "\n"
            assert declared(name) in text
            text = text.replace(declared(name), mended)
    (spheres.parent / "mended.toml").write_text(text)
    measured = Ingest(load_study(spheres.parent / "mended.toml"), tmp_path / "lake", InProcess()).run_gate(
        is_kept=False
    )
    verdicts = judge(tmp_path / "lake", measured)
    assert not verdicts.has_failed
    mean = dict(verdicts.methods.select("method_id", "applied_mean_dice").iter_rows())
    assert all(mean[name] > 0.999 for name in ("flipped_0", "flipped_1", "transposed", "offset"))


def test_nested_masks_tie_and_pass_with_a_warning(gate: Any) -> None:
    methods, subjects, messages = gate
    assert (methods["nested"]["verdict"], methods["nested"]["margin"]) == ("passed", 0)
    assert {subjects["nested", subject]["verdict"] for subject in SPHERES} == {"label_fidelity"}
    assert [message for message in messages if message.startswith("nested:") and "0.0000 only" in message]


def test_what_cannot_be_assessed_says_why(gate: Any) -> None:
    methods, subjects, messages = gate
    for method in ("no_own", "away"):
        assert (methods[method]["verdict"], methods[method]["not_assessable_count"]) == ("not_assessable", 4)
    assert subjects["no_own", "s1"]["reason"] == "no own reference"
    assert [message for message in messages if message.startswith("no_own: Declare own_reference")]
    assert [
        message for message in messages if message.startswith("away: No reference has a voxel in the field of view")
    ]
    assert subjects["identity", "s4"]["verdict"] == "not_assessable"
    assert methods["identity"]["not_assessable_count"] == 1


def test_an_own_reference_without_voxels_is_no_match(gate: Any) -> None:
    methods, subjects, _ = gate
    assert methods["empty"]["misregistered_count"] == len(SPHERES)
    assert {subjects["empty", subject]["reason"] for subject in SPHERES} == {
        "one of the two references is empty in view"
    }


def test_one_misplaced_subject_is_named_with_the_method_passed(gate: Any) -> None:
    methods, subjects, messages = gate
    assert (methods["one_flipped"]["verdict"], methods["one_flipped"]["misregistered_count"]) == ("passed", 1)
    assert subjects["one_flipped", "s2"]["study_lines"] == "reversed = [true, false, false]"
    (message,) = [message for message in messages if message.startswith("one_flipped, s2: flip 0 would give 1.000")]
    assert message.endswith("reversed = [true, false, false]")


@pytest.mark.parametrize("gate_failure", ["stop", "hold_out"])
def test_a_failed_method_is_ranked_under_no_rule(spheres: Path, tmp_path: Path, gate_failure: str) -> None:
    study = spheres.parent / f"{gate_failure}.toml"
    study.write_text(f'{spheres.read_text()}\n[protocol]\ngate_failure = "{gate_failure}"\n')
    measured = Ingest(load_study(study), tmp_path, InProcess()).run_gate(is_kept=False)
    with open_for_building(None, tmp_path) as connection:
        build_tables(connection, measured.report.manifest, ["ranked_method"], given=measured.given)
        ranked = dict(connection.execute("select method_id, is_ranked from ranked_method").fetchall())
    failed = {"flipped_0", "flipped_1", "transposed", "offset"}
    assert ranked == {name: name not in failed for name in (*STORES, "no_own")}


def test_the_command_prints_messages_and_exits_with_1(run: Run, spheres: Path) -> None:
    code, out, err = run("gate", spheres)
    assert code == mirto.STOPPED
    assert "failed" in out and "not_assessable" in out and "transpose" in out
    assert "\nsource_axis = [1, 0, 2]\nsource_size = [40, 44, 32]\n" in out
    assert "could not be measured" not in err


def test_parts_are_kept_under_the_names_that_ingest_gives_them(run: Run, spheres: Path, tmp_path: Path) -> None:
    code, out, _ = run("gate", spheres, "--lake", tmp_path, "--json")
    assert code == mirto.STOPPED
    printed = json.loads(out)
    assert {row["method_id"] for row in printed["methods"]} == {*STORES, "no_own"}
    assert len(printed["subjects"]) == 4 * (len(STORES) + 1)
    parts = set(tmp_path.glob("parts/*/*.parquet"))
    assert {part.parent.name for part in parts} == {"gate_candidate", "gate_overlap"}
    again = Ingest(load_study(spheres), tmp_path, InProcess()).run_gate(is_kept=True)
    assert (again.report.measured_parts, again.report.kept_parts) == (0, len(parts))
    assert len(parts) == 2 * 4 * len(STORES)
    assert not (tmp_path / "manifest.json").exists()


def test_gate_parts_are_those_of_an_ingest(spheres: Path) -> None:
    plan = plan_study(load_study(spheres))
    stamps = Fingerprints(plan, {source.url: (source.path, 1) for source in plan.sources})
    entry, subject = plan.entries[0], plan.subjects[0]
    assert entry.fixed_scale is not None
    every = stamps.measurement_parts(entry, subject, entry.fixed_scale)
    assert stamps.gate_parts(entry, subject) == [part for part in every if part.table.startswith("gate_")]


def test_hashing_some_files_keeps_what_is_known_of_the_others(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a", "b")]
    for name in names:
        Path(name).write_text(name)
        os.utime(name, (1e9, 1e9))
    cache = tmp_path / "cache.json"
    digest_all(names, cache, lambda: None)
    before = json.loads(cache.read_text())
    Path(names[0]).write_text("new")
    os.utime(names[0], (2e9 - 1e9, 1e9 + 1))
    digest_all(names[:1], cache, lambda: None, are_all=False)
    after = json.loads(cache.read_text())
    assert after.keys() == before.keys() == set(names)
    assert after[names[1]] == before[names[1]] and after[names[0]] != before[names[0]]
    digest_all(names[:1], cache, lambda: None)
    assert json.loads(cache.read_text()).keys() == {names[0]}


def test_a_study_of_good_methods_exits_with_0(run: Run, spheres: Path) -> None:
    study = spheres.parent / "good.toml"
    text = spheres.read_text()
    study.write_text(text[: text.index("[[method]]")] + declared("identity") + declared("cropped"))
    code, out, _ = run("gate", study)
    assert code == 0
    assert "Every method lies where its transform says." in out


def test_a_refused_file_exits_with_2_beside_the_verdicts(run: Run, spheres: Path) -> None:
    study = spheres.parent / "bad.toml"
    label = spheres.parent / "bad" / "s1_label.nii.gz"
    for subject in (*SPHERES, "s4"):
        for end in (".nii.gz", "_label.nii.gz"):
            file = label.with_name(f"{subject}{end}")
            file.parent.mkdir(exist_ok=True)
            file.write_bytes((spheres.parent / "identity" / f"{subject}{end}").read_bytes())
    label.write_bytes(b"no image")
    text = spheres.read_text()
    study.write_text(text[: text.index("[[method]]")] + declared("bad"))
    code, out, err = run("gate", study)
    assert code == mirto.BAD_INPUT
    assert "bad/s1_label.nii.gz" in err
    assert "passed" in out


def test_one_slice_has_8_candidates_and_the_lines_of_a_flip(tmp_path: Path) -> None:
    references = {subject: sphere(*of)[:, :, 14:15] for subject, of in SPHERES.items()}
    stores: Stores = {"identity": STORES["identity"], "flipped_0": STORES["flipped_0"]}
    study = write_study(tmp_path / "study", (40, 44, 1), stores, references)
    measured = Ingest(load_study(study), tmp_path / "lake", InProcess()).run_gate(is_kept=False)
    verdicts = judge(tmp_path / "lake", measured)
    rows = {row["method_id"]: row for row in verdicts.methods.to_dicts()}
    assert rows["identity"]["verdict"] == "passed"
    assert (rows["flipped_0"]["verdict"], rows["flipped_0"]["best_candidate"]) == ("failed", "flip 0")
    assert rows["flipped_0"]["study_lines"] == "reversed = [true, false, false]"
    with open_for_building(None, tmp_path / "lake") as connection:
        build_tables(connection, measured.report.manifest, ["gate_summary"], given=measured.given)
        counts = connection.execute(
            "select distinct count(*), min(dz), max(dz) from gate_candidate group by method_id, subject_id"
        ).fetchall()
    assert counts == [(8, 0, 0)]


def test_study_lines_say_what_each_candidate_is(spheres: Path, tmp_path: Path) -> None:
    """Each of the 56 lines, read back, is the candidate; only an offset differs, by where the field of view lies."""
    study = load_study(spheres)
    measured = Ingest(study, tmp_path, InProcess()).run_gate(is_kept=False)
    with open_for_building(None, tmp_path) as connection:
        build_tables(connection, measured.report.manifest, ["gate_summary"], given=measured.given)
        rows = connection.execute(
            "select method_id, transposed, flip_0, flip_1, dz, candidate, study_lines, reason from gate_change"
        ).fetchall()
    tables = {method.id: method.transform for method in study.file.method}
    assert len(rows) == 56 * len(tables)
    for method, transposed, flip_0, flip_1, dz, name, lines, reason in rows:
        assert reason is None
        assert name == candidate_name(Candidate(transposed, flip_0, flip_1, dz))
        table = tables[method]
        changed = TransformTable.model_validate(table.model_dump(mode="json") | tomllib.loads(lines or ""))
        stored = (44, 40, 32) if table.source_size else SHAPE
        member = resolve_transform(table, stored, SHAPE).candidate(transposed, flip_0, flip_1)
        found = resolve_transform(changed, stored, SHAPE)
        assert (found.source_axis, found.size, found.extent) == (member.source_axis, member.size, member.extent)
        assert found.reversed == member.reversed
        assert found.start == (member.start[0], member.start[1], member.start[2] - dz)


def declared_at_random(count: int) -> dict[str, TransformTable]:
    """Transforms of every axis order, reversal and start, in numbers and in words."""
    draw = random.Random(5)
    orders: list[tuple[int, int, int]] = [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1)]
    tables = [
        TransformTable.model_validate(
            {
                "source_axis": draw.choice(orders),
                "start": [draw.choice([0, -3, 7, "centre"]) for _ in range(3)],
                "extent": [draw.choice(["full", 20, 31]) for _ in range(3)],
                "reversed": [draw.random() < 0.5 for _ in range(3)],
            }
        )
        for _ in range(count)
    ]
    return {f"m{number:02d}": table for number, table in enumerate(tables)}


def test_lines_of_any_declaration_say_what_each_candidate_is(spheres: Path, tmp_path: Path) -> None:
    """Reversals toggle those that are declared, and start[2] moves also where it is written as "centre"."""
    measured = Ingest(load_study(spheres), tmp_path, InProcess()).run_gate(is_kept=False)
    tables = declared_at_random(40)
    rows = [
        (name, name, "method", place, None, None, None, json.dumps(table.model_dump(mode="json"), sort_keys=True))
        for place, (name, table) in enumerate(tables.items())
    ]
    given = {**measured.given, "method": lake_tables()["method"].frame(rows)}
    with open_for_building(None, tmp_path) as connection:
        build_tables(connection, measured.report.manifest, ["gate_change"], given=given)
        found = connection.execute(
            "select method_id, transposed, flip_0, flip_1, dz, study_lines from gate_change"
        ).fetchall()
    assert len(found) == 56 * len(tables)
    for name, transposed, flip_0, flip_1, dz, lines in found:
        changed = TransformTable.model_validate(tables[name].model_dump(mode="json") | tomllib.loads(lines or ""))
        member = resolve_transform(tables[name], (9, 11, 13), SHAPE).candidate(transposed, flip_0, flip_1)
        expected = replace(member, start=(member.start[0], member.start[1], member.start[2] - dz))
        assert resolve_transform(changed, (9, 11, 13), SHAPE) == expected, (tables[name], lines)


def test_an_offset_from_the_centre_of_unlike_grids_cannot_be_said(spheres: Path, tmp_path: Path) -> None:
    study = spheres.parent / "unlike.toml"
    text = spheres.read_text()
    study.write_text(
        text[: text.index("[[method]]")]
        + declared("offset").replace(TRANSFORMS["offset"], 'start = [0, 0, "centre"]\nextent = ["full", "full", 30]')
    )
    measured = Ingest(load_study(study), tmp_path, InProcess()).run_gate(is_kept=False)
    with open_for_building(None, tmp_path) as connection:
        shapes = measured.given["subject"]
        unlike = shapes.with_columns(shape_2=shapes["shape_2"] + (shapes["subject_id"] == "s1").cast(int))
        for given, is_said in ((shapes, True), (unlike, False)):
            with open_for_building(None, tmp_path) as connection:
                build_tables(
                    connection, measured.report.manifest, ["gate_summary"], given={**measured.given, "subject": given}
                )
                lines, reason, suggestion = connection.execute(
                    "select c.study_lines, c.reason, s.suggestion from gate_change as c join gate_summary as s"
                    " using (method_id) where dz = 2 and not transposed and not flip_0 and not flip_1"
                ).fetchall()[0]
            assert (lines == "start = [0, 0, -1]  # moves the field of view too") == is_said
            assert (reason is None) == is_said
            assert ("no one number of voxels" in suggestion) != is_said
