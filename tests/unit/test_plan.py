import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import ingest.plan
from expectations.protocol import declaration
from expectations.store import Part
from expectations.study import load_study
from expectations.tables import LakeTable, lake_tables
from ingest.plan import (
    DiagnosticTask,
    Entry,
    Exchanged,
    Fingerprints,
    MapInputs,
    Plan,
    Scale,
    Source,
    SubjectInputs,
    Task,
    plan_study,
)

STUDY = """
[study]
name = "plan"
voxel_size_mm = [1.0, 1.0, 3.0]
subjects = "subjects.csv"

[files]
reference = "reference/{subject_id}.nii"
brain = "brain/{subject_id}.nii"

[files.intensity]
FLAIR = "flair/{subject_id}.nii"
T2 = "t2/{subject_id}.nii"

[[method]]
id = "residual"
map = "residual/{subject_id}.nii"
own_reference = "residual/{subject_id}_own.nii"
family = "reconstruction"

[[method]]
id = "feature"
map = "feature/{subject_id}.nii"
score_scale = {quantiles = [0.01, 0.99]}
legacy_voxel_mm3 = 8.0

[[baseline]]
id = "z-flair"
intensity = "FLAIR"
"""
SUBJECTS = "subject_id,split,site\ns2,test,a\ns1,validation,a\ns3,validation,b\n"
FROZEN = Scale("quantiles", -1.5, 4.25)
Stamps = dict[tuple[str, str], str]
Content = tuple[str, str, str | None, str | None]

# What each table depends on, said once more and apart from `tables.toml`: a table that is added or that reads something
# else must say so here too.
SUPPORTED = {"reference", "reference_labels", "support"}
# own_mapped is the own reference through the transform; round_trip goes to the grid of the stored map and back
REFERENCES = {"own_reference", "own_labels", "map", "transform", *SUPPORTED}
SCORES = {"map", "nan_outside_brain", "support", "transform"}
MEASURED = {"scale", *REFERENCES, *SCORES}
# an own reference is refused where its shape is not its map's, so the gate reads the map too
GATE = {"map", "reference", "reference_labels", "own_reference", "own_labels", "transform", "voxel_size"}
# a diagnostic reads the map under several transforms, and the canonical reference in the brain alone
VARIANTS = {"scale", "voxel_size", *SUPPORTED, *SCORES}
READS = {
    "subject": {"split", "voxel_size", *SUPPORTED},
    "method": {"position", "family", "training_set", "legacy", "transform"},
    "source_file": {"map", "own_reference", "reference", "brain", "intensity", "path", "transform", "voxel_size"},
    "gate_candidate": GATE,
    "gate_overlap": GATE,
    "score_quantile": {"quantiles", *SCORES},
    "score_scale": {"scale"},
    "threshold_curve": {"voxel_size", "legacy", "minimum_component_mm3", *MEASURED},
    "lesion": {"contrast", "voxel_size", "lesion_floor_mm3", *REFERENCES},
    "lesion_curve": {"voxel_size", "legacy", "minimum_component_mm3", "lesion_floor_mm3", *MEASURED},
    "lesion_match": {"scale", "voxel_size", "minimum_component_mm3", "lesion_floor_mm3", *SUPPORTED, *SCORES},
    "lesion_evidence": {"scale", "voxel_size", "lesion_floor_mm3", *SUPPORTED, *SCORES},
    "region_curve": {"scale", "voxel_size", *SUPPORTED, *SCORES},
    "component_overlap": {"scale", *SUPPORTED, *SCORES},
    "voxel_ranking": MEASURED,
    "score_histogram": MEASURED,
    "critical_threshold": {"voxel_size", "legacy", "budgets_cm3", *MEASURED},
    "slice_score": {"voxel_size", *MEASURED},
    "slice_ranking": {"voxel_size", *MEASURED},
    "variant_ranking": {"alternative_transform", "seed", "reference_dilation_share", *VARIANTS},
    "variant_curve": {"alternative_transform", "seed", "reference_dilation_share", "lesion_floor_mm3", *VARIANTS},
    "exchange_ranking": {"exchanged", *VARIANTS},
    "exchange_curve": {"exchanged", "lesion_floor_mm3", *VARIANTS},
    "candidate_ranking": {"scale", *SUPPORTED, *SCORES},
}
DIAGNOSTICS = {name for name, table in lake_tables().items() if "diagnosis" in table.parts}


def planned(folder: Path, text: str = STUDY, subjects: str = SUBJECTS) -> Plan:
    folder.mkdir(exist_ok=True)
    (folder / "study.toml").write_text(text)
    (folder / "subjects.csv").write_text(subjects)
    return plan_study(load_study(folder / "study.toml"))


def content(source: Source) -> Content:
    """What a fake file holds: the same whatever its name and folder."""
    return source.role, source.subject_id, source.method_id, source.contrast


def fingerprints(plan: Plan, rewritten: frozenset[Content] = frozenset()) -> Fingerprints:
    digests: dict[str, tuple[str, int]] = {}
    for source in plan.sources:
        version = f"{content(source)} {content(source) in rewritten}"
        digests[source.url] = (hashlib.sha256(version.encode()).hexdigest(), 1000)
    return Fingerprints(plan, digests)


def diagnostic_parts(
    plan: Plan, prints: Fingerprints, entry: Entry, subject: SubjectInputs, frozen: Scale
) -> list[Part]:
    """Diagnostic parts of a method and test subject; none of others."""
    if entry.kind != "method" or subject.split != "test":
        return []
    other = plan.next_in_split(subject)
    exchanged = None if other is None else Exchanged(other, plan.maps[entry.method_id, other.subject_id].map)
    return prints.diagnostic_parts(entry, subject, entry.fixed_scale or frozen, exchanged)


def stamps(plan: Plan, rewritten: frozenset[Content] = frozenset(), frozen: Scale = FROZEN) -> Stamps:
    """The fingerprint of every part of a plan."""
    prints = fingerprints(plan, rewritten)
    parts = [prints.method_part(entry) for entry in plan.entries]
    parts += [prints.scale_part(entry, entry.fixed_scale or frozen) for entry in plan.entries]
    for subject in plan.subjects:
        parts += [*prints.subject_parts(subject), prints.file_part(None, subject.subject_id, subject.sources)]
        for entry in plan.entries:
            inputs = plan.maps[entry.method_id, subject.subject_id]
            parts += prints.measurement_parts(entry, subject, entry.fixed_scale or frozen)
            parts += [prints.quantile_part(entry, subject)] if entry.quantiles else []
            parts += diagnostic_parts(plan, prints, entry, subject, frozen)
            parts += [prints.file_part(entry, subject.subject_id, inputs.sources)] if entry.kind == "method" else []
    found = {(part.table, part.owner): part.fingerprint for part in parts}
    assert len(found) == len(parts)
    return found


def changed(before: Stamps, after: Stamps) -> set[tuple[str, str]]:
    return {key for key in before.keys() & after.keys() if before[key] != after[key]}


def readers(keys: Stamps, ingredient: str, owners: str) -> set[tuple[str, str]]:
    """Parts of the tables that read an ingredient, of the owners that a pattern matches."""
    return {(table, o) for table, o in keys if ingredient in READS[table] and fnmatchcase(o, owners)}


@dataclass(frozen=True)
class Change:
    """A change of a study and what it reaches, as (ingredient, owners) pairs."""

    reaches: tuple[tuple[str, str], ...]
    edits: tuple[tuple[str, str], ...] = ()
    rewritten: frozenset[Content] = frozenset()
    subjects: str = SUBJECTS
    frozen: Scale = FROZEN


def rewrite(
    reaches: tuple[tuple[str, str], ...], role: str, method: str | None = None, kind: str | None = None
) -> Change:
    return Change(reaches, rewritten=frozenset({(role, "s1", method, kind)}))


def edit(old: str, new: str, *reaches: tuple[str, str]) -> Change:
    return Change(reaches, edits=((old, new),))


MAP = 'map = "residual/{subject_id}.nii"'
NO_MASK = ('brain = "brain/{subject_id}.nii"\n', "")
CHANGES = {
    "map": rewrite((("map", "residual@s1"),), "map", "residual"),
    "map scaled by quantiles": rewrite((("map", "feature@s1"),), "map", "feature"),
    "own reference": rewrite((("own_reference", "residual@s1"),), "own_reference", "residual"),
    "reference": rewrite((("reference", "*@s1"),), "reference"),
    "brain": rewrite((("support", "*@s1"), ("brain", "@s1")), "brain"),
    "image of a baseline": rewrite(
        (("map", "z-flair@s1"), ("intensity", "@s1"), ("contrast", "*@s1")), "intensity", kind="FLAIR"
    ),
    "image that nothing reads": rewrite((("intensity", "@s1"),), "intensity", kind="T2"),
    "source axis": edit(MAP, f"{MAP}\ntransform.source_axis = [1, 0, 2]", ("transform", "residual@*")),
    "start": edit(MAP, f'{MAP}\ntransform.start = ["centre", 0, 0]', ("transform", "residual@*")),
    "extent": edit(MAP, f'{MAP}\ntransform.extent = [9, "full", "full"]', ("transform", "residual@*")),
    "reversal": edit(MAP, f"{MAP}\ntransform.reversed = [true, false, false]", ("transform", "residual@*")),
    "align": edit(MAP, f'{MAP}\ntransform.align = "corner"', ("transform", "residual@*")),
    "the default transform, spelt out": edit(MAP, f"{MAP}\ntransform.source_axis = [0, 1, 2]"),
    "alternative transform": edit(
        MAP, f"{MAP}\nalternative_transform.source_axis = [1, 0, 2]", ("alternative_transform", "residual@*")
    ),
    "scale": edit(MAP, f"{MAP}\nscore_scale = [0, 5]", ("scale", "residual@*")),
    "frozen scale": Change((("scale", "feature@*"), ("scale", "z-flair@*")), frozen=Scale("quantiles", -1.5, 4.5)),
    "quantiles": edit("[0.01, 0.99]", "[0.02, 0.99]", ("quantiles", "feature@*")),
    "baseline quantiles": Change(
        (("quantiles", "z-flair@*"),), edits=(("[study]", "[protocol]\nbaseline_quantiles = [0, 1]\n[study]"),)
    ),
    "NaN outside the brain": edit(MAP, f'{MAP}\nnan_outside_brain = "zero"', ("nan_outside_brain", "residual@*")),
    "legacy volume": edit("legacy_voxel_mm3 = 8.0", "legacy_voxel_mm3 = 4.0", ("legacy", "feature@*")),
    "no legacy volume": edit("legacy_voxel_mm3 = 8.0", "", ("legacy", "feature@*")),
    "legacy volume as a whole number": edit("legacy_voxel_mm3 = 8.0", "legacy_voxel_mm3 = 8"),
    "reference labels": edit("[files]", "[files]\nreference_labels = [1]", ("reference_labels", "*")),
    "own labels": edit(MAP, f"{MAP}\nown_reference_labels = [1, 4]", ("own_labels", "residual@*")),
    "voxel size": edit("[1.0, 1.0, 3.0]", "[1.0, 1.0, 2.0]", ("voxel_size", "*")),
    "voxel size of the same volume": edit("[1.0, 1.0, 3.0]", "[3.0, 1.0, 1.0]", ("voxel_size", "*")),
    "voxel size in whole numbers": edit("[1.0, 1.0, 3.0]", "[1, 1, 3]"),
    "split": Change((("split", "@s1"), ("exchanged", "*@s2")), subjects=SUBJECTS.replace("s1,validation", "s1,test")),
    "another column": Change((), subjects=SUBJECTS.replace("s1,validation,a", "s1,validation,b")),
    "order of subjects": Change((), subjects="site,split,subject_id\nb,validation,s3\na,test,s2\na,validation,s1\n"),
    "name of a file": edit("residual/{subject_id}.nii", "renamed/{subject_id}.nii", ("path", "residual@*")),
    "family": edit('"reconstruction"', '"diffusion"', ("family", "residual@*")),
    "training set": edit(MAP, f'{MAP}\ntraining_set = "IXI"', ("training_set", "residual@*")),
    "name of the study": edit('name = "plan"', 'name = "renamed"'),
    "roots": edit('name = "plan"', 'name = "plan"\nroots = ["../data"]'),
}


def is_of_a_new_test_subject(key: tuple[str, str]) -> bool:
    """Whether a part is a diagnostic of a subject that is a validation subject at first."""
    return key[0] in DIAGNOSTICS and not key[1].endswith("@s2")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_reaches_exactly_the_tables_that_depend_on_it(tmp_path: Path, change: Change) -> None:
    text = STUDY
    for old, new in change.edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    before = stamps(planned(tmp_path / "before"))
    after = stamps(planned(tmp_path / "after", text, change.subjects), change.rewritten, change.frozen)
    assert before.keys() == {key for key in after if not is_of_a_new_test_subject(key)}
    expected = {key for ingredient, owners in change.reaches for key in readers(before, ingredient, owners)}
    assert changed(before, after) == expected


# Another value of every parameter that a study may set.
OTHER_VALUES: dict[str, object] = {
    "budgets_cm3": [1.0, 20.0],
    "reference_budget_cm3": 10.0,
    "empty_dice": "one_if_both_empty",
    "centroid_limit_mm": 4.0,
    "overlap_tolerance": 0.02,
    "overlap_floor": 0.8,
    "maximiser_tolerance": 1e-6,
    "gate_failure": "hold_out",
    "margin_warning": 0.02,
    "misregistered": "keep",
    "lesion_floor_mm3": 10.0,
    "minimum_component_mm3": 2000.0,
    "guard_share": 0.05,
    "rcps_delta": 0.05,
    "tie_tolerance": 1e-6,
    "baseline_quantiles": [0.0, 1.0],
    "seed": 7,
    "conformal_split_count": 50,
    "conformal_split_sizes": [5],
    "multiverse_replicates": 50,
    "contrast_replicates": 50,
    "stable_choice_share": 0.9,
    "interval_level": 0.9,
    "slice_calipers_sd": [0.3],
    "borrowed_donor_count": 5,
    "calibration_share": 0.0,  # any other is refused beside the declared validation subjects
    "crossfit_leave_one_out_limit": 5,
    "crossfit_folds": 3,
    "reference_dilation_share": 0.5,
    "permuted_id_share": 0.1,
    "diagnostic_sample_sizes": [10],
    "false_alarm_rate": 0.1,
    "target_power": 0.8,
    "rank_stability_floor": 0.8,
    "anti_location_limit": 0.2,
    "transform_scan_margin": 0.1,
    "offset_scan_count": 10,
}


@pytest.mark.parametrize("name", [name for name, p in declaration().parameter.items() if not p.fixed])
def test_a_parameter_reaches_exactly_the_tables_that_use_it(tmp_path: Path, name: str) -> None:
    value = OTHER_VALUES[name]
    written = f'"{value}"' if isinstance(value, str) else value
    before = stamps(planned(tmp_path))
    after = stamps(planned(tmp_path, f"{STUDY}\n[protocol]\n{name} = {written}\n"))
    baselines = readers(before, "quantiles", "z-flair@*") if name == "baseline_quantiles" else set[tuple[str, str]]()
    assert changed(before, after) == readers(before, name, "*") | baselines
    assert before.keys() == after.keys()


def test_every_table_says_here_what_it_reads() -> None:
    assert set(READS) == set(lake_tables())


def test_everything_that_a_table_depends_on_is_known(tmp_path: Path) -> None:
    found = {table for table, _ in stamps(planned(tmp_path))}
    assert found == set(lake_tables())


def test_tables_of_an_own_reference_are_planned_only_where_there_is_one(tmp_path: Path) -> None:
    owners = {owner for table, owner in stamps(planned(tmp_path)) if table.startswith("gate_")}
    assert owners == {"residual@s1", "residual@s2", "residual@s3"}


def test_without_mask_the_first_image_is_the_support(tmp_path: Path) -> None:
    plan = planned(tmp_path, STUDY.replace(*NO_MASK))
    before = stamps(plan)
    after = stamps(plan, frozenset({("intensity", "s1", None, "FLAIR")}))
    expected = readers(before, "support", "*@s1") | readers(before, "map", "z-flair@s1")
    expected |= readers(before, "contrast", "*@s1") | readers(before, "intensity", "@s1")
    assert changed(before, after) == expected
    after = stamps(plan, frozenset({("intensity", "s1", None, "T2")}))
    assert changed(before, after) == readers(before, "intensity", "@s1")


def test_a_mask_and_an_image_of_the_same_bytes_are_different_supports(tmp_path: Path) -> None:
    masked, plain = planned(tmp_path), planned(tmp_path, STUDY.replace(*NO_MASK))
    for subject in masked.subjects:
        assert subject.brain is not None and subject.support is subject.brain
    digests = {source.url: ("same", 1) for source in masked.sources}
    first, second = Fingerprints(masked, digests), Fingerprints(plain, digests)
    for one, other in zip(masked.subjects, plain.subjects, strict=True):
        assert not set(first.subject_parts(one)) & set(second.subject_parts(other))


def test_without_mask_and_image_the_reference_is_the_grid_of_the_quantiles(tmp_path: Path) -> None:
    head, _, rest = STUDY.replace(*NO_MASK).partition("[files.intensity]")
    plan = planned(tmp_path, head + rest[rest.index("[[method]]") : rest.index("[[baseline]]")])
    assert all(subject.support is None for subject in plan.subjects)
    before, after = stamps(plan), stamps(plan, frozenset({("reference", "s1", None, None)}))
    assert ("score_quantile", "feature@s1") in changed(before, after)


NEW_METHOD = '[[method]]\nid = "new"\nmap = "new/{subject_id}.nii"\n\n'


def test_a_method_that_is_added_measures_only_itself(tmp_path: Path) -> None:
    before = stamps(planned(tmp_path))
    after = stamps(planned(tmp_path, STUDY.replace("[[baseline]]", f"{NEW_METHOD}[[baseline]]")))
    assert {owner.partition("@")[0] for _, owner in after.keys() - before.keys()} == {"new"}
    assert before.keys() < after.keys()
    assert changed(before, after) == {("method", "z-flair@")}


def test_a_method_that_is_declared_first_moves_the_others_and_no_more(tmp_path: Path) -> None:
    before = stamps(planned(tmp_path))
    after = stamps(
        planned(tmp_path, STUDY.replace('[[method]]\nid = "residual"', f'{NEW_METHOD}[[method]]\nid = "residual"'))
    )
    assert changed(before, after) == readers(before, "position", "*")


TRAINED = STUDY.replace('name = "plan"', 'name = "plan"\nprimary_training_set = "IXI"').replace(
    'id = "residual"\n', 'id = "residual"\ntraining_set = "IXI"\n'
)
OTHER_SET = '[[method]]\nid = "residual"\ntraining_set = "MOOD+IXI-HH"\nmap = "mood/{subject_id}.nii"\n\n'


def test_a_training_set_that_is_added_measures_only_itself_and_moves_nothing(tmp_path: Path) -> None:
    before = stamps(planned(tmp_path, TRAINED))
    after = stamps(planned(tmp_path, TRAINED.replace("[[method]]", f"{OTHER_SET}[[method]]", 1)))
    assert {owner.rpartition("@")[0] for _, owner in after.keys() - before.keys()} == {"residual~MOOD+IXI-HH"}
    assert before.keys() < after.keys()
    assert changed(before, after) == set()


def test_other_training_sets_come_last_under_a_name_of_their_own(tmp_path: Path) -> None:
    plan = planned(tmp_path, TRAINED.replace("[[method]]", f"{OTHER_SET}[[method]]", 1))
    assert [(e.method_id, e.model_id, e.kind, e.position) for e in plan.entries] == [
        ("residual", "residual", "method", 0),
        ("feature", "feature", "method", 1),
        ("z-flair", "z-flair", "baseline", 2),
        ("residual~MOOD+IXI-HH", "residual", "configuration", 3),
    ]


def test_a_subject_that_is_added_measures_only_itself(tmp_path: Path) -> None:
    before = stamps(planned(tmp_path))
    after = stamps(planned(tmp_path, subjects=f"{SUBJECTS}s0,test,c\n"))
    assert {owner.partition("@")[2] for _, owner in after.keys() - before.keys()} == {"s0"}
    assert before.keys() < after.keys()
    # but for the map that is exchanged for that of the next test subject, who is the new one
    assert changed(before, after) == readers(before, "exchanged", "*@s2")


def test_an_exchange_follows_the_map_and_the_grid_of_the_other_test_subject(tmp_path: Path) -> None:
    plan = planned(tmp_path, subjects=SUBJECTS.replace("s3,validation", "s3,test"))
    before = stamps(plan)
    after = stamps(plan, frozenset({("map", "s3", "residual", None)}))
    assert changed(before, after) == readers(before, "map", "residual@s3") | readers(before, "exchanged", "residual@s2")
    after = stamps(plan, frozenset({("reference", "s3", None, None)}))
    assert changed(before, after) == readers(before, "reference", "*@s3") | readers(before, "exchanged", "*@s2")
    after = stamps(plan, frozenset({("brain", "s3", None, None)}))
    assert not changed(before, after) & readers(before, "exchanged", "*@s2")


def test_an_own_reference_that_is_added_measures_the_gate_and_what_is_compared_with_it(tmp_path: Path) -> None:
    line = 'own_reference = "residual/{subject_id}_own.nii"\n'
    before, after = stamps(planned(tmp_path, STUDY.replace(line, ""))), stamps(planned(tmp_path))
    assert {table for table, _ in after.keys() - before.keys()} == {"gate_candidate", "gate_overlap"}
    assert changed(before, after) | (after.keys() - before.keys()) == readers(after, "own_reference", "residual@*")


def test_two_methods_of_equal_declarations_and_bytes_share_no_part(tmp_path: Path) -> None:
    twin = STUDY.replace("[[baseline]]", '[[method]]\nid = "twin"\nmap = "twin/{subject_id}.nii"\n\n[[baseline]]')
    plan = planned(tmp_path, twin)
    prints = Fingerprints(plan, {source.url: ("same", 1) for source in plan.sources})
    parts = [
        part
        for entry in plan.entries
        for subject in plan.subjects
        for part in prints.measurement_parts(entry, subject, FROZEN)
    ]
    assert len({part.fingerprint for part in parts}) == len(parts)


@pytest.mark.parametrize("name", lake_tables())
def test_a_table_s_own_version_reaches_that_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plan = planned(tmp_path)
    before, tables = stamps(plan), lake_tables()
    raised: Mapping[str, LakeTable] = {**tables, name: replace(tables[name], version=tables[name].version + 1)}
    monkeypatch.setattr(ingest.plan, "lake_tables", lambda: raised)
    assert changed(before, stamps(plan)) == {key for key in before if key[0] == name}


def test_the_measuring_version_reaches_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path)
    before = stamps(plan)
    monkeypatch.setattr(ingest.plan, "MEASURING_VERSION", ingest.plan.MEASURING_VERSION + 1)
    assert changed(before, stamps(plan)) == set(before)


def test_fingerprints_do_not_depend_on_where_the_study_lies(tmp_path: Path) -> None:
    assert stamps(planned(tmp_path / "here")) == stamps(planned(tmp_path / "there"))


def test_entries_are_methods_then_baselines_in_declared_order(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert [(e.method_id, e.kind, e.position) for e in plan.entries] == [
        ("residual", "method", 0),
        ("feature", "method", 1),
        ("z-flair", "baseline", 2),
    ]
    residual, feature, baseline = plan.entries
    assert (residual.fixed_scale, residual.quantiles) == (Scale("identity", 0.0, 1.0), None)
    assert (feature.fixed_scale, feature.quantiles) == (None, (0.01, 0.99))
    assert (baseline.fixed_scale, baseline.quantiles) == (None, (0.001, 0.999))
    assert baseline.legacy_voxel_mm3 is None


def test_a_fixed_scale(tmp_path: Path) -> None:
    plan = planned(tmp_path, STUDY.replace(MAP, f"{MAP}\nscore_scale = [-2, 5]"))
    assert plan.entries[0].fixed_scale == Scale("range", -2.0, 5.0)


def test_subjects_are_sorted_and_their_files_are_filled_in(tmp_path: Path) -> None:
    plan = planned(tmp_path, STUDY.replace("t2/{subject_id}", "{site}/{subject_id}_t2"))
    assert [(s.subject_id, s.split) for s in plan.subjects] == [
        ("s1", "validation"),
        ("s2", "test"),
        ("s3", "validation"),
    ]
    last = plan.subjects[2]
    assert last.reference == Source(str(tmp_path / "reference/s3.nii"), "reference/s3.nii", "reference", "s3")
    assert last.brain is not None
    assert (last.brain.path, last.brain.role) == ("brain/s3.nii", "brain")
    assert {contrast: source.path for contrast, source in last.intensity.items()} == {
        "FLAIR": "flair/s3.nii",
        "T2": "b/s3_t2.nii",
    }
    own = plan.maps["residual", "s3"].own_reference
    assert own is not None
    assert (own.path, own.role, own.method_id) == ("residual/s3_own.nii", "own_reference", "residual")


def test_a_baseline_reads_the_image_of_the_subject(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    for subject in plan.subjects:
        assert plan.maps["z-flair", subject.subject_id] == MapInputs(subject.intensity["FLAIR"], None)


def test_every_file_of_a_study_is_listed_once(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    paths = [source.path for source in plan.sources]
    assert len(set(paths)) == len(paths) == 3 * (4 + 2 + 1)
    used = {s.url for inputs in plan.maps.values() for s in inputs.sources} | {
        s.url for u in plan.subjects for s in u.sources
    }
    assert {source.url for source in plan.sources} == used


@pytest.mark.parametrize(
    "text",
    [
        STUDY,
        STUDY.replace("legacy_voxel_mm3 = 8.0", 'own_reference = "residual/{subject_id}_own.nii"'),
        STUDY.replace("feature/{subject_id}", "residual/{subject_id}"),
    ],
    ids=["files of their own", "two methods share their own references", "two methods share their maps"],
)
def test_rows_of_source_files_never_repeat_their_key(tmp_path: Path, text: str) -> None:
    key = lake_tables()["source_file"].key
    rows = [tuple(asdict(source)[name] for name in key) for source in planned(tmp_path, text).sources]
    assert len(set(rows)) == len(rows)


def test_a_task_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    entry, subject = plan.entries[0], plan.subjects[0]
    parts = fingerprints(plan).measurement_parts(entry, subject, FROZEN)
    inputs = plan.maps[entry.method_id, subject.subject_id]
    task = Task(entry, subject, inputs, FROZEN, plan.voxel_size_mm, plan.parameters, tuple(parts))
    assert pickle.loads(pickle.dumps(task)) == task
    assert [source.role for source in task.sources] == ["map", "own_reference", "reference", "brain"]


def test_a_diagnostic_task_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    plan = planned(tmp_path, subjects=SUBJECTS.replace("s3,validation", "s3,test"))
    entry, subject = plan.entries[0], plan.subjects[1]
    other = plan.next_in_split(subject)
    assert other is not None
    exchanged = Exchanged(other, plan.maps[entry.method_id, other.subject_id].map)
    parts = fingerprints(plan).diagnostic_parts(entry, subject, FROZEN, exchanged)
    inputs = plan.maps[entry.method_id, subject.subject_id]
    task = DiagnosticTask(
        entry, subject, inputs, FROZEN, plan.voxel_size_mm, plan.parameters, tuple(parts), exchanged=exchanged
    )
    assert pickle.loads(pickle.dumps(task)) == task
    assert [(s.role, s.subject_id) for s in task.sources] == [
        ("map", "s2"),
        ("reference", "s2"),
        ("brain", "s2"),
        ("map", "s3"),
        ("reference", "s3"),
    ]
