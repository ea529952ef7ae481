"""What is wrong with a request, gathered, so that one answer tells all of it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.texts import cut

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

__all__ = ["MAX_ERRORS", "Gathered", "noted"]

_MOST: Final = 8
"""Refusals that are told one by one."""
_MOST_CHARACTERS: Final = 500
"""Of each that is told behind the first one."""
MAX_ERRORS: Final = 32
"""Refusals after which the rest of a request is not read: a list of 16,000 wrong members makes no 16,000 errors."""


class Gathered:
    """Refusals of the parts of one request.

    Each part is read in a block of its own, which ends where the part is refused; :meth:`tell` raises if any was.
    The refusal that reaches the limit is raised at once, so that the caller stops reading::

        wrong = Gathered()
        for part in parts:
            with wrong:
                made.append(read(part))
        wrong.tell()
    """

    __slots__ = ("_count", "_kept")

    def __init__(self, errors: Iterable[InvalidRequest] = ()) -> None:
        self._kept: list[InvalidRequest] = []
        self._count = 0
        for error in islice(errors, MAX_ERRORS):
            self._take(error)

    def __bool__(self) -> bool:
        return self._count > 0

    def __enter__(self) -> None:
        """Begin to read a part."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        # At the limit the error is the one that :meth:`add` has raised within an inner block.
        if not isinstance(error, InvalidRequest) or self._count >= MAX_ERRORS:
            return False
        self.add(error)
        return True

    def add(self, error: InvalidRequest) -> None:
        """Add one refusal.

        Raises:
            InvalidRequest: the limit is reached; all refusals so far as one error, and nothing else is read.
        """
        self._take(error)
        if self._count >= MAX_ERRORS:
            raise self.error() from None

    def _take(self, error: InvalidRequest) -> None:
        self._count += 1
        if len(self._kept) < _MOST:
            # Its traceback would keep what the request was read from.
            self._kept.append(error.with_traceback(None))

    def error(self) -> InvalidRequest:
        """Make one error of all, of which there are some: a single one as it is, else its text before others'."""
        if self._count == 1:
            return self._kept[0]
        texts = [self._kept[0].message, *(cut(error.message, _MOST_CHARACTERS) for error in self._kept[1:])]
        if self._count > _MOST:
            rest = ", and the rest of the request was not checked" if self._count >= MAX_ERRORS else ""
            texts.append(f"{self._count - _MOST} more{rest}")
        return self._kept[0].retold(". Also: ".join(texts))

    def tell(self) -> None:
        """Do nothing if there are none.

        Raises:
            InvalidRequest: there are.
        """
        if self._count:
            raise self.error()


def noted(wrong: Gathered | None, error: InvalidRequest) -> Gathered:
    """Take one more where there may be none yet: for what every request is read with, which mostly is right."""
    wrong = wrong or Gathered()
    wrong.add(error)
    return wrong
