"""Texts of others, cut where they enter: of errors that code of users raises, and of the values in them.

Nothing here takes longer for a larger text, and what users write to tell of their errors is called once.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from reprlib import Repr
from types import TracebackType
from typing import Any, Final

# ----------------------------------------------------------------------
# Texts of others, cut where they enter: of errors that code of users raises, and of the values in them
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Bounds on the work that a text may cause: how long it may be, and how much of it is tokenized for a token limit
# ----------------------------------------------------------------------

MAX_ITEMS: Final = 16_384
"""Members of a list of one request: texts, messages, content parts, tools, token numbers of a stop condition."""

MAX_TOKENIZED_CHARACTERS: Final = 4 * 2**20
"""Characters of the texts of one request where no token limit applies: a million tokens of prose, or ten novels.

As :func:`weight_of` counts them.
"""

AT_ONCE: Final = 2**18
"""Characters that are encoded within a millisecond."""

_CHARACTERS_PER_TOKEN: Final = 128
"""The longest token of common vocabularies is a run of 128 blanks; tokens of prose have 3 to 5 characters.

The factor between the two is for tokenizers that drop characters, such as repeated blanks and accents.
"""
_LEAST_CHARACTERS: Final = 2**18
"""A text of so few characters is tokenized in some 10 ms, so that a limit of few tokens need not be exact."""
_FIRST_CHARACTERS_PER_TOKEN: Final = 8
_LEAST_PREFIX: Final = 4096
_GROWTH: Final = 4
_MARGIN: Final = 256
"""Tokens at the end of a prefix that may differ from those of the complete text.

A prefix may end within a word. WordPiece splits a word of up to 100 characters, of which it makes 100 tokens at most;
BPE and Unigram choose other tokens for a few characters before the end.
"""


def weight_of(text: str) -> int:
    """Return the characters of a text, of one that is not ASCII three for each: about its bytes, without counting."""
    return len(text) if text.isascii() else 3 * len(text)


def max_characters(tokens: int, longest_token: int = 0) -> int:
    """Return how many characters a text of ``tokens`` tokens may have; a longer text cannot fit.

    Args:
        tokens: the limit of the model.
        longest_token: characters of the longest token of the vocabulary, added tokens included; 0 if unknown.
    """
    return max(_LEAST_CHARACTERS, tokens * max(_CHARACTERS_PER_TOKEN, longest_token))


def prefix_lengths(characters: int, tokens: int) -> Iterator[int]:
    """Return the lengths of prefixes to tokenize, one after the other, until one has enough tokens.

    The last length is ``characters``.  All prefixes together have less than 7/3 of the characters of the last one.

    Args:
        characters: of the text.
        tokens: how many of its tokens are needed.
    """
    length = max(_LEAST_PREFIX, tokens * _FIRST_CHARACTERS_PER_TOKEN)
    while length < characters:
        yield length
        length *= _GROWTH
    yield characters


def has_enough_tokens(found: int, tokens: int) -> bool:
    """Return whether a prefix of ``found`` tokens begins with the first ``tokens`` tokens of the text, or has more."""
    return found >= tokens + _MARGIN


def encode_text(text: str) -> bytes:
    """Encode a text as UTF-8; half of a surrogate pair becomes ``?``.

    A long text is encoded in slices, so that a thread that does it does not keep the interpreter for itself.
    """
    if len(text) <= AT_ONCE:
        return text.encode("utf-8", "replace")
    return b"".join(text[start : start + AT_ONCE].encode("utf-8", "replace") for start in range(0, len(text), AT_ONCE))


def size_of(value: Any, most: int) -> int:
    """Return the size of a JSON value: its characters, keys included, and one for each member.

    Counting stops once the size is above ``most``.
    """
    size = 0
    left: list[Iterator[Any] | Sequence[Any]] = [(value,)]
    while left and size <= most:
        for each in left.pop():
            size += 1
            if isinstance(each, str):
                size += len(each)
            elif isinstance(each, dict | list | tuple):
                if len(each) > most:
                    return size + len(each)
                if isinstance(each, dict):
                    size += sum(map(len, each))
                left.append(tuple(each.values()) if isinstance(each, dict) else each)
            if size > most:
                break
    return size


# ----------------------------------------------------------------------
# Errors small enough to be written down, whatever was raised: texts, notes, frames and chains have bounds
# ----------------------------------------------------------------------

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None]

_MOST_FRAMES: Final = 50
_MOST_NOTES: Final = 10
_EARLIER: Final = "errors that came before this one are left out"
_FURTHER: Final = "further errors are left out"


def bounded(error: BaseException) -> BaseException:
    """Give an error that can be written down in a bounded time: itself, or a likeness.

    Of a chain the last :data:`MOST_CAUSES` errors are told, with those in groups counted; of each text and note
    :data:`MOST_CHARACTERS`, of the frames of each the first 25 and the last.
    """
    members = list(islice(_members(error), MOST_CAUSES + 1))
    if len(members) <= MOST_CAUSES and all(map(_is_small, members)):
        return error
    return _Likenesses().of(error)


def bounded_info(info: ExceptionInfo) -> ExceptionInfo:
    """Do the same for what ``sys.exc_info`` gives, whose traceback need not be that of the error."""
    error = bounded(info[1])
    return type(error), error, _bounded_frames(info[2])


def format_error(error: BaseException) -> str:
    """Give an error with its traceback and what it came from, as Python writes it, in a bounded time."""
    return "".join(traceback.format_exception(*bounded_info((type(error), error, error.__traceback__))))


def _members(error: BaseException) -> Iterator[BaseException]:
    """Give the errors of a chain, and those of the groups in it with their chains."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        for each in causes_of(waiting.pop()):
            if id(each) in seen:
                break
            seen.add(id(each))
            yield each
            if isinstance(each, BaseExceptionGroup):
                waiting.extend(each.exceptions[: MOST_CAUSES + 1])


def _is_small(error: BaseException) -> bool:
    notes = _notes_of(error)
    return (
        (is_plain(error) or _tells_shortly(error))
        and len(notes) <= _MOST_NOTES
        and all(isinstance(note, str) and len(note) <= MOST_CHARACTERS for note in notes)
        and not any(islice(_frames(error.__traceback__), _MOST_FRAMES, None))
    )


def _tells_shortly(error: BaseException) -> bool:
    """Tell so of errors of Python's own that make their texts themselves, as those of files and of groups."""
    is_pythons_own = type(error).__str__.__class__ is type(BaseException.__str__)
    is_made_of_short = is_pythons_own and type(error).__str__ not in {BaseException.__str__, KeyError.__str__}
    quoted = (getattr(error, "filename", None), getattr(error, "text", None), text_of(error))
    return is_made_of_short and all(not isinstance(each, str) or len(each) <= MOST_CHARACTERS for each in quoted)


def _notes_of(error: BaseException) -> Sequence[Any]:
    notes = getattr(error, "__notes__", ())
    return notes if isinstance(notes, (list, tuple)) else (notes,)


def _frames(frame: TracebackType | None) -> Iterator[TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _bounded_frames(first: TracebackType | None) -> TracebackType | None:
    frames = list(_frames(first))
    if len(frames) <= _MOST_FRAMES:
        return first
    half = _MOST_FRAMES // 2
    result: TracebackType | None = None
    for each in chain(reversed(frames[-half:]), reversed(frames[:half])):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


class _Likenesses:
    """Makes likenesses of as many errors as may be told."""

    def __init__(self) -> None:
        self._left = MOST_CAUSES
        self._seen: set[int] = set()

    def of(self, error: BaseException) -> BaseException:
        """Make the likeness of an error with what it came from."""
        first = last = self._of_one(error)
        for each in islice(causes_of(error), 1, None):
            if not self._left or id(each) in self._seen:
                last.add_note(_EARLIER)
                break
            likeness = self._of_one(each)
            if last.__suppress_context__:
                last.__cause__ = likeness
            else:
                last.__context__ = likeness
            last = likeness
        return first

    def _of_one(self, error: BaseException) -> BaseException:
        self._seen.add(id(error))
        self._left = max(0, self._left - 1)
        likeness = self._of_group(error) if isinstance(error, BaseExceptionGroup) else _of_text(error)
        # To be written as what it was raised from is written.
        likeness.__suppress_context__ = error.__cause__ is not None or error.__suppress_context__
        for note in islice(_notes_of(error), _MOST_NOTES):
            likeness.add_note(cut(note if isinstance(note, str) else type(note).__name__))
        if len(_notes_of(error)) > _MOST_NOTES:
            likeness.add_note(f"{len(_notes_of(error)) - _MOST_NOTES} notes are left out")
        likeness.__traceback__ = _bounded_frames(error.__traceback__)
        return likeness

    def _of_group(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        members: list[BaseException] = []
        for each in group.exceptions:
            if not self._left:
                break
            if id(each) not in self._seen:
                members.append(self.of(each))
        if len(members) < len(group.exceptions):
            members.append(_Likeness(_FURTHER))
        kind = _class_like(_GroupLikeness, type(group).__module__, type(group).__qualname__)
        likeness: BaseException = kind(cut(group.message), members)
        return likeness


def _of_text(error: BaseException) -> BaseException:
    likeness: BaseException = _class_like(_Likeness, type(error).__module__, type(error).__qualname__)(text_of(error))
    return likeness


class _Likeness(Exception):
    """Stands for an error."""


class _GroupLikeness(BaseExceptionGroup[BaseException]):
    """Stands for a group of errors."""


@lru_cache(maxsize=256)
def _class_like(base: type[BaseException], module: str, name: str) -> type[Any]:
    """Make a class that is called like another one."""
    made = type(name.rpartition(".")[2], (base,), {"__module__": module})
    made.__qualname__ = name
    return made
