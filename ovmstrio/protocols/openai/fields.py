"""What a JSON object has under its names, read one by one; all that is wrong with them is gathered."""

from __future__ import annotations

from itertools import islice
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import prompt_too_long
from ovmstrio.util.truncation import MAX_ITEMS, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ovmstrio.core.errors import Gathered
    from ovmstrio.core.generation import GenerationLimits

__all__ = [
    "MAX_NAME_CHARACTERS",
    "MAX_OBJECT_SIZE",
    "MAX_PROMPT_TOKENS",
    "MOST_LEVELS",
    "Fields",
    "PromptSize",
    "are_tokens",
    "check_length",
    "check_passed_over",
    "check_passed_over_of_responses",
    "is_too_deep",
    "type_of",
]

# ----------------------------------------------------------------------
# What a JSON object has under its names, read one by one; all that is wrong with them is gathered
# ----------------------------------------------------------------------

UNSIGNED: Final = range(2**32)
"""What OVMS takes for an unsigned number."""

MOST_LEVELS: Final = 64
"""Of lists and objects in each other, where values are passed on as they are."""

MAX_OBJECT_SIZE: Final = 2**18
"""Characters and members of an object that is passed on as it is, such as the schema of a function's parameters."""

MAX_PROMPT_TOKENS: Final = 2**18
"""Numbers of tokens in the lists of one body, where the model has no limit of its own."""

_SHOWN_CHARACTERS: Final = 80
MAX_NAME_CHARACTERS: Final = 256
"""Of a text that is one of a few words, such as a role or a type."""


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
        text = repr(value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
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


class PromptSize:
    """The characters of a body that become part of the prompt, and the objects in its lists.

    Args:
        limits: of the model; None for an endpoint that checks its texts itself.
        field: the field that most of the characters are in, for the error.
    """

    __slots__ = ("_field", "_limits", "_most", "characters", "objects")

    def __init__(self, limits: GenerationLimits | None = None, field: str = "") -> None:
        self._limits = limits
        self._field = field
        self._most = inf if limits is None else limits.max_characters
        self.characters = 0
        self.objects = 0

    def add(self, characters: int) -> None:
        """Count characters of the prompt.

        Raises:
            ContextExceeded: the prompt cannot fit the context; raised at once, so that nothing else is read.
        """
        self.characters += characters
        if self.characters > self._most and self._limits is not None:
            raise prompt_too_long(self._limits, self._field, self.characters)


def check_length(text: str, limits: GenerationLimits, field: str, wrong: Gathered) -> None:
    """Refuse a text that cannot fit the context of a model, by its length alone."""
    if len(text) > limits.max_characters:
        wrong.add(prompt_too_long(limits, field, len(text)))


def are_tokens(values: list[Any], most: int) -> bool:
    """Return whether a list has numbers of tokens below ``most``, and at least one."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < most


class Fields:
    """The fields of an object, each given if it is there and as it should be; null is as good as nothing.

    Args:
        document: the object.
        wrong: takes what is wrong.
        at: the path of the object, empty for the whole body.
        prompt: counts what the prompt is made of, and the objects in lists of the body.
    """

    __slots__ = ("_at", "_document", "_wrong", "prompt")

    def __init__(
        self, document: Mapping[str, Any], wrong: Gathered, at: str = "", prompt: PromptSize | None = None
    ) -> None:
        self._document = document
        self._wrong = wrong
        self._at = at
        self.prompt = prompt or PromptSize()

    def get(self, name: str) -> Any:
        """Give what is there; None for nothing."""
        return self._document.get(name)

    def word(self, name: str) -> Any:
        """Return what is there; a text that is too long for a word is cut, so that it is none of the known words."""
        value = self._document.get(name)
        return value[: MAX_NAME_CHARACTERS + 1] if isinstance(value, str) else value

    def names(self) -> set[str]:
        """Return the names that are there, or some of them where there are very many."""
        return set(islice(self._document, MAX_NAME_CHARACTERS))

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

    def prompt_text(self, name: str, message: str = "") -> str | None:
        """Read a text that becomes part of the prompt.

        Raises:
            ContextExceeded: the prompt cannot fit the context.
        """
        value = self.text(name, message)
        self.prompt.add(len(value or ""))
        return value

    def name_text(self, name: str, message: str = "") -> str | None:
        """Read a text that names something, which is short."""
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
        """Read a list of at most :data:`MAX_ITEMS` members."""
        value: list[Any] | None = self._typed(name, list, message or f"{self.path(name)} is not an array")
        if value is not None and len(value) > MAX_ITEMS:
            self.refuse(name, f"{self.path(name)}: expected at most {MAX_ITEMS} members", got=str(len(value)))
            return None
        return value

    def mapping(self, name: str, message: str = "", *, is_prompt: bool = False) -> dict[str, Any] | None:
        """Read an object that is passed on as it is, of few levels and bounded size.

        Raises:
            ContextExceeded: it becomes part of the prompt (``is_prompt``), which cannot fit the context.
        """
        value: dict[str, Any] | None = self._typed(name, dict, message or f"{self.path(name)} is not an object")
        if value is None:
            return None
        size = size_of(value, MAX_OBJECT_SIZE)
        self.prompt.add(size if is_prompt else 0)
        if size > MAX_OBJECT_SIZE:
            self.refuse(name, f"{self.path(name)}: expected at most {MAX_OBJECT_SIZE} characters and members")
            return None
        if is_too_deep(value):
            self.refuse(name, f"{self.path(name)}: at most {MOST_LEVELS} lists and objects may lie in each other")
            return None
        return value

    def within(self, name: str, message: str = "") -> Fields | None:
        """Read an object's own fields."""
        value = self._typed(name, dict, message or f"{self.path(name)} is not an object")
        return None if value is None else Fields(value, self._wrong, self.path(name), self.prompt)

    def objects(self, name: str, message: str = "", inner: str = "") -> Iterator[Fields]:
        """Read a list of objects, as far as the body has not too many; ``inner`` says that each should be one."""
        values: list[Any] = self._typed(name, list, message or f"{self.path(name)} is not an array") or []
        self.prompt.objects += len(values)
        if values and self.prompt.objects > MAX_ITEMS:
            self.refuse(name, f"{self.path(name)}: a body may have {MAX_ITEMS} objects in its lists")
            return
        for position, value in enumerate(values):
            path = f"{self.path(name)}[{position}]"
            if isinstance(value, dict):
                yield Fields(value, self._wrong, path, self.prompt)
            else:
                said = inner or f"{path} is not an object"
                self._wrong.add(InvalidField(said, field=path, got=shown(value)))


# ----------------------------------------------------------------------
# Fields that say nothing to this server, but are of a kind: who sends another is told, as by OpenAI's own
# ----------------------------------------------------------------------

_TEXTS: Final = ("user", "safety_identifier", "prompt_cache_key", "service_tier", "verbosity")
_OBJECTS: Final = ("metadata", "prediction")
_CUT: Final = "truncation"
_WHOLE: Final = "disabled"


def check_passed_over(fields: Fields) -> None:
    """Look at those of all bodies that make text."""
    for name in _TEXTS:
        fields.text(name)
    for name in _OBJECTS:
        fields.mapping(name)


def check_passed_over_of_responses(fields: Fields) -> None:
    """Look at those that Responses have beside them, of which some would change the answer."""
    fields.mapping("stream_options")
    fields.unsigned("max_tool_calls", least=1)
    for each in fields.items("include") or ():
        if not isinstance(each, str):
            fields.refuse("include", "include contains a non string element")
            break
    cut = fields.text(_CUT)
    if cut not in {None, _WHOLE, "auto"}:
        fields.refuse(_CUT, f"{_CUT} should be either 'auto' or '{_WHOLE}'", got=repr(cut[:40]) if cut else "''")
    if fields.unsigned("top_logprobs"):
        told = "top_logprobs above 0 is not supported: the library tells of the chosen token only; leave it out"
        fields.refuse("top_logprobs", told, code="unsupported_parameter")
