"""Headers, query parameters and forms: mappings whose keys may have several values.

They have the names that handlers know from Starlette's classes, which are not needed for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar
from urllib.parse import parse_qsl, urlencode

from ovmstrio.runtimes.handlers.http.uploads import UploadFile

__all__ = ["FormData", "MultiDict", "QueryParams", "RequestHeaders"]

_V = TypeVar("_V")


class MultiDict(Mapping[str, _V], Generic[_V]):
    """A mapping that gives the last of several values; the others are in :meth:`getlist`.

    Args:
        pairs: keys and values in their order.
    """

    def __init__(self, pairs: Iterable[tuple[str, _V]] = ()) -> None:
        self._pairs = list(pairs)
        self._last = dict(self._pairs)

    def __getitem__(self, key: str) -> _V:
        return self._last[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pairs!r})"

    def getlist(self, key: str) -> list[_V]:
        """Give all values of a key."""
        return [value for each, value in self._pairs if each == key]

    def multi_items(self) -> list[tuple[str, _V]]:
        """Give all keys and values in their order."""
        return list(self._pairs)


class QueryParams(MultiDict[str]):
    """The parameters of a URL's query.

    Args:
        query: what follows the question mark, as it was sent.
    """

    def __init__(self, query: str = "") -> None:
        super().__init__(parse_qsl(query, keep_blank_values=True))

    def __str__(self) -> str:
        return urlencode(self._pairs)


class FormData(MultiDict[str | UploadFile]):
    """The fields of a form: text, or files that were uploaded."""

    async def close(self) -> None:
        """Close the files.

        Cancellation: nowhere, as they lie in memory.
        """
        for _, value in self._pairs:
            if isinstance(value, UploadFile):
                await value.close()


class RequestHeaders(Mapping[str, str]):
    """Headers of a request; names are compared without case, and are given in lower case.

    Args:
        pairs: names and values in their order.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = [(name.lower(), value) for name, value in pairs]
        self._first: dict[str, str] = {}
        for name, value in self._pairs:
            self._first.setdefault(name, value)

    def __getitem__(self, name: str) -> str:
        return self._first[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._first

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __repr__(self) -> str:
        return f"RequestHeaders({self._pairs!r})"

    def getlist(self, name: str) -> list[str]:
        """Give all values of a name."""
        wanted = name.lower()
        return [value for each, value in self._pairs if each == wanted]

    @property
    def raw(self) -> list[tuple[bytes, bytes]]:
        """All names and values as bytes."""
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._pairs]
