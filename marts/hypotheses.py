"""The hypotheses: each a SQL file that a study can edit, by a file of the same identifier in its own folder.

A file `hypothesis/H1_ranking_instability.sql` starts with a header:

    -- Ranking instability: some pair of methods takes its minority order in at least a fifth of the universes.
    -- criterion: lower end of phi_max at least 0.20
    -- cases: any
    -- needs: two methods

and holds one SELECT over the marts, one row per case (a pair, a method, a cell) with the columns of `CASE_COLUMNS`. A
hypothesis is supported where `any` or `every` case is, as it says; it is not testable where no case can be decided, for
want of what it `needs`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from marts.source import BadMart, Source, read_source, sql_folder

FIELDS = ("criterion", "cases", "needs")
CASE_COLUMNS = (
    *("configuration_set", "item", "estimate", "estimate_low", "estimate_high"),
    *("criterion_margin", "is_supported", "reason"),
)


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis with its criterion, in words and as a SELECT over the marts.

    Attributes:
        hypothesis_id: Short identifier, such as H1; the part of the file's name before the first underscore.
        statement: What is claimed.
        criterion: When a case counts as support, in words.
        cases: Whether `any` or `every` case must.
        needs: What a study must have for it to be testable.
        source: The file.
    """

    hypothesis_id: str
    statement: str
    criterion: str
    cases: str
    needs: str
    source: Source

    @property
    def case_sql(self) -> str:
        """A SELECT of the cases in declared columns, with the hypothesis's identifier."""
        return f"select '{self.hypothesis_id}' as hypothesis_id, {', '.join(CASE_COLUMNS)} from (\n{self.source.sql}\n)"


def hypotheses(extra: Path | None = None) -> list[Hypothesis]:
    """All hypotheses in the order of their identifiers.

    Args:
        extra: The study's own SQL folder; a file in its `hypothesis` folder takes the place of ours of the same
            identifier, or adds a hypothesis.

    Raises:
        BadMart: A file's header or SQL is wrong, or one folder has two files of one identifier.
    """
    found: dict[str, Hypothesis] = {}
    for folder in (sql_folder(), extra):
        own = [_read(file) for file in hypothesis_files(folder)]
        names = [one.hypothesis_id for one in own]
        if repeated := [one for one in own if names.count(one.hypothesis_id) > 1]:
            raise BadMart(f"{repeated[1].source.file}: there are two of {repeated[1].hypothesis_id}. Keep one of them.")
        found |= {one.hypothesis_id: one for one in own}
    return [found[name] for name in sorted(found)]


def hypothesis_files(folder: Path | None) -> list[Path]:
    """The hypotheses' files of a SQL folder; none without a folder."""
    return sorted((folder / "hypothesis").glob("*.sql")) if folder else []


def _read(file: Path) -> Hypothesis:
    source = read_source(file, FIELDS)
    fields = dict(source.fields)
    missing = [name for name in FIELDS if name not in fields]
    if not source.description or missing:
        lacking = f"a line '-- {missing[0]}: ...'" if missing else "a first line that says what is claimed"
        raise BadMart(f"{file}: the header needs {lacking}.")
    if fields["cases"] not in ("any", "every"):
        raise BadMart(f"{file}: cases is {fields['cases']!r}. Write any or every.")
    name = file.stem.split("_")[0]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", name):
        raise BadMart(f"{file}: {name!r} is no identifier. Name the file like H1_ranking_instability.sql.")
    return Hypothesis(name, source.description, fields["criterion"], fields["cases"], fields["needs"], source)
