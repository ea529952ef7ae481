"""Texts of others, cut where they enter: of errors that code of users raises, and of the values in them.

Nothing here takes longer for a larger text, and what users write to tell of their errors is called once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from reprlib import Repr
from typing import Any, Final

__all__ = [
    "CONTROLS",
    "MOST_CAUSES",
    "MOST_CHARACTERS",
    "causes_of",
    "cut",
    "escape_controls",
    "is_plain",
    "is_short",
    "keep_texts",
    "shown",
    "text_of",
    "utf8",
]

MOST_CHARACTERS: Final = 4096
"""Of a text that is not the server's own."""

MOST_CAUSES: Final = 10
"""How many errors of a chain are told, the last one included."""

CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys instead of showing: C0, DEL, C1, line separators, bidi overrides, and surrogates."""

_MOST_PARTS: Final = 1000
_KEPT: Final = "_ovmstrio_text"
_SCALARS: Final = (int, float, complex, bool, type(None))
_TEXTS: Final = (str, bytes, bytearray)
_CONTAINERS: Final = (list, tuple, set, frozenset, Mapping)
_BARE: Final = BaseException.__str__
_QUOTED: Final = KeyError.__str__


def utf8(text: str) -> bytes:
    """Encode a text; half of a surrogate pair, which JSON can write and UTF-8 cannot, is passed on as it came."""
    return text.encode("utf-8", "surrogatepass")


def escape_controls(text: str, *, keep: str = "") -> str:
    """Return a text with its control characters written as Python's escapes, except for those in ``keep``."""
    if text.isprintable() or CONTROLS.search(text) is None:
        return text
    return CONTROLS.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """Give a text, or its beginning and its length if it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def text_of(error: BaseException) -> str:
    """Give the text of an error, cut; the name of its class if it cannot even tell that.

    Code of users that makes the text runs once for each error, when it is first asked for.
    """
    if is_plain(error):
        return str(error)
    kept = vars(error).get(_KEPT)
    if isinstance(kept, str):
        return kept
    try:
        text = _text(error)
    except BaseException:  # noqa: BLE001 - users write their errors' texts, too
        text = type(error).__name__
    vars(error)[_KEPT] = text
    return text


def keep_texts(error: BaseException) -> None:
    """Have an error and those before it make their texts here, in the thread of whoever calls."""
    for each in islice(causes_of(error), MOST_CAUSES):
        text_of(each)


def is_plain(error: BaseException) -> bool:
    """Tell whether the text of an error is short, and no code of a user's makes it."""
    if type(error).__str__ not in {_BARE, _QUOTED}:
        return False
    return all(type(each) in _SCALARS or (type(each) is str and len(each) <= MOST_CHARACTERS) for each in error.args)


def _text(error: BaseException) -> str:
    """Give what ``str`` gives, without a text of that length on the way where that is known how."""
    made_by = type(error).__str__
    if isinstance(error, OSError) and not is_short((error.args, error.filename)):
        return shown((*error.args, error.filename))
    if made_by not in {_BARE, _QUOTED}:
        return cut(str(error))
    if len(error.args) != 1:
        return shown(error.args)
    (value,) = error.args
    if made_by is _QUOTED or isinstance(value, (bytes, bytearray, *_CONTAINERS)):
        return shown(value)
    return cut(value if isinstance(value, str) else str(value))


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Give an error, what it was raised from or during, and so on, each once; there may be very many."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


class _Beginnings(Repr):
    """Shows the beginnings of what is long, and of what that consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 20
        self.maxstring = self.maxlong = self.maxother = 200


_beginnings: Final = _Beginnings()


def shown(value: Any, most: int = MOST_CHARACTERS) -> str:
    """Give the ``repr`` of a value, cut; of a large one that of the beginnings of its parts."""
    if isinstance(value, _TEXTS):
        return repr(value) if len(value) <= most else f"{value[:most]!r}... ({len(value)} long)"
    try:
        return cut(repr(value) if is_short(value) else _beginnings.repr(value), most)
    except BaseException as error:  # noqa: BLE001 - users write what shows their values, too
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def is_short(value: Any) -> bool:
    """Tell whether a value has few parts, and few characters in them; of objects nothing is asked."""
    return _parts_left(value, _MOST_PARTS) > 0


def _parts_left(value: Any, left: int) -> int:
    """Take the parts of a value off a number, of texts one for every ten characters, until nothing is left."""
    if isinstance(value, _TEXTS):
        return left - 1 - len(value) // 10
    left -= 1
    if not isinstance(value, _CONTAINERS) or len(value) > left:
        return left if not isinstance(value, _CONTAINERS) else 0
    for part in value.items() if isinstance(value, Mapping) else value:
        if left <= 0:
            break
        left = _parts_left(part, left)
    return left
