"""What a JSON object has under its names, read one by one; all that is wrong with them is gathered."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ovmstrio.core.gathered import Gathered

__all__ = ["MOST_LEVELS", "MOST_OBJECTS", "Fields", "is_too_deep", "type_of"]

UNSIGNED: Final = range(2**32)
"""What OVMS takes for an unsigned number."""

MOST_LEVELS: Final = 64
"""Of lists and objects in each other, where values are passed on as they are."""

MOST_OBJECTS: Final = 20_000
"""In the lists of a body whose objects are read one by one, such as messages, their parts, and tools."""

_SHOWN_CHARACTERS: Final = 80


def type_of(value: Any) -> str:
    """Say what a value of JSON is."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


def shown(value: Any) -> str:
    """Show a value to who sent it: numbers and short texts as they are, of others what they are."""
    if isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return type_of(value)


def is_too_deep(value: Any) -> bool:
    """Tell whether more lists and objects lie in each other than may."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


class Fields:
    """The fields of an object, each given if it is there and as it should be; null is as good as nothing.

    Args:
        document: the object.
        wrong: takes what is wrong.
        at: the path of the object, empty for the whole body.
        listed: counts the objects in lists of the whole body.
    """

    __slots__ = ("_at", "_document", "_listed", "_wrong")

    def __init__(
        self, document: Mapping[str, Any], wrong: Gathered, at: str = "", listed: Counter[str] | None = None
    ) -> None:
        self._document = document
        self._wrong = wrong
        self._at = at
        self._listed = Counter() if listed is None else listed

    def get(self, name: str) -> Any:
        """Give what is there; None for nothing."""
        return self._document.get(name)

    def names(self) -> set[str]:
        """Give the names that are there."""
        return set(self._document)

    def path(self, name: str) -> str:
        """Name a field as the caller sees it."""
        return f"{self._at}.{name}" if self._at else name

    def refuse(self, name: str, message: str, *, got: str = "", code: str = "") -> None:
        """Note that a field cannot be as it is."""
        path = self.path(name)
        where = "" if not got or path in message or name in message else f" in {path}"
        self._wrong.add(InvalidField(message, field=path, got=got + where, code=code))

    def _typed(self, name: str, kind: type | tuple[type, ...], message: str) -> Any:
        value = self._document.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.refuse(name, message, got=shown(value))
            return None
        return value

    def flag(self, name: str, message: str = "") -> bool | None:
        """Read true or false; ``message`` says what it should be."""
        value: bool | None = self._typed(name, bool, message or f"{self.path(name)} accepts values true or false")
        return value

    def text(self, name: str, message: str = "") -> str | None:
        """Read a text."""
        value: str | None = self._typed(name, str, message or f"{self.path(name)} is not a string")
        return value

    def number(
        self, name: str, low: float, high: float, message: str = "", *, excludes_high: bool = False
    ) -> float | None:
        """Read a number from ``low`` to ``high``; ``message`` says so."""
        value: float | None = self._typed(name, (int, float), f"{self.path(name)} is not a valid number")
        if value is None:
            return None
        if not (low <= value <= high and isfinite(value)) or (excludes_high and value == high):
            self.refuse(name, message or f"{self.path(name)} is not a valid number", got=shown(value))
            return None
        return float(value)

    def unsigned(self, name: str, *, least: int = 0, message: str = "") -> int | None:
        """Read a whole number that is not below ``least``, of which ``message`` tells."""
        value: int | None = self._typed(name, int, f"{self.path(name)} is not an unsigned integer")
        if value is None:
            return None
        if value not in UNSIGNED:
            above = f"{self.path(name)} value can't be greater than {UNSIGNED[-1]}"
            self.refuse(name, above if value > 0 else f"{self.path(name)} is not an unsigned integer", got=shown(value))
            return None
        if value < least:
            self.refuse(name, message or f"{self.path(name)} value should be at least {least}", got=shown(value))
            return None
        return value

    def whole(self, name: str, message: str) -> int | None:
        """Read a whole number of 32 bits."""
        value: int | None = self._typed(name, int, message)
        if value is not None and not -(2**31) <= value < 2**31:
            self.refuse(name, message, got=shown(value))
            return None
        return value

    def items(self, name: str, message: str = "") -> list[Any] | None:
        """Read a list."""
        value: list[Any] | None = self._typed(name, list, message or f"{self.path(name)} is not an array")
        return value

    def mapping(self, name: str, message: str = "") -> dict[str, Any] | None:
        """Read an object that is passed on as it is, of few levels."""
        value: dict[str, Any] | None = self._typed(name, dict, message or f"{self.path(name)} is not an object")
        if value is not None and is_too_deep(value):
            self.refuse(name, f"{self.path(name)}: at most {MOST_LEVELS} lists and objects may lie in each other")
            return None
        return value

    def within(self, name: str, message: str = "") -> Fields | None:
        """Read an object's own fields."""
        value = self._typed(name, dict, message or f"{self.path(name)} is not an object")
        return None if value is None else Fields(value, self._wrong, self.path(name), self._listed)

    def objects(self, name: str, message: str = "", inner: str = "") -> Iterator[Fields]:
        """Read a list of objects, as far as the body has not too many; ``inner`` says that each should be one."""
        values = self.items(name, message) or ()
        self._listed["objects"] += len(values)
        if values and self._listed["objects"] > MOST_OBJECTS:
            self.refuse(name, f"{self.path(name)}: a body may have {MOST_OBJECTS} objects in its lists")
            return
        for position, value in enumerate(values):
            path = f"{self.path(name)}[{position}]"
            if isinstance(value, dict):
                yield Fields(value, self._wrong, path, self._listed)
            else:
                said = inner or f"{path} is not an object"
                self._wrong.add(InvalidField(said, field=path, got=shown(value)))
