"""What is wrong with an input, said so that its owner can mend it."""


class BadInput(Exception):
    """An input that cannot be measured: which one, what was found, and what to do.

    The fields are read-only and the exception survives pickling, so a worker can raise it across a process border.
    It is no dataclass: a frozen dataclass would also freeze `__traceback__`, which Python sets while it unwinds.

    Args:
        path: The file, folder or URL at fault, as the study names it.
        found: What was found there, a clause without a full stop.
        remedy: What to do about it, a sentence without its full stop.
    """

    def __init__(self, path: str, found: str, remedy: str) -> None:
        """Keep the three fields as the exception's arguments, which is what pickling restores."""
        super().__init__(path, found, remedy)
        self._fields = (path, found, remedy)

    @property
    def path(self) -> str:
        """The file, folder or URL at fault."""
        return self._fields[0]

    @property
    def found(self) -> str:
        """What was found there."""
        return self._fields[1]

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return self._fields[2]

    def __str__(self) -> str:
        """One line, `PATH: FOUND. REMEDY.`."""
        return f"{self.path}: {self.found}. {self.remedy}."
