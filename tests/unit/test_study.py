import csv
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expectations.study import BadStudy, Problem, Quantiles, Study, exists, load_study, located

STUDY = """
[study]
name = "two methods"
voxel_size_mm = [1.0, 1, 3.0]
subjects = "subjects.csv"

[files]
reference = "reference/{subject_id}.nii.gz"
brain = "brain/{subject_id}.nii.gz"

[files.intensity]
FLAIR = "image/{subject_id}_FLAIR.nii.gz"

[[method]]
id = "residual"
map = "residual/{subject_id}.nii.gz"
own_reference = "residual/{subject_id}_own.nii.gz"

[method.transform]
source_axis = [2, 0, 1]
start = ["centre", 0, -1]
extent = [10, "full", "full"]
reversed = [true, false, false]

[[method]]
id = "feature"
map = "feature/{subject_id}.nii.gz"
legacy_voxel_mm3 = 8
score_scale = [0, 5]

[[baseline]]
id = "flair"
intensity = "FLAIR"

[protocol]
budgets_cm3 = [5, 20]
"""
SUBJECTS = "subject_id,split,site\ns1,validation,north\ns2,test,south\n"
FAST = settings(deadline=None, max_examples=60)


def edited(old: str, new: str, text: str = STUDY) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def lay_out(folder: Path, text: str | bytes = STUDY, subjects: str | bytes | None = SUBJECTS) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "study.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    if subjects is not None:
        content = subjects.encode() if isinstance(subjects, str) else subjects
        (folder / "subjects.csv").write_bytes(content)
    return path


def load(folder: Path, text: str | bytes = STUDY, subjects: str | bytes | None = SUBJECTS) -> Study:
    return load_study(lay_out(folder, text, subjects))


def problems(folder: Path, text: str | bytes = STUDY, subjects: str | bytes | None = SUBJECTS) -> tuple[Problem, ...]:
    """What a study is refused for; every problem names its file, says what was found and what to do, in one line."""
    with pytest.raises(BadStudy) as refused:
        load(folder, text, subjects)
    for problem in refused.value.problems:
        assert Path(problem.file).parent == folder
        assert problem.found.strip() and problem.remedy.strip()
        assert str(problem) in str(refused.value).splitlines()
        for part in (problem.file, problem.field, problem.found, problem.remedy):
            assert part in str(problem)
    return refused.value.problems


def test_a_whole_study(tmp_path: Path) -> None:
    study = load(tmp_path)
    assert study.file.study.voxel_size_mm == (1.0, 1.0, 3.0)
    assert [(s.subject_id, s.split) for s in study.subjects] == [("s1", "validation"), ("s2", "test")]
    assert study.subjects[1].fields == {"subject_id": "s2", "split": "test", "site": "south"}
    assert study.protocol.level_ids("budget_cm3") == ("5", "20")
    residual, feature = study.file.method
    assert residual.transform.source_axis == (2, 0, 1)
    assert residual.transform.start == ("centre", 0, -1)
    assert residual.transform.extent == (10, "full", "full")
    assert residual.transform.reversed == (True, False, False)
    assert (residual.score_scale, feature.score_scale, feature.legacy_voxel_mm3) == ("identity", (0.0, 5.0), 8.0)
    assert study.folder == tmp_path
    assert study.locate(residual.map, study.subjects[0]) == str(tmp_path / "residual/s1.nii.gz")


def test_the_smallest_study(tmp_path: Path) -> None:
    text = """
study = {name = "s", voxel_size_mm = [1, 1, 1], subjects = "subjects.csv"}
files = {reference = "{subject_id}.nii"}
method = [{id = "m", map = "{subject_id}_m.nii"}]
"""
    study = load(tmp_path, text, "subject_id,split\n1,test\n")
    assert study.file.baseline == ()
    assert study.file.method[0].transform.source_axis == (0, 1, 2)
    assert study.protocol.universe_count == 155_520


def test_quantile_scale(tmp_path: Path) -> None:
    study = load(tmp_path, edited("score_scale = [0, 5]", "score_scale = {quantiles = [0.01, 1]}"))
    assert study.file.method[1].score_scale == Quantiles(quantiles=(0.01, 1.0))


def test_a_baseline_alone_is_a_study(tmp_path: Path) -> None:
    head = STUDY.partition("[[method]]")[0]
    study = load(tmp_path, head + '[[baseline]]\nid = "flair"\nintensity = "FLAIR"\n')
    assert study.file.method == ()


@dataclass(frozen=True)
class Refusal:
    old: str
    new: str
    field: str
    found: str
    remedy: str = ""


REFUSALS = {
    "missing name": Refusal('name = "two methods"', "", "study.name", "is missing", "Add it"),
    "missing voxel size": Refusal("voxel_size_mm = [1.0, 1, 3.0]", "", "study.voxel_size_mm", "is missing", "Add"),
    "missing subjects": Refusal('subjects = "subjects.csv"', "", "study.subjects", "is missing", "Add it"),
    "missing reference": Refusal('reference = "reference/{subject_id}.nii.gz"', "", "files.reference", "is missing"),
    "missing map": Refusal('map = "feature/{subject_id}.nii.gz"', "", "method[1].map", "is missing", "Add it"),
    "missing id": Refusal('id = "feature"', "", "method[1].id", "is missing", "Add it"),
    "missing contrast": Refusal('intensity = "FLAIR"', "", "baseline[0].intensity", "is missing", "Add it"),
    "missing table": Refusal("[study]", "[studdy]", "study", "is missing", "Add it"),
    "unknown table": Refusal("[protocol]", "[protocoll]", "protocoll", "is no field", "spelling"),
    "unknown study field": Refusal("name =", 'nmae = "x"\nname =', "study.nmae", "is no field", "spelling"),
    "unknown files field": Refusal("brain =", 'brian = "x"\nbrain =', "files.brian", "is no field", "spelling"),
    "unknown method field": Refusal("legacy_voxel_mm3", "legacy_mm3", "method[1].legacy_mm3", "is no field"),
    "unknown transform field": Refusal("extent =", "extend =", "method[0].transform.extend", "is no field"),
    "unknown baseline field": Refusal('intensity = "FLAIR"', 'intensity = "FLAIR"\nx = 1', "baseline[0].x", "no field"),
    "two voxel sizes": Refusal("[1.0, 1, 3.0]", "[1.0, 1.0]", "study.voxel_size_mm[2]", "missing"),
    "four voxel sizes": Refusal("[1.0, 1, 3.0]", "[1.0, 1, 1, 1]", "study.voxel_size_mm", "[1.0, 1, 1, 1]"),
    "scalar voxel size": Refusal("[1.0, 1, 3.0]", "1.0", "study.voxel_size_mm", "1.0"),
    "voxel size 0": Refusal("[1.0, 1, 3.0]", "[1.0, 0, 3.0]", "study.voxel_size_mm[1]", "found 0", "greater than 0"),
    "negative voxel size": Refusal("[1.0, 1, 3.0]", "[-1.0, 1, 3.0]", "study.voxel_size_mm[0]", "-1.0", "greater"),
    "voxel size nan": Refusal("[1.0, 1, 3.0]", "[1.0, nan, 3.0]", "study.voxel_size_mm[1]", "nan", "finite"),
    "voxel size inf": Refusal("[1.0, 1, 3.0]", "[1.0, 1, inf]", "study.voxel_size_mm[2]", "inf", "finite"),
    "name no text": Refusal('"two methods"', "5", "study.name", "found 5", "string"),
    "map no text": Refusal('"feature/{subject_id}.nii.gz"', '["a"]', "method[1].map", "found ['a']", "string"),
    "blank id": Refusal('id = "feature"', 'id = ""', "method[1].id", "found ''"),
    "id with blank": Refusal('id = "feature"', 'id = "a b"', "method[1].id", "found 'a b'"),
    "id with slash": Refusal('id = "feature"', 'id = "a/b"', "method[1].id", "found 'a/b'"),
    "hidden id": Refusal('id = "feature"', 'id = ".a"', "method[1].id", "found '.a'"),
    "id too long": Refusal('id = "feature"', f'id = "{"a" * 65}"', "method[1].id", "aaaa"),
    "id of two lines": Refusal('id = "feature"', 'id = "a\\n"', "method[1].id", "found 'a\\n'"),
    "axis twice": Refusal("[2, 0, 1]", "[2, 0, 0]", "method[0].transform.source_axis", "[2, 0, 0]", "once"),
    "axis 3": Refusal("[2, 0, 1]", "[3, 0, 1]", "method[0].transform.source_axis", "[3, 0, 1]", "once"),
    "two axes": Refusal("[2, 0, 1]", "[1, 0]", "method[0].transform.source_axis[2]", "missing"),
    "extent 0": Refusal('[10, "full", "full"]', '[10, 0, "full"]', "method[0].transform.extent", "[10, 0", "one voxel"),
    "extent -1": Refusal('[10, "full", "full"]', "[-1, 1, 1]", "method[0].transform.extent", "[-1, 1, 1]", "one voxel"),
    "align": Refusal("reversed =", 'align = "center"\nreversed =', "method[0].transform.align", "'center'", "centre"),
    "legacy 0": Refusal("mm3 = 8", "mm3 = 0", "method[1].legacy_voxel_mm3", "found 0", "greater than 0"),
    "legacy nan": Refusal("mm3 = 8", "mm3 = nan", "method[1].legacy_voxel_mm3", "nan", "finite"),
    "nan handling": Refusal("mm3 = 8", 'mm3 = 8\nnan_outside_brain = "drop"', "method[1].nan_outside_brain", "'drop'"),
    "scale falls": Refusal("[0, 5]", "[5, 0]", "method[1].score_scale", "[5, 0]", "rise"),
    "scale flat": Refusal("[0, 5]", "[5, 5]", "method[1].score_scale", "[5, 5]", "rise"),
    "scale nan": Refusal("[0, 5]", "[nan, 5]", "method[1].score_scale", "[nan, 5]", "rise"),
    "unknown contrast": Refusal('"FLAIR"', '"T2"', "baseline[0].intensity", "'T2' is no contrast", "pattern"),
    "two ids": Refusal('id = "feature"', 'id = "residual"', "id", "'residual' is declared twice", "its own id"),
    "id of a baseline": Refusal('id = "flair"', 'id = "feature"', "id", "'feature' is declared twice", "its own id"),
    "no sql folder": Refusal("name =", 'sql = "marts"\nname =', "study.sql", "'marts' is no folder", "folder"),
    "fixed parameter": Refusal("budgets_cm3 = [5, 20]", "level_count = 9", "protocol.level_count", "is fixed"),
    "unknown parameter": Refusal("budgets_cm3 = [5, 20]", "budget = 9", "protocol.budget", "is no parameter"),
    "parameter bounds": Refusal("budgets_cm3 = [5, 20]", "overlap_floor = 2", "protocol.overlap_floor", "at most 1"),
    "no reference budget": Refusal("[5, 20]", "[5, 10]", "protocol.reference_budget_cm3", "20 is not in budgets_cm3"),
    "no subjects file": Refusal('"subjects.csv"', '"nobody.csv"', "study.subjects", "'nobody.csv' is no file", "CSV"),
    "plain file name": Refusal(
        "brain/{subject_id}", "brain/all", "files.brain", "holds no {subject_id}", "per subject"
    ),
    "doubled braces": Refusal("brain/{subject_id}", "brain/{{subject_id}}", "files.brain", "holds no {subject_id}"),
    "unknown column": Refusal("brain/{", "{centre}/{", "files.brain", "uses {centre}, no column", "{site}"),
    "nameless column": Refusal("brain/{subject_id}", "brain/{}", "files.brain", "uses {}"),
    "attribute": Refusal("brain/{subject_id}", "{subject_id.__class__}", "files.brain", "{subject_id.__class__}"),
    "open brace": Refusal("brain/{subject_id}", "brain/{subject_id", "files.brain", "is no pattern", "single braces"),
    "contrast twice": Refusal("image/{subject_id}_", "{split}/x_", "files.intensity.FLAIR", "'s2' and 's3'"),
    "parent folder": Refusal("brain/{subject_id}", "../{subject_id}", "files.brain", "leaves the study", "study.roots"),
    "parent inside": Refusal("brain/{subject_id}", "a/../../{subject_id}", "files.brain", "leaves the study"),
    "absolute": Refusal("brain/{subject_id}", "/etc/{subject_id}", "files.brain", "leaves the study", "study.roots"),
    "URL": Refusal("brain/{subject_id}", "s3://bucket/{subject_id}", "files.brain", "leaves the study", "study.roots"),
    "file URL": Refusal("brain/{subject_id}", "file:///etc/{subject_id}", "files.brain", "leaves the study"),
    "chained URL": Refusal("brain/{subject_id}", "simplecache::s3://b/{subject_id}", "files.brain", "leaves"),
    "own reference": Refusal("{subject_id}_own", "own", "method[0].own_reference", "holds no {subject_id}"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_one_mistake_is_one_problem(tmp_path: Path, refusal: Refusal) -> None:
    subjects = SUBJECTS + "s3,test,south\n"
    named = [p for p in problems(tmp_path, edited(refusal.old, refusal.new), subjects) if p.field == refusal.field]
    assert len(named) == 1
    assert Path(named[0].file).name == "study.toml"
    assert refusal.found in named[0].found
    assert refusal.remedy in named[0].remedy


ONE_FIELD = {
    "scale typo": Refusal("score_scale = [0, 5]", 'score_scale = "identty"', "method[1].score_scale", "'identty'"),
    "three scales": Refusal("[0, 5]", "[0, 1, 5]", "method[1].score_scale", "[0, 1, 5]"),
    "scale text": Refusal("[0, 5]", '["low", "high"]', "method[1].score_scale", "'low'"),
    "quantiles fall": Refusal("[0, 5]", "{quantiles = [0.9, 0.1]}", "method[1].score_scale", "[0.9, 0.1]", "rise"),
    "quantile above 1": Refusal("[0, 5]", "{quantiles = [1, 99]}", "method[1].score_scale", "[1, 99]", "[0, 1]"),
    "quantile nan": Refusal("[0, 5]", "{quantiles = [0.1, nan]}", "method[1].score_scale", "nan", "rise"),
    "quantile typo": Refusal("[0, 5]", "{quantile = [0, 1]}", "method[1].score_scale", "'quantile'"),
    "half an extent": Refusal(
        '[10, "full", "full"]', '[10, "half", "full"]', "method[0].transform.extent[1]", "'half'"
    ),
    "extent 2.5": Refusal('[10, "full", "full"]', '[2.5, "full", "full"]', "method[0].transform.extent[0]", "2.5"),
    "start": Refusal('["centre", 0, -1]', '["center", 0, 0]', "method[0].transform.start[0]", "'center'", "centre"),
}


@pytest.mark.parametrize("refusal", ONE_FIELD.values(), ids=ONE_FIELD)
def test_a_choice_of_types_is_refused_once_under_the_field_as_the_study_spells_it(
    tmp_path: Path, refusal: Refusal
) -> None:
    [problem] = problems(tmp_path, edited(refusal.old, refusal.new))
    assert problem.field == refusal.field
    assert refusal.found in problem.found
    assert refusal.remedy in problem.remedy


WRONG_TYPES = {
    "voxel size in quotes": Refusal("[1.0, 1, 3.0]", '["1", 1, 3.0]', "study.voxel_size_mm[0]", "'1'"),
    "voxel size true": Refusal("[1.0, 1, 3.0]", "[true, 1, 3.0]", "study.voxel_size_mm[0]", "True"),
    "legacy in quotes": Refusal("mm3 = 8", 'mm3 = "8"', "method[1].legacy_voxel_mm3", "'8'"),
    "legacy true": Refusal("mm3 = 8", "mm3 = true", "method[1].legacy_voxel_mm3", "True"),
    "reversed 1": Refusal("[true, false, false]", "[1, false, false]", "method[0].transform.reversed[0]", "1"),
    "reversed yes": Refusal(
        "[true, false, false]", '["yes", false, false]', "method[0].transform.reversed[0]", "'yes'"
    ),
    "axis true": Refusal("[2, 0, 1]", "[2, 0, true]", "method[0].transform.source_axis[2]", "True"),
    "axis in quotes": Refusal("[2, 0, 1]", '[2, 0, "1"]', "method[0].transform.source_axis[2]", "'1'"),
    "scale true": Refusal("[0, 5]", "[false, true]", "method[1].score_scale", "True"),
    "label true": Refusal("brain =", "reference_labels = [true]\nbrain =", "files.reference_labels[0]", "True"),
    "label in quotes": Refusal("brain =", 'reference_labels = ["1"]\nbrain =', "files.reference_labels[0]", "'1'"),
}


@pytest.mark.parametrize("refusal", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_texts_and_booleans_are_no_numbers(tmp_path: Path, refusal: Refusal) -> None:
    found = problems(tmp_path, edited(refusal.old, refusal.new))
    assert refusal.field in [p.field for p in found]
    assert any(refusal.found in p.found for p in found)


@pytest.mark.parametrize("scale", ["[-inf, inf]", "[0, inf]", "[-inf, 0]"])
def test_a_scale_is_finite(tmp_path: Path, scale: str) -> None:
    found = problems(tmp_path, edited("[0, 5]", scale))
    assert {p.field.removesuffix("[0]").removesuffix("[1]") for p in found} == {"method[1].score_scale"}


def test_single_brackets_are_answered_with_double_ones(tmp_path: Path) -> None:
    text = edited(
        '[[method]]\nid = "residual"', '[method]\nid = "residual"', STUDY.partition('[[method]]\nid = "fea')[0]
    )
    [problem] = problems(tmp_path, text)
    assert problem.field == "method"
    assert "[[method]]" in problem.remedy


@pytest.mark.parametrize("field", ["reference_labels", "own_reference_labels"])
def test_a_list_of_labels_that_selects_nothing_is_refused(tmp_path: Path, field: str) -> None:
    after = "brain =" if field == "reference_labels" else "own_reference ="
    found = problems(tmp_path, edited(after, f"{field} = []\n{after}"))
    assert [p.field.rpartition(".")[2] for p in found] == [field]


def test_two_contrasts_may_not_name_the_same_file(tmp_path: Path) -> None:
    same = 'FLAIR = "image/{subject_id}_FLAIR.nii.gz"'
    found = problems(tmp_path, edited(same, f"{same}\n{same.replace('FLAIR =', 'T2 =')}"))
    assert [p.field for p in found] == ["files.intensity.T2"]
    assert "image/s1_FLAIR.nii.gz" in found[0].found


SETS = (
    edited('id = "feature"', 'id = "residual"\ntraining_set = "MOOD+IXI-HH"')
    .replace('id = "residual"\nmap', 'id = "residual"\ntraining_set = "IXI"\nmap', 1)
    .replace("name =", 'primary_training_set = "IXI"\nname =', 1)
)


def test_entries_of_one_id_are_one_method_with_several_training_sets(tmp_path: Path) -> None:
    file = load(tmp_path, SETS).file
    assert [(m.id, m.training_set) for m in file.primaries] == [("residual", "IXI")]
    assert [(m.id, m.training_set) for m in file.configurations] == [("residual", "MOOD+IXI-HH")]
    assert file.several_sets == ("residual",)


def test_without_several_training_sets_every_entry_is_primary(tmp_path: Path) -> None:
    file = load(tmp_path, edited('id = "feature"', 'id = "feature"\ntraining_set = "IXI"')).file
    assert file.primaries == file.method
    assert file.configurations == ()


@dataclass(frozen=True)
class Ambiguity:
    old: str
    new: str
    expected: tuple[tuple[str, str], ...]


AMBIGUITIES = {
    "no primary set": Ambiguity(
        'primary_training_set = "IXI"\n', "", (("study.primary_training_set", "several training sets of 'residual'"),)
    ),
    "another primary set": Ambiguity(
        'primary_training_set = "IXI"', 'primary_training_set = "X"', (("study.primary_training_set", "no entry of"),)
    ),
    "the same set twice": Ambiguity("MOOD+IXI-HH", "IXI", (("id", "with the training_set 'IXI'"),)),
    "no set": Ambiguity('training_set = "MOOD+IXI-HH"\n', "", (("id", "1 of its 2 entries without training_set"),)),
    "a blank": Ambiguity("MOOD+IXI-HH", "MOOD IXI", (("method[1].training_set", "'MOOD IXI'"),)),
    "a tilde": Ambiguity("MOOD+IXI-HH", "a~b", (("method[1].training_set", "'a~b'"),)),
    "an at sign": Ambiguity("MOOD+IXI-HH", "a@b", (("method[1].training_set", "'a@b'"),)),
    "a baseline's id": Ambiguity('id = "flair"', 'id = "residual"', (("id", "'residual' is declared twice"),)),
    "no set and no primary set": Ambiguity(
        'primary_training_set = "IXI"',
        'sql = "nowhere"',
        (("study.primary_training_set", "is missing"), ("study.sql", "is no folder")),
    ),
}


@pytest.mark.parametrize("one", AMBIGUITIES.values(), ids=AMBIGUITIES)
def test_training_sets_that_do_not_tell_entries_apart_are_refused_all_at_once(tmp_path: Path, one: Ambiguity) -> None:
    assert SETS.count(one.old) == 1
    found = problems(tmp_path, SETS.replace(one.old, one.new))
    assert len(found) == len(one.expected)
    for problem, (field, text) in zip(found, one.expected, strict=True):
        assert problem.field == field
        assert text in problem.found


def test_the_primary_training_set_is_one_that_a_method_declares(tmp_path: Path) -> None:
    text = edited("name =", 'primary_training_set = "IXI"\nname =')
    assert [p.field for p in problems(tmp_path, text)] == ["study.primary_training_set"]
    declared = edited('id = "feature"', 'id = "feature"\ntraining_set = "IXI"', text)
    assert load(tmp_path, declared).file.study.primary_training_set == "IXI"


def test_no_method_and_no_baseline(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, STUDY.partition("[[method]]")[0])
    assert problem.field == "method"
    assert "no method and no baseline" in problem.found


def test_a_missing_study_file(tmp_path: Path) -> None:
    with pytest.raises(BadStudy) as refused:
        load_study(tmp_path / "study.toml")
    [problem] = refused.value.problems
    assert "no such file" in problem.found
    assert "study.toml" in problem.file


def test_a_folder_is_no_study_file(tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match="no such file"):
        load_study(tmp_path)


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        ("[study\n", "line 1"),
        ('[study]\nname = "x\n', "line 2"),
        ('[study]\nname = "x"\nname = "y"\n', "line 3"),
        ("[study]\nname = two methods\n", "line 2"),
    ],
)
def test_a_syntax_error_names_its_line(tmp_path: Path, broken: str, line: str) -> None:
    [problem] = problems(tmp_path, broken)
    assert "is not TOML" in problem.found
    assert line in problem.found


def test_a_study_file_that_is_no_text(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, STUDY.replace("two", "zwölf").encode("latin-1"))
    assert "is not TOML" in problem.found


def test_a_study_file_with_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    text = ("\ufeff" + STUDY.replace("\n", "\r\n")).encode()
    assert load(tmp_path, text).file.study.name == "two methods"


@pytest.mark.parametrize("field", ["subjects", "sql"])
def test_a_name_too_long_for_the_disk_is_no_file(tmp_path: Path, field: str) -> None:
    text = edited("name =", 'sql = "."\nname =')
    text = edited('"subjects.csv"' if field == "subjects" else '"."', f'"{"x" * 300}"', text)
    assert [p.field for p in problems(tmp_path, text)] == [f"study.{field}"]


BAD_SUBJECTS = {
    "empty": (b"", "", "lists no subject"),
    "no row": (b"subject_id,split\n", "", "lists no subject"),
    "no split": (b"subject_id\ns1\n", "", "has no column split"),
    "no id": (b"id,split\ns1,test\n", "", "has no column subject_id"),
    "neither": (b"a,b\n1,2\n", "", "has no column subject_id and no column split"),
    "semicolons": (b"subject_id;split\ns1;test\n", "", "has no column"),
    "blank before a column": (b"subject_id, split\ns1,test\n", "", "has no column split"),
    "UTF-16": ("subject_id,split\ns1,test\n".encode("utf-16"), "", "cannot be read as CSV text"),
    "Latin-1": ("subject_id,split\nJörg,test\n".encode("latin-1"), "", "cannot be read as CSV text"),
    "split typo": (b"subject_id,split\ns1,tset\n", "line 2", "split 'tset'"),
    "split case": (b"subject_id,split\ns1,Test\n", "line 2", "split 'Test'"),
    "split blank": (b"subject_id,split\ns1,test \n", "line 2", "split 'test '"),
    "split train": (b"subject_id,split\ns1,train\n", "line 2", "split 'train'"),
    "short row": (b"subject_id,split\ns1,test\ns2\n", "line 3", "split ''"),
    "long row": (b"subject_id,split\ns1,test,x\n", "line 2", "more cells"),
    "slash": (b"subject_id,split\na/b,test\n", "line 2", "subject_id 'a/b'"),
    "backslash": (b"subject_id,split\na\\b,test\n", "line 2", "subject_id 'a\\\\b'"),
    "parent": (b"subject_id,split\n..,test\n", "line 2", "subject_id '..'"),
    "this": (b"subject_id,split\n.,test\n", "line 2", "subject_id '.'"),
    "no name": (b"subject_id,split\n,test\n", "line 2", "subject_id ''"),
    "blank": (b"subject_id,split\n ,test\n", "line 2", "subject_id ' '"),
    "blank before": (b"subject_id,split\n s1,test\n", "line 2", "subject_id ' s1'"),
    "blank after": (b"subject_id,split\ns1 ,test\n", "line 2", "subject_id 's1 '"),
    "two lines": (b'subject_id,split\n"s\n1",test\n', "line", "subject_id 's\\n1'"),
    "too long": (b"subject_id,split\n" + b"s" * 129 + b",test\n", "line 2", "ssss"),
    "twice": (b"subject_id,split\ns1,test\ns2,test\ns1,validation\n", "line 4", "line 2 already"),
}


@pytest.mark.parametrize(("subjects", "field", "found"), BAD_SUBJECTS.values(), ids=BAD_SUBJECTS)
def test_a_bad_subjects_file_is_refused(tmp_path: Path, subjects: bytes, field: str, found: str) -> None:
    [problem] = problems(tmp_path, STUDY, subjects)
    assert Path(problem.file).name == "subjects.csv"
    assert problem.field.startswith(field)
    assert found in problem.found


@pytest.mark.parametrize("control", ["\x00", "\x01", "\x1b", "\x7f"])
def test_a_subject_id_holds_no_control_character(tmp_path: Path, control: str) -> None:
    [problem] = problems(tmp_path, STUDY, f"subject_id,split\ns{control}1,test\n")
    assert problem.field == "line 2"
    assert "subject_id" in problem.found


def test_a_column_declared_twice_is_refused(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, STUDY, "subject_id,split,split\ns1,test,validation\n")
    assert Path(problem.file).name == "subjects.csv"
    assert "split" in problem.found


def test_a_column_without_name_is_not_mistaken_for_a_row_with_too_many_cells(tmp_path: Path) -> None:
    found = problems(tmp_path, STUDY, "subject_id,split,\ns1,test,\ns2,test,\n")
    assert len(found) == 1
    assert "more cells" not in found[0].found


@pytest.mark.parametrize(
    ("subjects", "line"),
    [
        ("subject_id,split\n\n\ns1,test\ns2,tset\n", "line 5"),
        ('subject_id,split,note\ns1,test,"a\nb"\ns2,tset,\n', "line 4"),
    ],
    ids=["blank lines", "a cell of two lines"],
)
def test_a_bad_row_is_named_by_its_line_in_the_file(tmp_path: Path, subjects: str, line: str) -> None:
    [problem] = problems(tmp_path, STUDY, subjects)
    assert problem.field == line


def test_subjects_with_byte_order_mark_windows_lines_and_blank_lines(tmp_path: Path) -> None:
    study = load(tmp_path, STUDY, "\ufeffsubject_id,split\r\ns1,test\r\n\r\ns2,validation\r\n")
    assert [(s.subject_id, s.split) for s in study.subjects] == [("s1", "test"), ("s2", "validation")]


def test_subject_ids_are_text(tmp_path: Path) -> None:
    study = load(tmp_path, STUDY, "subject_id,split\n007,test\n1e3,test\nnull,test\nJörg O'Neil 100%,validation\n")
    assert [s.subject_id for s in study.subjects] == ["007", "1e3", "null", "Jörg O'Neil 100%"]
    assert study.locate("{subject_id}.nii", study.subjects[3]) == str(tmp_path / "Jörg O'Neil 100%.nii")


def test_any_column_may_stand_in_a_pattern(tmp_path: Path) -> None:
    study = load(tmp_path, edited("brain/{subject_id}", "{site}/{split}/brain/{subject_id}"))
    assert study.locate(study.file.files.brain or "", study.subjects[1]) == str(tmp_path / "south/test/brain/s2.nii.gz")


def test_a_column_alone_does_where_it_differs_between_subjects(tmp_path: Path) -> None:
    assert load(tmp_path, edited("brain/{subject_id}", "brain/{site}")).file.files.brain == "brain/{site}.nii.gz"


def test_a_pattern_that_names_one_file_for_two_subjects(tmp_path: Path) -> None:
    subjects = SUBJECTS + "s3,test,south\n"
    [problem] = problems(tmp_path, edited("brain/{subject_id}", "brain/{site}"), subjects)
    assert problem.field == "files.brain"
    assert "'brain/south.nii.gz' for both 's2' and 's3'" in problem.found
    assert "{subject_id}" in problem.remedy


def test_a_column_with_a_dot_may_stand_in_a_pattern_or_is_refused(tmp_path: Path) -> None:
    subjects = "subject_id,split,scanner.id\ns1,test,x\n"
    try:
        study = load(tmp_path, edited("brain/{", "{scanner.id}/{"), subjects)
    except BadStudy as refused:
        assert [p.field for p in refused.problems] == ["files.brain"]
    else:
        assert study.locate(study.file.files.brain or "", study.subjects[0]) == str(tmp_path / "x/s1.nii.gz")


@pytest.mark.parametrize(
    "field",
    ["{subject_id:d}", "{subject_id!x}", "{subject_id:{split}}", "{subject_id:{centre}}", "\\u0000{subject_id}"],
)
def test_a_pattern_that_cannot_be_filled_is_refused(tmp_path: Path, field: str) -> None:
    assert [p.field for p in problems(tmp_path, edited("brain/{subject_id}", field))] == ["files.brain"]


def test_a_cell_that_leads_out_of_the_study(tmp_path: Path) -> None:
    subjects = "subject_id,split,site\ns1,test,north\ns2,test,../..\n"
    [problem] = problems(tmp_path, edited("brain/{", "{site}/{"), subjects)
    assert problem.field == "files.brain"
    assert "'../../s2.nii.gz' leaves the study" in problem.found


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_link_that_leaves_the_study(tmp_path: Path, is_folder: bool) -> None:
    study, outside = tmp_path / "study", tmp_path / "outside"
    outside.mkdir()
    (outside / "s1.nii.gz").touch()
    study.mkdir()
    if is_folder:
        (study / "brain").symlink_to(outside)
    else:
        (study / "brain").mkdir()
        (study / "brain/s1.nii.gz").symlink_to(outside / "s1.nii.gz")
    [problem] = problems(study)
    assert problem.field == "files.brain"
    assert "leaves the study" in problem.found
    allowed = edited("name =", 'roots = ["../outside"]\nname =')
    assert load(study, allowed).file.study.roots == ("../outside",)


def test_a_link_inside_the_study_stays_inside(tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    (tmp_path / "brain").symlink_to("masks")
    assert load(tmp_path).subjects


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "brain").mkdir()
    loop = tmp_path / "brain/s1.nii.gz"
    loop.symlink_to(loop)
    assert [p.field for p in problems(tmp_path)] == ["files.brain"]


@pytest.mark.parametrize(
    ("root", "pattern", "is_inside"),
    [
        ("../data", "../data/{subject_id}", True),
        ("../data/", "../data/deep/{subject_id}", True),
        ("../data", "../data2/{subject_id}", False),
        ("../data", "../data/../{subject_id}", False),
        ("../data", "../{subject_id}", False),
        ("s3://bucket/data", "s3://bucket/data/{subject_id}", True),
        ("s3://bucket/data/", "s3://bucket/data/{subject_id}", True),
        ("s3://bucket/data", "s3://bucket/data2/{subject_id}", False),
        ("s3://bucket/data", "s3://bucket/data/../{subject_id}", False),
        ("s3://bucket/data", "s3://other/data/{subject_id}", False),
        ("https://host.org", "https://host.org.evil/{subject_id}", False),
        ("https://host.org", "http://host.org/{subject_id}", False),
        ("../data", "s3://bucket/{subject_id}", False),
    ],
)
def test_roots_open_what_they_name_and_no_more(tmp_path: Path, root: str, pattern: str, is_inside: bool) -> None:
    text = edited("brain/{subject_id}", pattern, edited("name =", f'roots = ["{root}"]\nname ='))
    if is_inside:
        assert load(tmp_path / "study", text).file.study.roots == (root,)
    else:
        [problem] = problems(tmp_path / "study", text)
        assert (problem.field, "leaves the study" in problem.found) == ("files.brain", True)


def test_an_absolute_root(tmp_path: Path) -> None:
    root = tmp_path / "data"
    text = edited("brain/{subject_id}", f"{root}/{{subject_id}}", edited("name =", f'roots = ["{root}"]\nname ='))
    study = load(tmp_path / "study", text)
    assert study.locate(study.file.files.brain or "", study.subjects[0]) == f"{root}/s1.nii.gz"


@pytest.mark.parametrize("field", ["subjects", "sql"])
def test_other_paths_stay_inside_the_study_too(tmp_path: Path, field: str) -> None:
    (tmp_path / "subjects.csv").write_text(SUBJECTS)
    old, new = ('"subjects.csv"', '"../subjects.csv"') if field == "subjects" else ("name =", 'sql = ".."\nname =')
    [problem] = problems(tmp_path / "study", edited(old, new))
    assert problem.field == f"study.{field}"


def test_a_linked_study_file_finds_subjects_and_images_in_one_folder(tmp_path: Path) -> None:
    real, linked = tmp_path / "real", tmp_path / "linked"
    lay_out(real)
    linked.mkdir()
    (linked / "study.toml").symlink_to(real / "study.toml")
    (linked / "subjects.csv").write_text("subject_id,split\nother,test\n")
    study = load_study(linked / "study.toml")
    expected = {linked: "other", real: "s1"}
    assert study.subjects[0].subject_id == expected[study.folder]


def test_all_problems_of_the_declarations_come_at_once(tmp_path: Path) -> None:
    text = edited("voxel_size_mm = [1.0, 1, 3.0]", "voxel_size_mm = [0, 1, nan]")
    text = edited("[0, 5]", "[5, 0]", edited("[2, 0, 1]", "[2, 0, 2]", edited("brain =", "brian =", text)))
    assert {p.field for p in problems(tmp_path, text)} == {
        "study.voxel_size_mm[0]",
        "study.voxel_size_mm[2]",
        "files.brian",
        "method[0].transform.source_axis",
        "method[1].score_scale",
    }


def conflicting() -> str:
    """A study of four mistakes between its declarations."""
    text = edited('id = "flair"', 'id = "feature"')
    text = edited('intensity = "FLAIR"', 'intensity = "T2"', text)
    text = edited("[5, 20]", "[5, 20]\nseed = -1", text)
    return edited("name =", 'sql = "nowhere"\nname =', text)


def test_all_problems_between_declarations_and_subjects_come_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, conflicting(), "subject_id,split\na/b,test\ns2,tset\ns3,test\ns3,test\n")
    assert {(Path(p.file).name, p.field) for p in found} == {
        ("study.toml", "protocol.seed"),
        ("study.toml", "id"),
        ("study.toml", "baseline[0].intensity"),
        ("study.toml", "study.sql"),
        ("subjects.csv", "line 2"),
        ("subjects.csv", "line 3"),
        ("subjects.csv", "line 5"),
    }


def test_bad_patterns_come_with_the_other_problems(tmp_path: Path) -> None:
    text = edited("brain/{subject_id}", "../{subject_id}", edited("feature/{subject_id}", "feature/all", conflicting()))
    fields = {p.field for p in problems(tmp_path, text)}
    assert {"protocol.seed", "study.sql", "files.brain", "method[1].map"} <= fields


def test_a_refusal_survives_pickling(tmp_path: Path) -> None:
    with pytest.raises(BadStudy) as refused:
        load(tmp_path, conflicting())
    copy = pickle.loads(pickle.dumps(refused.value))
    assert isinstance(copy, BadStudy)
    assert copy.problems == refused.value.problems
    assert str(copy) == str(refused.value)


def test_relative_study_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    study = load_study(Path("study.toml"))
    assert study.folder == tmp_path
    monkeypatch.chdir("/")
    assert study.locate(study.file.files.reference, study.subjects[0]) == str(tmp_path / "reference/s1.nii.gz")


def test_located_and_exists(tmp_path: Path) -> None:
    file = tmp_path / "a b.nii"
    file.touch()
    assert located(tmp_path, "a b.nii") == str(file)
    assert located(tmp_path, str(file)) == str(file)
    assert located(tmp_path, "memory://x/a.nii") == "memory://x/a.nii"
    assert exists(str(file))
    assert not exists(str(tmp_path))
    assert not exists(str(tmp_path / "missing.nii"))
    with fsspec.open("memory://mirto_test_study/a.nii", "wb") as handle:
        handle.write(b"x")
    assert exists("memory://mirto_test_study/a.nii")
    assert not exists("memory://mirto_test_study/b.nii")


def csv_text(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


CELLS = st.text("ab1 ,;\"'\n\r\t/\\.{}%é患\ufeff\u2028\xa0\x01", max_size=6)


@FAST
@given(rows=st.lists(st.tuples(CELLS, st.sampled_from(["test", "validation", "tset"]), CELLS), max_size=4))
def test_whatever_the_subjects_file_holds_it_is_read_as_written_or_refused(
    folder: Path, rows: list[tuple[str, str, str]]
) -> None:
    try:
        study = load(folder, STUDY, csv_text([("subject_id", "split", "note"), *rows]))
    except BadStudy as refused:
        assert refused.problems
    else:
        assert [(s.subject_id, s.split, s.fields["note"]) for s in study.subjects] == rows


FIELDS = st.builds(
    "{{{}{}{}}}".format,
    st.sampled_from(["subject_id", "site", "centre", "", "0"]),
    st.sampled_from(["", "", "", "!r", "!x", ".x", "[0]"]),
    st.sampled_from(["", "", "", ":9", ":d", ":{site}"]),
)
TEXTS = st.sampled_from(["a", "/", "..", ".", "{", "}", "{{", "}}", "{{subject_id}}", "s3://", "%2e", " "])


@FAST
@given(pattern=st.lists(st.one_of(FIELDS, TEXTS), max_size=4).map("".join))
def test_whatever_a_pattern_holds_it_names_a_file_of_each_subject_or_is_refused(folder: Path, pattern: str) -> None:
    try:
        study = load(folder, edited("brain/{subject_id}.nii.gz", pattern))
    except BadStudy as refused:
        assert [p.field for p in refused.problems] == ["files.brain"]
    else:
        names = [study.locate(pattern, subject) for subject in study.subjects]
        assert len(set(names)) == len(study.subjects)
        assert all(Path(name).resolve().is_relative_to(folder) for name in names)


TEST_ONLY = "subject_id,split\n" + "".join(f"s{n:02},test\n" for n in range(10))


def test_a_share_of_test_subjects_is_drawn_for_calibration(tmp_path: Path) -> None:
    def validation(line: str, subjects: str = TEST_ONLY) -> set[str]:
        study = load(tmp_path, f"{STUDY}{line}\n", subjects)
        return {subject.subject_id for subject in study.subjects if subject.split == "validation"}

    drawn = validation("calibration_share = 0.4")
    assert len(drawn) == 4 and drawn == validation("calibration_share = 0.4")
    assert validation("calibration_share = 0.0") == set()
    assert validation("calibration_share = 0.2") < drawn
    seeds = [validation(f"calibration_share = 0.4\nseed = {seed}") for seed in range(30)]
    assert set().union(*seeds) == {f"s{n:02}" for n in range(10)}
    more = validation("calibration_share = 0.4", f"{TEST_ONLY}t1,test\n")
    assert len(more & drawn) >= 3


def test_a_share_needs_test_subjects_only_and_leaves_both_some(tmp_path: Path) -> None:
    def refusal(share: float, subjects: str) -> str:
        (problem,) = problems(tmp_path, f"{STUDY}calibration_share = {share}\n", subjects)
        assert problem.field == "protocol.calibration_share"
        return problem.found

    assert "the subjects file declares 1" in refusal(0.4, TEST_ONLY.replace("s00,test", "s00,validation"))
    assert "without any" in refusal(0.01, TEST_ONLY)
