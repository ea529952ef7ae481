"""What is wrong with a form of an answer, and where in it."""

from __future__ import annotations

from typing import Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.util.truncation import cut

__all__ = ["MOST_REPEATED", "MOST_TEXT", "GrammarRefused", "limit_repetition"]

MOST_TEXT: Final = 256 * 1024
"""Letters that a schema, a pattern or a grammar may have."""

MOST_REPEATED: Final = 1_000_000
"""Times that something may be repeated at most, by its own number or that of a bound."""

_MOST_NESTED: Final = 20_000
_SHOWN: Final = 200


class GrammarRefused(InvalidField):
    """The form that an answer is to have cannot be imposed.

    Args:
        path: where in the form, as ``$.properties.size``; empty where it is all of it.
        message: what is wrong, and the way out.
        field: of the request.
    """

    def __init__(self, path: str, message: str, *, field: str = "response_format") -> None:
        where = f"{field}: at {cut(path, _SHOWN)}: " if path else f"{field}: "
        super().__init__(where + message, field=field, code="invalid_grammar")
        self.path = path
        self.reason = message

    def of(self, field: str, path: str = "") -> GrammarRefused:
        """Give the same of another field, or of a part of it."""
        return GrammarRefused(path + self.path.removeprefix("$") if path else self.path, self.reason, field=field)


def limit_repetition(path: str, most: int, within: int) -> int:
    """See that a repetition within ``within`` turns of others has a bound that can be compiled; give both together.

    Raises:
        GrammarRefused: it has not.
    """
    together = max(most, 1) * within
    if most > MOST_REPEATED or (within > 1 and together > _MOST_NESTED):
        raise GrammarRefused(
            path, f"{together} repetitions are too many: {MOST_REPEATED} are the most, {_MOST_NESTED} within each other"
        )
    return together
