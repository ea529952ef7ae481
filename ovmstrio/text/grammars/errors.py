"""The error for unsupported grammars, and the common limits."""

from __future__ import annotations

from typing import Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.util.truncation import cut

MAX_GRAMMAR_CHARACTERS: Final = 256 * 1024
"""Maximum characters of a schema, pattern or grammar."""

_MAX_PATH_CHARACTERS: Final = 200


class GrammarRefused(InvalidField):
    """A requested grammar is invalid or not supported.

    Args:
        path: place in the grammar, such as ``$.properties.size``; empty for all of it.
        message: error and hint.
        field: field of the request.
    """

    def __init__(self, path: str, message: str, *, field: str = "response_format") -> None:
        where = f"{field}: at {cut(path, _MAX_PATH_CHARACTERS)}: " if path else f"{field}: "
        super().__init__(where + message, field=field, code="invalid_grammar")
        self.path = path
        self.reason = message

    def of(self, field: str, path: str = "") -> GrammarRefused:
        """Return the error for another field, or for a nested part at ``path``."""
        return GrammarRefused(path + self.path.removeprefix("$") if path else self.path, self.reason, field=field)
