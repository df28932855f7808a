from collections.abc import Sequence

class Expectation:
    description: str
    notes: str
    severity: str

class ExpectTableColumnsToMatchOrderedList(Expectation):
    def __init__(self, *, column_list: Sequence[str], description: str, severity: str, notes: str) -> None: ...

class ExpectColumnValuesToBeOfType(Expectation):
    def __init__(self, *, column: str, type_: str, description: str, severity: str, notes: str) -> None: ...

class ExpectColumnValuesToNotBeNull(Expectation):
    def __init__(self, *, column: str, description: str, severity: str, notes: str) -> None: ...

class ExpectColumnValuesToBeBetween(Expectation):
    def __init__(
        self,
        *,
        column: str,
        min_value: float | None,
        max_value: float | None,
        description: str,
        severity: str,
        notes: str,
    ) -> None: ...

class ExpectColumnValuesToBeInSet(Expectation):
    def __init__(
        self, *, column: str, value_set: Sequence[object], description: str, severity: str, notes: str
    ) -> None: ...

class ExpectColumnValuesToBeUnique(Expectation):
    def __init__(self, *, column: str, description: str, severity: str, notes: str) -> None: ...

class ExpectCompoundColumnsToBeUnique(Expectation):
    def __init__(
        self, *, column_list: Sequence[str], ignore_row_if: str, description: str, severity: str, notes: str
    ) -> None: ...
