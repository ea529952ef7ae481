"""Truncation of foreign text: messages of errors from user code, values, tracebacks, and text to tokenize.

Time is bounded, whatever the size of the text.  User code that formats an error runs once per error.
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
# Texts of errors and values
# ----------------------------------------------------------------------

MOST_CHARACTERS: Final = 4096
"""Maximum length of a text that does not come from the server's code."""

MOST_CAUSES: Final = 10
"""Maximum number of errors shown of a chain, including the last."""

CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal: C0, DEL, C1, line separators, bidi overrides, and surrogates."""

_MAX_PARTS: Final = 1000
_CACHED_TEXT: Final = "_ovmstrio_text"
_SCALARS: Final = (int, float, complex, bool, type(None))
_TEXTS: Final = (str, bytes, bytearray)
_CONTAINERS: Final = (list, tuple, set, frozenset, Mapping)
_PLAIN_STR: Final = BaseException.__str__
_KEY_ERROR_STR: Final = KeyError.__str__


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8; an unpaired surrogate, which JSON allows and UTF-8 does not, is passed through."""
    return text.encode("utf-8", "surrogatepass")


def escape_controls(text: str, *, keep: str = "") -> str:
    """Return a text with control characters as Python escapes, except for the characters in ``keep``."""
    if text.isprintable() or CONTROLS.search(text) is None:
        return text
    return CONTROLS.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


def cut(text: str, limit: int = MOST_CHARACTERS) -> str:
    """Truncate a text to ``limit`` characters; a truncated text ends with its original length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def text_of(error: BaseException) -> str:
    """Return the text of an error, truncated; the name of its class if its ``__str__`` fails.

    User code that creates the text runs once per error, at the first call.
    """
    if is_plain(error):
        return str(error)
    kept = vars(error).get(_CACHED_TEXT)
    if isinstance(kept, str):
        return kept
    try:
        text = _make_text(error)
    except BaseException:  # noqa: BLE001 - __str__ may be user code
        text = type(error).__name__
    vars(error)[_CACHED_TEXT] = text
    return text


def keep_texts(error: BaseException) -> None:
    """Create and cache the texts of an error and its causes in the calling thread."""
    for each in islice(causes_of(error), MOST_CAUSES):
        text_of(each)


def is_plain(error: BaseException) -> bool:
    """Return whether the text of an error is short and created without user code."""
    if type(error).__str__ not in {_PLAIN_STR, _KEY_ERROR_STR}:
        return False
    return all(type(each) in _SCALARS or (type(each) is str and len(each) <= MOST_CHARACTERS) for each in error.args)


def _make_text(error: BaseException) -> str:
    """Return ``str(error)`` truncated, if possible without creating the long text first."""
    made_by = type(error).__str__
    if isinstance(error, OSError) and not is_short((error.args, error.filename)):
        return shown((*error.args, error.filename))
    if made_by not in {_PLAIN_STR, _KEY_ERROR_STR}:
        return cut(str(error))
    if len(error.args) != 1:
        return shown(error.args)
    (value,) = error.args
    if made_by is _KEY_ERROR_STR or isinstance(value, (bytes, bytearray, *_CONTAINERS)):
        return shown(value)
    return cut(value if isinstance(value, str) else str(value))


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and its chain of causes and contexts, each once; the chain may be very long."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


class _TruncatingRepr(Repr):
    """A ``repr`` that truncates long values and their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 20
        self.maxstring = self.maxlong = self.maxother = 200


_truncating_repr: Final = _TruncatingRepr()


def shown(value: Any, limit: int = MOST_CHARACTERS) -> str:
    """Return the ``repr`` of a value, truncated; the parts of a large value are truncated as well."""
    if isinstance(value, _TEXTS):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}... ({len(value)} long)"
    try:
        return cut(repr(value) if is_short(value) else _truncating_repr.repr(value), limit)
    except BaseException as error:  # noqa: BLE001 - __repr__ may be user code
        return f"<{type(value).__name__} with failing repr: {type(error).__name__}>"


def is_short(value: Any) -> bool:
    """Return whether a value has few parts and few characters; objects are not inspected."""
    return _remaining_parts(value, _MAX_PARTS) > 0


def _remaining_parts(value: Any, left: int) -> int:
    """Subtract the parts of a value from ``left``, ten characters of a text as one part, until 0."""
    if isinstance(value, _TEXTS):
        return left - 1 - len(value) // 10
    left -= 1
    if not isinstance(value, _CONTAINERS) or len(value) > left:
        return left if not isinstance(value, _CONTAINERS) else 0
    for part in value.items() if isinstance(value, Mapping) else value:
        if left <= 0:
            break
        left = _remaining_parts(part, left)
    return left


# ----------------------------------------------------------------------
# Limits on text to tokenize: its length, and the prefix to tokenize for a token limit
# ----------------------------------------------------------------------

MAX_ITEMS: Final = 16_384
"""Maximum items of a list in a request: texts, messages, content parts, tools, token ids of a stop condition."""

MAX_TOKENIZED_CHARACTERS: Final = 4 * 2**20
"""Maximum characters of a request's texts without a token limit: about a million tokens of prose.

:func:`weight_of` counts the characters.
"""

AT_ONCE: Final = 2**18
"""Characters that are encoded in less than a millisecond."""

_CHARACTERS_PER_TOKEN: Final = 128
"""Maximum characters per token: the longest token of common vocabularies is a run of 128 spaces.

Tokens of prose have 3 to 5 characters.  The difference allows for tokenizers that drop characters, such as repeated
spaces and accents.
"""
_MIN_CHARACTERS: Final = 2**18
"""A text of this length is tokenized in about 10 ms, so that a low token limit need not be exact."""
_FIRST_CHARACTERS_PER_TOKEN: Final = 8
_MIN_PREFIX: Final = 4096
_GROWTH: Final = 4
_MARGIN: Final = 256
"""Tokens at the end of a prefix that may differ from those of the complete text.

A prefix may end within a word. WordPiece splits a word of up to 100 characters, of which it makes 100 tokens at most;
BPE and Unigram choose other tokens for a few characters before the end.
"""


def weight_of(text: str) -> int:
    """Estimate the UTF-8 size of a text: one byte per character if it is ASCII, otherwise three."""
    return len(text) if text.isascii() else 3 * len(text)


def max_characters(tokens: int, longest_token: int = 0) -> int:
    """Return the maximum number of characters in a text of ``tokens`` tokens.

    Args:
        tokens: the token limit of the model.
        longest_token: length of the longest token of the vocabulary, including added tokens; 0 if unknown.
    """
    return max(_MIN_CHARACTERS, tokens * max(_CHARACTERS_PER_TOKEN, longest_token))


def prefix_lengths(characters: int, tokens: int) -> Iterator[int]:
    """Return the lengths of prefixes to tokenize, one after the other, until one has enough tokens.

    The last length is ``characters``.  All prefixes together have less than 7/3 of the characters of the last one.

    Args:
        characters: length of the text.
        tokens: number of tokens needed.
    """
    length = max(_MIN_PREFIX, tokens * _FIRST_CHARACTERS_PER_TOKEN)
    while length < characters:
        yield length
        length *= _GROWTH
    yield characters


def has_enough_tokens(found: int, tokens: int) -> bool:
    """Return whether a prefix of ``found`` tokens begins with the first ``tokens`` tokens of the text, or has more."""
    return found >= tokens + _MARGIN


def encode_text(text: str) -> bytes:
    """Encode a text as UTF-8; an unpaired surrogate becomes ``?``.

    A long text is encoded in slices, so that a thread does not hold the GIL for long.
    """
    if len(text) <= AT_ONCE:
        return text.encode("utf-8", "replace")
    return b"".join(text[start : start + AT_ONCE].encode("utf-8", "replace") for start in range(0, len(text), AT_ONCE))


def size_of(value: Any, limit: int) -> int:
    """Return the size of a JSON value: the characters of strings and keys, plus one per value.

    Counting stops once the size is above ``limit``.
    """
    size = 0
    left: list[Iterator[Any] | Sequence[Any]] = [(value,)]
    while left and size <= limit:
        for each in left.pop():
            size += 1
            if isinstance(each, str):
                size += len(each)
            elif isinstance(each, dict | list | tuple):
                if len(each) > limit:
                    return size + len(each)
                if isinstance(each, dict):
                    size += sum(map(len, each))
                left.append(tuple(each.values()) if isinstance(each, dict) else each)
            if size > limit:
                break
    return size


# ----------------------------------------------------------------------
# Truncated copies of errors: texts, notes, frames and chains are bounded
# ----------------------------------------------------------------------

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None]

_MAX_FRAMES: Final = 50
_MAX_NOTES: Final = 10
_EARLIER_OMITTED: Final = "errors that came before this one are left out"
_FURTHER_OMITTED: Final = "further errors are left out"


def bounded(error: BaseException) -> BaseException:
    """Return an error that can be formatted in bounded time: the error itself, or a truncated copy.

    A copy has the last :data:`MOST_CAUSES` errors of the chain, including members of groups.  Texts and notes have at
    most :data:`MOST_CHARACTERS` characters, and tracebacks their first and last 25 frames.
    """
    members = list(islice(_members(error), MOST_CAUSES + 1))
    if len(members) <= MOST_CAUSES and all(map(_is_small, members)):
        return error
    return _ErrorCopier().copy(error)


def bounded_info(info: ExceptionInfo) -> ExceptionInfo:
    """Apply :func:`bounded` to a result of ``sys.exc_info``, whose traceback may differ from the error's."""
    error = bounded(info[1])
    return type(error), error, _bounded_frames(info[2])


def format_error(error: BaseException) -> str:
    """Format an error with its traceback and causes as Python does, in bounded time."""
    return "".join(traceback.format_exception(*bounded_info((type(error), error, error.__traceback__))))


def _members(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the errors of a chain, including members of groups with their chains."""
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
        (is_plain(error) or _has_short_builtin_text(error))
        and len(notes) <= _MAX_NOTES
        and all(isinstance(note, str) and len(note) <= MOST_CHARACTERS for note in notes)
        and not any(islice(_frames(error.__traceback__), _MAX_FRAMES, None))
    )


def _has_short_builtin_text(error: BaseException) -> bool:
    """Return whether a built-in class formats the error, such as OSError, and the text is short."""
    is_builtin = type(error).__str__.__class__ is type(BaseException.__str__)
    has_own_str = is_builtin and type(error).__str__ not in {BaseException.__str__, KeyError.__str__}
    quoted = (getattr(error, "filename", None), getattr(error, "text", None), text_of(error))
    return has_own_str and all(not isinstance(each, str) or len(each) <= MOST_CHARACTERS for each in quoted)


def _notes_of(error: BaseException) -> Sequence[Any]:
    notes = getattr(error, "__notes__", ())
    return notes if isinstance(notes, (list, tuple)) else (notes,)


def _frames(frame: TracebackType | None) -> Iterator[TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _bounded_frames(first: TracebackType | None) -> TracebackType | None:
    frames = list(_frames(first))
    if len(frames) <= _MAX_FRAMES:
        return first
    half = _MAX_FRAMES // 2
    result: TracebackType | None = None
    for each in chain(reversed(frames[-half:]), reversed(frames[:half])):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


class _ErrorCopier:
    """Creates truncated copies of at most :data:`MOST_CAUSES` errors."""

    def __init__(self) -> None:
        self._left = MOST_CAUSES
        self._seen: set[int] = set()

    def copy(self, error: BaseException) -> BaseException:
        """Copy an error and its chain."""
        first = last = self._copy_one(error)
        for each in islice(causes_of(error), 1, None):
            if not self._left or id(each) in self._seen:
                last.add_note(_EARLIER_OMITTED)
                break
            copy = self._copy_one(each)
            if last.__suppress_context__:
                last.__cause__ = copy
            else:
                last.__context__ = copy
            last = copy
        return first

    def _copy_one(self, error: BaseException) -> BaseException:
        self._seen.add(id(error))
        self._left = max(0, self._left - 1)
        copy = self._copy_group(error) if isinstance(error, BaseExceptionGroup) else _copy_text(error)
        # The traceback module prints "direct cause" or "during handling" accordingly.
        copy.__suppress_context__ = error.__cause__ is not None or error.__suppress_context__
        for note in islice(_notes_of(error), _MAX_NOTES):
            copy.add_note(cut(note if isinstance(note, str) else type(note).__name__))
        if len(_notes_of(error)) > _MAX_NOTES:
            copy.add_note(f"{len(_notes_of(error)) - _MAX_NOTES} notes are left out")
        copy.__traceback__ = _bounded_frames(error.__traceback__)
        return copy

    def _copy_group(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        members: list[BaseException] = []
        for each in group.exceptions:
            if not self._left:
                break
            if id(each) not in self._seen:
                members.append(self.copy(each))
        if len(members) < len(group.exceptions):
            members.append(_ErrorCopy(_FURTHER_OMITTED))
        kind = _class_named(_GroupCopy, type(group).__module__, type(group).__qualname__)
        copy: BaseException = kind(cut(group.message), members)
        return copy


def _copy_text(error: BaseException) -> BaseException:
    copy: BaseException = _class_named(_ErrorCopy, type(error).__module__, type(error).__qualname__)(text_of(error))
    return copy


class _ErrorCopy(Exception):
    """A truncated copy of an error."""


class _GroupCopy(BaseExceptionGroup[BaseException]):
    """A truncated copy of an exception group."""


@lru_cache(maxsize=256)
def _class_named(base: type[BaseException], module: str, name: str) -> type[Any]:
    """Create a class with the given module and qualified name."""
    made = type(name.rpartition(".")[2], (base,), {"__module__": module})
    made.__qualname__ = name
    return made
