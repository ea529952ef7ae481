"""Validating reader of JSON object fields; collects all errors of a body."""

from __future__ import annotations

from itertools import islice
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import prompt_too_long
from ovmstrio.util.truncation import MAX_ITEMS, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ovmstrio.core.errors import ErrorList
    from ovmstrio.core.generation import GenerationLimits

_UNSIGNED: Final = range(2**32)  # OVMS's range of unsigned integers

_MAX_LEVELS: Final = 64  # Maximum nesting of values that are passed on unparsed

_MAX_OBJECT_SIZE: Final = 2**18
"""Maximum characters and members of an object that is passed on unparsed, such as a JSON schema."""

MAX_PROMPT_TOKENS: Final = 2**18
"""Maximum token ids of a body for a model without a limit."""

TOP_LOGPROBS_UNSUPPORTED: Final = (
    "top_logprobs above 0 is not supported: only the chosen token's probability is known; omit it"
)
_SHOWN_CHARACTERS: Final = 80
MAX_NAME_CHARACTERS: Final = 256
"""Maximum length of a keyword, such as a role or type."""


def type_of(value: Any) -> str:
    """Return the JSON type of a value for error messages."""
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
    """Return numbers and short strings as text, other values as their type, for error messages."""
    if isinstance(value, bool | int | float | str):
        text = repr(value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return type_of(value)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_LEVELS + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


class PromptSize:
    """Counter of prompt characters and of list objects in a body; ``field`` is where most of the text is."""

    __slots__ = ("_field", "_limits", "_most", "characters", "objects")

    def __init__(self, limits: GenerationLimits | None = None, field: str = "") -> None:
        self._limits = limits
        self._field = field
        self._most = inf if limits is None else limits.max_characters
        self.characters = 0
        self.objects = 0

    def add(self, characters: int) -> None:
        """Count characters; raise ``ContextExceeded`` immediately if the prompt cannot fit the context."""
        self.characters += characters
        if self.characters > self._most and self._limits is not None:
            raise prompt_too_long(self._limits, self._field, self.characters)


def check_length(text: str, limits: GenerationLimits, field: str, errors: ErrorList) -> None:
    """Record an error if a text cannot fit the model's context because of its length."""
    if len(text) > limits.max_characters:
        errors.add(prompt_too_long(limits, field, len(text)))


def are_token_ids(values: list[Any], most: int) -> bool:
    """Return whether a list is not empty and has only token ids below ``most``."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < most


class Fields:
    """Reader of an object's fields.  Null counts as absent; invalid values are recorded in ``wrong`` and read as None.

    ``at`` is the path of the object in the body; ``prompt`` counts prompt characters and list objects.
    """

    __slots__ = ("_at", "_document", "_errors", "prompt")

    def __init__(
        self, document: Mapping[str, Any], errors: ErrorList, at: str = "", prompt: PromptSize | None = None
    ) -> None:
        self._document = document
        self._errors = errors
        self._at = at
        self.prompt = prompt or PromptSize()

    def get(self, name: str) -> Any:
        """Return the raw value; None if absent."""
        return self._document.get(name)

    def word(self, name: str) -> Any:
        """Return the raw value; overlong strings are cut, so that they match no keyword."""
        value = self._document.get(name)
        return value[: MAX_NAME_CHARACTERS + 1] if isinstance(value, str) else value

    def names(self) -> set[str]:
        """Return the field names, or a bounded number of them."""
        return set(islice(self._document, MAX_NAME_CHARACTERS))

    def path(self, name: str) -> str:
        """Return the full path of a field."""
        return f"{self._at}.{name}" if self._at else name

    def refuse(self, name: str, message: str, *, got: str = "", code: str = "") -> None:
        """Record an error of a field."""
        path = self.path(name)
        where = "" if not got or path in message or name in message else f" in {path}"
        self._errors.add(InvalidField(message, field=path, got=got + where, code=code))

    def _typed(self, name: str, kind: type | tuple[type, ...], message: str) -> Any:
        value = self._document.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.refuse(name, message, got=shown(value))
            return None
        return value

    def flag(self, name: str, message: str = "") -> bool | None:
        """Return a boolean."""
        value: bool | None = self._typed(name, bool, message or f"{self.path(name)} accepts values true or false")
        return value

    def text(self, name: str, message: str = "") -> str | None:
        """Return a string."""
        value: str | None = self._typed(name, str, message or f"{self.path(name)} is not a string")
        return value

    def prompt_text(self, name: str, message: str = "") -> str | None:
        """Return a string that becomes part of the prompt."""
        value = self.text(name, message)
        self.prompt.add(len(value or ""))
        return value

    def choice(self, name: str, values: tuple[str, ...], message: str = "") -> str | None:
        """Return one of several strings."""
        value = self.name_text(name, message)
        if value is not None and value not in values:
            self.refuse(name, f"{name} should be one of {', '.join(values)}", got=shown(value))
            return None
        return value

    def name_text(self, name: str, message: str = "") -> str | None:
        """Return a short string, such as a name."""
        value = self.text(name, message)
        if value is not None and len(value) > MAX_NAME_CHARACTERS:
            self.refuse(
                name, f"{self.path(name)}: expected at most {MAX_NAME_CHARACTERS} characters", got=str(len(value))
            )
            return None
        return value

    def number(
        self, name: str, low: float, high: float, message: str = "", *, excludes_high: bool = False
    ) -> float | None:
        """Return a number from ``low`` to ``high``."""
        value: float | None = self._typed(name, (int, float), f"{self.path(name)} is not a valid number")
        if value is None:
            return None
        if not (low <= value <= high and isfinite(value)) or (excludes_high and value == high):
            self.refuse(name, message or f"{self.path(name)} is not a valid number", got=shown(value))
            return None
        return float(value)

    def unsigned(self, name: str, *, least: int = 0, message: str = "") -> int | None:
        """Return an unsigned integer of at least ``least``; ``message`` reports smaller values."""
        value: int | None = self._typed(name, int, f"{self.path(name)} is not an unsigned integer")
        if value is None:
            return None
        if value not in _UNSIGNED:
            above = f"{self.path(name)} value can't be greater than {_UNSIGNED[-1]}"
            self.refuse(name, above if value > 0 else f"{self.path(name)} is not an unsigned integer", got=shown(value))
            return None
        if value < least:
            self.refuse(name, message or f"{self.path(name)} value should be at least {least}", got=shown(value))
            return None
        return value

    def whole(self, name: str, message: str) -> int | None:
        """Return a 32-bit integer."""
        value: int | None = self._typed(name, int, message)
        if value is not None and not -(2**31) <= value < 2**31:
            self.refuse(name, message, got=shown(value))
            return None
        return value

    def items(self, name: str, message: str = "") -> list[Any] | None:
        """Return a list of at most :data:`MAX_ITEMS` members."""
        value: list[Any] | None = self._typed(name, list, message or f"{self.path(name)} is not an array")
        if value is not None and len(value) > MAX_ITEMS:
            self.refuse(name, f"{self.path(name)}: expected at most {MAX_ITEMS} members", got=str(len(value)))
            return None
        return value

    def mapping(self, name: str, message: str = "", *, is_prompt: bool = False) -> dict[str, Any] | None:
        """Return an object that is passed on unparsed, with bounded depth and size."""
        value: dict[str, Any] | None = self._typed(name, dict, message or f"{self.path(name)} is not an object")
        if value is None:
            return None
        size = size_of(value, _MAX_OBJECT_SIZE)
        self.prompt.add(size if is_prompt else 0)
        if size > _MAX_OBJECT_SIZE:
            self.refuse(name, f"{self.path(name)}: expected at most {_MAX_OBJECT_SIZE} characters and members")
            return None
        if _is_too_deep(value):
            self.refuse(name, f"{self.path(name)}: expected at most {_MAX_LEVELS} nested lists and objects")
            return None
        return value

    def within(self, name: str, message: str = "") -> Fields | None:
        """Return the reader of a nested object."""
        value = self._typed(name, dict, message or f"{self.path(name)} is not an object")
        return None if value is None else Fields(value, self._errors, self.path(name), self.prompt)

    def objects(self, name: str, message: str = "", inner: str = "") -> Iterator[Fields]:
        """Yield readers of the objects of a list, up to the limit of a body; ``inner`` reports other members."""
        values: list[Any] = self._typed(name, list, message or f"{self.path(name)} is not an array") or []
        self.prompt.objects += len(values)
        if values and self.prompt.objects > MAX_ITEMS:
            self.refuse(name, f"{self.path(name)}: expected at most {MAX_ITEMS} objects in all lists")
            return
        for position, value in enumerate(values):
            path = f"{self.path(name)}[{position}]"
            if isinstance(value, dict):
                yield Fields(value, self._errors, path, self.prompt)
            else:
                self._errors.add(InvalidField(inner or f"{path} is not an object", field=path, got=shown(value)))


# Ignored fields: checked for their type, as OpenAI does

_TEXT_FIELDS: Final = ("user", "safety_identifier", "prompt_cache_key", "service_tier", "verbosity")
_OBJECT_FIELDS: Final = ("metadata", "prediction")
_TRUNCATION: Final = "truncation"
_DISABLED: Final = "disabled"


def check_ignored_fields(fields: Fields) -> None:
    """Check the types of ignored fields that all text endpoints accept."""
    for name in _TEXT_FIELDS:
        fields.text(name)
    for name in _OBJECT_FIELDS:
        fields.mapping(name)


def check_ignored_responses_fields(fields: Fields) -> None:
    """Check the types of ignored fields of the Responses API, and refuse unsupported ones."""
    fields.mapping("stream_options")
    fields.unsigned("max_tool_calls", least=1)
    for each in fields.items("include") or ():
        if not isinstance(each, str):
            fields.refuse("include", "include contains a non string element")
            break
    cut = fields.text(_TRUNCATION)
    if cut not in {None, _DISABLED, "auto"}:
        fields.refuse(
            _TRUNCATION, f"{_TRUNCATION} should be either 'auto' or '{_DISABLED}'", got=repr(cut[:40]) if cut else "''"
        )
    if fields.unsigned("top_logprobs"):
        fields.refuse("top_logprobs", TOP_LOGPROBS_UNSUPPORTED, code="unsupported_parameter")
