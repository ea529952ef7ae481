"""Validating reader of the fields of a JSON body, and the fields that text endpoints share; collects all errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import orjson

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import (
    IMAGE_MARK,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Image,
    Sampling,
    image_mark,
    prompt_too_long,
)
from ovmstrio.util.truncation import MAX_ITEMS, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ovmstrio.core.errors import ErrorList
    from ovmstrio.core.generation import GenerationLimits, Prompt, TokenIds

# ----------------------------------------------------------------------
# Reader
# ----------------------------------------------------------------------

_UNSIGNED: Final = range(2**32)  # OVMS's range of unsigned integers
_INT32: Final = range(-(2**31), 2**31)

_MAX_LEVELS: Final = 64  # Maximum nesting of values that are passed on unparsed

_MAX_OBJECT_SIZE: Final = 2**18
"""Maximum characters and members of an object that is passed on unparsed, such as a JSON schema."""

MAX_PROMPT_TOKENS: Final = 2**18
"""Maximum token ids of a body for a model without a limit."""

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
    """Counter of prompt characters and of list objects in a body; ``field`` is where most of the text is.

    Attributes:
        images: images of the prompt, whose marks are in the texts.
        takes_images: whether the model takes images.
    """

    __slots__ = ("_field", "_limits", "_most", "characters", "images", "objects", "takes_images")

    def __init__(self, limits: GenerationLimits | None = None, field: str = "") -> None:
        self._limits = limits
        self._field = field
        self._most = inf if limits is None else limits.max_characters
        self.characters = 0
        self.objects = 0
        self.images: list[Image] = []
        self.takes_images = limits is not None and limits.takes_images

    def add(self, characters: int) -> None:
        """Count characters; raise ``ContextExceeded`` immediately if the prompt cannot fit the context."""
        self.characters += characters
        if self.characters > self._most and self._limits is not None:
            raise prompt_too_long(self._limits, self._field, self.characters)


def check_length(text: str, limits: GenerationLimits, field: str, errors: ErrorList) -> None:
    """Record an error if a text cannot fit the model's context because of its length."""
    if len(text) > limits.max_characters:
        errors.add(prompt_too_long(limits, field, len(text)))


def are_token_ids(values: list[Any], limit: int) -> bool:
    """Return whether a list is not empty and has only token ids below ``limit``."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < limit


class Fields:
    """Reader of an object's fields.  Null counts as absent; invalid values are recorded in ``wrong`` and read as None.

    ``path`` is the path of the object in the body; ``prompt`` counts prompt characters and list objects.
    """

    __slots__ = ("_at", "_document", "_errors", "prompt")

    def __init__(
        self, document: Mapping[str, Any], errors: ErrorList, path: str = "", prompt: PromptSize | None = None
    ) -> None:
        self._document = document
        self._errors = errors
        self._at = path
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
        if value is not None and self.prompt.takes_images and IMAGE_MARK in value:
            self.refuse(name, f"{self.path(name)} has a mark of images, {IMAGE_MARK}")
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

    def unsigned(self, name: str, *, minimum: int = 0, message: str = "") -> int | None:
        """Return an unsigned integer of at least ``minimum``; ``message`` reports smaller values."""
        value: int | None = self._typed(name, int, f"{self.path(name)} is not an unsigned integer")
        if value is None:
            return None
        if value not in _UNSIGNED:
            above = f"{self.path(name)} value can't be greater than {_UNSIGNED[-1]}"
            self.refuse(name, above if value > 0 else f"{self.path(name)} is not an unsigned integer", got=shown(value))
            return None
        if value < minimum:
            self.refuse(name, message or f"{self.path(name)} value should be at least {minimum}", got=shown(value))
            return None
        return value

    def integer(self, name: str, message: str, allowed: range = _INT32) -> int | None:
        """Return an integer of a range."""
        value: int | None = self._typed(name, int, message)
        if value is not None and value not in allowed:
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

    def check_levels(self) -> None:
        """Record an error if this object, which is passed on unparsed, has too many levels."""
        if _is_too_deep(self._document):
            message = f"{self._at}: expected at most {_MAX_LEVELS} nested lists and objects"
            self._errors.add(InvalidField(message, field=self._at))

    def translated(self, document: Mapping[str, Any], prompt: PromptSize) -> Fields:
        """Return the reader of an object that has the meaning of this one in another API; its path is the same."""
        return Fields(document, self._errors, self._at, prompt)

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


def read_truncation(fields: Fields) -> dict[str, int]:
    """Return the option ``max_tokens`` of encoders for ``truncate_prompt_tokens``; -1 is what the model takes."""
    name = "truncate_prompt_tokens"
    given = fields.integer(name, f"{name} is neither -1 nor above 0", range(-1, 2**31))
    if given == 0:
        fields.refuse(name, f"{name} is neither -1 nor above 0", got="0")
    return {"max_tokens": given} if given else {}


_INCLUDED: Final = frozenset(
    {
        *("message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url"),
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
    }
)
"""Values of ``include``; except for the first they concern items that this server never returns."""
_TRUNCATION: Final = "truncation"
_DISABLED: Final = "disabled"


def check_ignored_responses_fields(fields: Fields) -> None:
    """Check the types of ignored fields of the Responses API, and refuse unsupported ones."""
    fields.mapping("stream_options")
    fields.unsigned("max_tool_calls", minimum=1)
    for each in fields.items("include") or ():
        if not isinstance(each, str):
            fields.refuse("include", "include contains a non string element")
            break
        if each not in _INCLUDED:
            fields.refuse("include", "include: unknown value", got=shown(each))
    cut = fields.text(_TRUNCATION)
    if cut not in {None, _DISABLED, "auto"}:
        fields.refuse(
            _TRUNCATION, f"{_TRUNCATION} should be either 'auto' or '{_DISABLED}'", got=repr(cut[:40]) if cut else "''"
        )


# ----------------------------------------------------------------------
# Fields of the text endpoints
# ----------------------------------------------------------------------

# Sampling

_MAX_STOPS: Final = 16
_MAX_STOP_CHARACTERS: Final = 1024  # Maximum length of a stop string, which is compared at every character
_MAX_SPECULATIVE_TOKENS: Final = 100
"""Maximum number of speculative tokens per step, which are computed even if rejected."""
_SEEDS: Final = range(-(2**63), 2**64)  # Integers of 64 bits, signed or not
_RANDOM_SEED: Final = -1
_AS_MANY_AS_FIT: Final = -1
_BEAM_SEARCH: Final = "use_beam_search"
_PROMPT_LIMIT: Final = "truncate_prompt_tokens"
_BAD_WORDS: Final = "bad_words"
_MAX_BAD_WORDS: Final = 256
_TRUNCATION_SIDES: Final = ("left", "right")
_MAX_PENALTY: Final = 1e6  # Limit of penalties without a specified range


def _read_sampling(fields: Fields, limits: GenerationLimits, *, max_tokens: int | None, is_stream: bool) -> Sampling:
    best_of = _read_best_of(fields, limits, is_stream=is_stream)
    temperature = fields.number("temperature", 0, 2, "temperature out of range(0.0, 2.0)")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=_read_min_tokens(fields, max_tokens),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, "frequency_penalty out of range(-2.0, 2.0)"),
        presence_penalty=fields.number("presence_penalty", -2, 2, "presence_penalty out of range(-2.0, 2.0)"),
        repetition_penalty=_read_positive(fields, "repetition_penalty", _MAX_PENALTY, "is not a valid number"),
        length_penalty=fields.number("length_penalty", -_MAX_PENALTY, _MAX_PENALTY),
        # The search with one beam takes the likeliest tokens.
        temperature=0.0 if fields.get(_BEAM_SEARCH) is True and best_of == 1 else temperature,
        top_p=_read_positive(fields, "top_p", 1, "should be above 0", "top_p out of range(0.0, 1.0)"),
        top_k=_read_top_k(fields),
        min_p=fields.number("min_p", 0, 1, "min_p out of range [0.0, 1.0)", excludes_high=True),
        seed=_read_seed(fields),
        ignore_eos=fields.flag("ignore_eos"),
        best_of=best_of,
        stop_token_ids=_read_stop_token_ids(fields, limits),
        num_assistant_tokens=_read_assistant_tokens(fields),
        assistant_confidence_threshold=_read_positive(fields, "assistant_confidence_threshold", 1, "should be above 0"),
        max_ngram_size=_read_speculative(fields, "max_ngram_size"),
    )


def read_max_tokens(fields: Fields, limits: GenerationLimits, *names: str, minimum: int = 1) -> int | None:
    """Return the maximum number of tokens, None for -1; of several field names the last present one counts."""
    found = None
    for name in names:
        if fields.get(name) == _AS_MANY_AS_FIT:
            found = None
            continue
        value = fields.unsigned(name, minimum=minimum, message=f"{name} value should be greater than 0")
        most = limits.max_tokens_limit
        if value is not None and most is not None and value > most:
            fields.refuse(name, f"{name} exceeds limit provided in graph config: {most}", got=str(value))
        found = found if value is None else value
    return found


def _read_n(fields: Fields, limits: GenerationLimits, best_of: int) -> int:
    n = fields.unsigned("n", minimum=1, message="n value should be greater than 0") or 1
    if n > limits.best_of_limit:
        fields.refuse("n", f"n exceeds limit provided in graph config: {limits.best_of_limit}", got=str(n))
    elif 1 < best_of < n:
        fields.refuse("n", "n value cannot be greater than best_of", got=f"{n} and {best_of}")
    return n


def read_stop(fields: Fields, name: str = "stop") -> tuple[str, ...]:
    """Return the stop strings."""
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, str | list):
        fields.refuse(name, f"{name} is not a string or array of strings")
        return ()
    texts = [value] if isinstance(value, str) else value
    if len(texts) > _MAX_STOPS:
        fields.refuse(name, f"{name} array must have no more than {_MAX_STOPS} strings", got=str(len(texts)))
        return ()
    if not all(isinstance(text, str) for text in texts):
        fields.refuse(name, f"{name} array contains non string element")
        return ()
    if any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        longest = max(map(len, texts))
        fields.refuse(name, f"{name}: expected at most {_MAX_STOP_CHARACTERS} characters each", got=str(longest))
        return ()
    if not all(texts):
        fields.refuse(name, f"{name} array contains an empty string")
        return ()
    return tuple(dict.fromkeys(texts))


def _read_min_tokens(fields: Fields, max_tokens: int | None) -> int | None:
    least = fields.unsigned("min_tokens")
    if least is not None and max_tokens is not None and least > max_tokens:
        fields.refuse("min_tokens", "min_tokens is greater than max_tokens", got=f"{least} and {max_tokens}")
    return least


def _read_positive(fields: Fields, name: str, high: float, message: str, range_message: str = "") -> float | None:
    value = fields.number(name, 0, high, range_message)
    if value == 0:
        fields.refuse(name, f"{name} {message}", got="0")
        return None
    return value


def _read_top_k(fields: Fields) -> int | None:
    top_k = fields.integer("top_k", "top_k is not an integer")
    if top_k is not None and top_k < 1 and top_k != -1:
        fields.refuse("top_k", "top_k must be -1 (all tokens) or a positive integer", got=str(top_k))
        return None
    return top_k


def _read_seed(fields: Fields) -> int | None:
    """Return the seed; None, which selects a random one, for -1."""
    seed = fields.integer("seed", f"seed out of range [{_SEEDS[0]}, {_SEEDS[-1]}]", _SEEDS)
    return None if seed == _RANDOM_SEED else seed


def _read_best_of(fields: Fields, limits: GenerationLimits, *, is_stream: bool) -> int:
    name = "best_of"
    best_of = fields.unsigned(name, minimum=1, message="best_of value should be greater than 0") or 1
    n = fields.get("n")
    if fields.flag(_BEAM_SEARCH) and best_of == 1 and type(n) is int and 1 < n <= limits.best_of_limit:
        name, best_of = _BEAM_SEARCH, n
    if best_of > limits.best_of_limit:
        message = f"best_of exceeds limit provided in graph config: {limits.best_of_limit}"
        fields.refuse(name, message, got=str(best_of))
    elif best_of > 1 and is_stream:
        fields.refuse(name, f"{name} cannot be used in streaming mode")
    return best_of


def _read_assistant_tokens(fields: Fields) -> int | None:
    number = _read_speculative(fields, "num_assistant_tokens")
    if number is not None and fields.get("assistant_confidence_threshold") is not None:
        message = (
            "num_assistant_tokens and assistant_confidence_threshold are mutually exclusive and cannot both be set"
        )
        fields.refuse("num_assistant_tokens", message)
    return number


def _read_speculative(fields: Fields, name: str) -> int | None:
    number = fields.unsigned(name, minimum=1)
    if number is not None and number > _MAX_SPECULATIVE_TOKENS:
        fields.refuse(name, f"{name} value can't be greater than {_MAX_SPECULATIVE_TOKENS}", got=str(number))
        return None
    return number


def _read_stop_token_ids(fields: Fields, limits: GenerationLimits) -> TokenIds:
    ids = fields.items("stop_token_ids")
    if not ids:
        return ()
    most = limits.vocabulary_size or 2**31
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < most for each in ids):
        fields.refuse("stop_token_ids", f"stop_token_ids: expected token ids from 0 to {most - 1}")
        return ()
    return tuple(ids)


def _read_prompt_limit(fields: Fields) -> int | None:
    """Return the tokens to which a prompt is truncated, -1 for as many as fit, None for no truncation."""
    if fields.get(_PROMPT_LIMIT) == _AS_MANY_AS_FIT:
        return _AS_MANY_AS_FIT
    return fields.unsigned(_PROMPT_LIMIT, minimum=1, message=f"{_PROMPT_LIMIT} should be -1 or at least 1")


def _read_bad_words(fields: Fields) -> tuple[str, ...]:
    words = fields.items(_BAD_WORDS) or []
    if len(words) > _MAX_BAD_WORDS:
        fields.refuse(_BAD_WORDS, f"{_BAD_WORDS}: expected at most {_MAX_BAD_WORDS}", got=str(len(words)))
    elif not all(isinstance(word, str) and 0 < len(word) <= MAX_NAME_CHARACTERS for word in words):
        fields.refuse(_BAD_WORDS, f"{_BAD_WORDS}: expected texts of 1 to {MAX_NAME_CHARACTERS} characters")
    else:
        return tuple(dict.fromkeys(words))
    return ()


# Response format

_TEXT_GRAMMARS: Final[Mapping[str, tuple[GrammarKind, tuple[str, ...]]]] = {
    "regex": (GrammarKind.REGEX, ("regex", "pattern")),
    "grammar": (GrammarKind.EBNF, ("grammar",)),
}
"""Text grammars, with the field names that clients use."""
_FORMAT_FIELDS: Final = frozenset(
    {
        *("type", "name", "description", "strict", "schema", "json_schema", "regex", "pattern", "grammar"),
        *("format", "structures", "triggers"),
    }
)
_KINDS: Final = ("text", "json_object", "json_schema", "regex", "grammar", "structural_tag")


def read_response_format(fields: Fields, name: str = "response_format") -> Grammar | None:
    """Return the output grammar, or None; the Responses API has the schema next to the type."""
    grammar = _read_format(fields, name)
    return None if grammar is None else replace(grammar, field=fields.path(name))


def _read_format(fields: Fields, name: str) -> Grammar | None:
    form = fields.within(name)
    if form is None:
        return None
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        at = form.path("type")
        missing = f"{at} is missing" if kind is None else f"{at} is none of {', '.join(_KINDS)}"
        form.refuse("type", missing, got="" if kind is None else shown(kind))
        return None
    _refuse_unknown(form, _FORMAT_FIELDS)
    if kind == "text":
        return None
    # llama.cpp's form of a schema has the type json_object.
    if kind == "json_schema" or (kind == "json_object" and form.get("schema") is not None):
        return _read_schema(form)
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT, "")
    if kind == "structural_tag":
        return _structural_tag(fields.mapping(name))
    return _read_text_grammar(form, kind)


def _refuse_unknown(fields: Fields, known: frozenset[str]) -> None:
    for name in sorted(fields.names() - known):
        if fields.get(name) is not None:
            path = fields.path(name[:_SHOWN_CHARACTERS])
            fields.refuse(name, f"Unknown parameter: {path!r}; remove it", code="unknown_parameter")


def _read_schema(form: Fields) -> Grammar | None:
    holder = form if form.get("schema") is not None else form.within("json_schema")
    if holder is None:
        if form.get("json_schema") is None:
            form.refuse("json_schema", f"{form.path('json_schema')} is missing")
        return None
    _refuse_unknown(holder, _FORMAT_FIELDS)
    schema = holder.mapping("schema")
    if schema is None:
        if holder.get("schema") is None:
            holder.refuse("schema", f"{holder.path('schema')} is missing")
        return None
    return Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(schema).decode(), is_strict=bool(holder.flag("strict")))


def _structural_tag(tag: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar of a structural tag; its earlier form has a list of structures, each with a schema."""
    if tag is None:
        return None
    structures = tag.get("structures")
    if "format" not in tag and isinstance(structures, list) and all(isinstance(each, dict) for each in structures):
        tags = [
            {
                "type": "tag",
                "begin": each.get("begin"),
                "content": {"type": "json_schema", "json_schema": each.get("schema")},
                "end": each.get("end"),
            }
            for each in structures
        ]
        form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        tag = {"type": "structural_tag", "format": form}
    return Grammar(GrammarKind.STRUCTURAL_TAG, orjson.dumps(tag).decode())


def _read_text_grammar(form: Fields, kind: str) -> Grammar | None:
    grammar_kind, names = _TEXT_GRAMMARS[kind]
    for name in names:
        text = form.text(name)
        if text:
            return Grammar(grammar_kind, text)
        if form.get(name) is not None:
            return None
    form.refuse(names[0], f"{form.path(names[0])} is missing")
    return None


# Names that vLLM has for response formats

_GUIDED: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Earlier fields of vLLM, with the members of ``structured_outputs`` that replaced them."""
_CONSTRAINTS: Final = (*_GUIDED.values(), "json_object")
_IN_EFFECT: Final = ("disable_any_whitespace", "disable_additional_properties")
"""Options of ``structured_outputs`` that describe what the server does anyway."""


def read_grammar(fields: Fields, other: Grammar | None = None) -> Grammar | None:
    """Return the output grammar of ``response_format`` or one of vLLM's names for it; at most one may be present.

    ``other`` is a grammar of another field.
    """
    found = [grammar for grammar in (other, read_response_format(fields)) if grammar is not None]
    options = fields.within("structured_outputs")
    if options is not None:
        for name in sorted(options.names() - {*_CONSTRAINTS, *_IN_EFFECT}):
            if options.get(name) is not None:
                options.refuse(name, f"{options.path(name)} is not supported", code="unsupported_parameter")
        for name in _IN_EFFECT:
            options.flag(name)
        found += [grammar for name in _CONSTRAINTS if (grammar := _read_constraint(options, name, name)) is not None]
    found += [
        grammar for name, kind in _GUIDED.items() if (grammar := _read_constraint(fields, name, kind)) is not None
    ]
    if len(found) > 1:
        fields.refuse(found[1].field.partition(".")[0], f"{found[1].field} cannot be combined with {found[0].field}")
    return found[0] if found else None


def _read_constraint(fields: Fields, name: str, kind: str) -> Grammar | None:
    grammar = None
    match kind, fields.get(name):
        case _, None:
            return None
        case "json", str(text):
            grammar = Grammar(GrammarKind.JSON_SCHEMA, text, is_strict=True)
        case "json", dict():
            schema = fields.mapping(name)
            text = orjson.dumps(schema).decode()
            grammar = None if schema is None else Grammar(GrammarKind.JSON_SCHEMA, text, is_strict=True)
        case "json_object", _:
            grammar = Grammar(GrammarKind.JSON_OBJECT, "") if fields.flag(name) else None
        case "choice", _:
            grammar = _read_choices(fields, name)
        case "structural_tag", str(text):
            grammar = _read_tag_text(fields, name, text)
        case "structural_tag", dict():
            grammar = _structural_tag(fields.mapping(name))
        case (("regex" | "grammar"), str(text)) if text:
            grammar = Grammar(GrammarKind(kind), text)
        case _:
            expected = "is not a JSON schema" if kind == "json" else "is not a string, or is empty"
            fields.refuse(name, f"{fields.path(name)} {expected}", got=shown(fields.get(name)))
    return None if grammar is None else replace(grammar, field=fields.path(name))


def _read_choices(fields: Fields, name: str) -> Grammar | None:
    """Return the grammar of a list of texts, one of which is the answer."""
    choices = fields.items(name)
    if choices is None:
        return None
    if not choices or not all(isinstance(each, str) and each for each in choices):
        fields.refuse(name, f"{fields.path(name)}: expected a list of texts that are not empty")
        return None
    texts = (orjson.dumps(each).decode() for each in dict.fromkeys(choices))
    return Grammar(GrammarKind.EBNF, f"root ::= {' | '.join(texts)}\n")


def _read_tag_text(fields: Fields, name: str, text: str) -> Grammar | None:
    try:
        tag = orjson.loads(text) if len(text) <= _MAX_OBJECT_SIZE else None
    except orjson.JSONDecodeError:
        tag = None
    if not isinstance(tag, dict):
        fields.refuse(name, f"{fields.path(name)} is not a structural tag in JSON")
        return None
    return _structural_tag(tag)


# Tools

_TOOL_CHOICES: Final = frozenset({"none", "auto", "required"})
_FUNCTION: Final = "function"
_ALLOWED: Final = "allowed_tools"
_NAMED_TOOLS: Final = (_FUNCTION, "custom")
_UNNAMED_TOOLS: Final = ("local_shell", "shell", "apply_patch")
"""Types of the Responses API's tools without names of their own: the type is the name."""


class Tools(NamedTuple):
    """Tools and tool choice, as in ``Conversation``."""

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "auto"
    name: str = ""
    parameters_fields: tuple[str, ...] = ()


NO_TOOLS: Final = Tools()

_ReadTool: TypeAlias = "Callable[[Fields], Sequence[Mapping[str, Any]]]"
"""Reads the functions of one tool."""


def read_tools(
    fields: Fields, read: _ReadTool = lambda tool: (read_function_tool(tool),), more: Tools = NO_TOOLS
) -> Tools:
    """Return the tools, followed by ``more``; none if the choice forbids calls."""
    choice, name, allowed = _read_choice(fields, read)
    listed = read_tool_list(fields, read)
    tools, places = listed.tools + more.tools, listed.parameters_fields + more.parameters_fields
    if allowed is not None:
        for unknown in sorted(allowed - {tool[_FUNCTION]["name"] for tool in tools}):
            problem = "tool_choice allows a function that is not among the tools"
            fields.refuse("tool_choice", problem, got=shown(unknown))
        kept = [(tool, place) for tool, place in zip(tools, places, strict=True) if tool[_FUNCTION]["name"] in allowed]
        tools, places = tuple(tool for tool, _ in kept), tuple(place for _, place in kept)
    if choice == "none":
        return Tools(choice=choice)
    if not tools and choice in {"required", _FUNCTION}:
        fields.refuse("tool_choice", "tool_choice is only allowed when tools are specified")
    elif name and name not in {tool[_FUNCTION]["name"] for tool in tools}:
        fields.refuse("tool_choice", "tool_choice.function.name is not among the tools", got=shown(name))
    return Tools(tools, choice, name, places)


def read_tool_list(fields: Fields, read: _ReadTool) -> Tools:
    """Return the functions of the field ``tools``, and the fields of their parameters."""
    tools: tuple[Mapping[str, Any], ...] = ()
    places: tuple[str, ...] = ()
    for tool in fields.objects("tools", "Tools are not an array", "Tool is not a JSON object"):
        functions = tuple(read(tool))
        tools += functions
        place = tool.path("function.parameters" if tool.get(_FUNCTION) is not None else "parameters")
        places += (place,) * len(functions)
    return Tools(tools, parameters_fields=places)


def _read_choice(fields: Fields, read: _ReadTool) -> tuple[str, str, set[str] | None]:
    """Return the choice, the named function, and the allowed functions (None for all)."""
    value = fields.word("tool_choice")
    if value is None:
        return "auto", "", None
    if isinstance(value, str):
        if value in _TOOL_CHOICES:
            return value, "", None
        fields.refuse("tool_choice", "tool_choice should be either 'none' or 'auto' or 'required'", got=shown(value))
        return "auto", "", None
    chosen = fields.within("tool_choice", "tool_choice is not a valid JSON object or string")
    if chosen is None:
        return "auto", "", None
    if chosen.word("type") == _ALLOWED:
        return _read_allowed(chosen, read)
    return *_read_named(chosen), None


def _read_allowed(chosen: Fields, read: _ReadTool) -> tuple[str, str, set[str]]:
    holder = chosen if chosen.get(_ALLOWED) is None else chosen.within(_ALLOWED)
    if holder is None:
        return "auto", "", set()
    mode = holder.word("mode")
    if mode not in ("auto", "required"):
        holder.refuse("mode", f"{holder.path('mode')} should be either 'auto' or 'required'", got=shown(mode))
        return "auto", "", set()
    return mode, "", {tool[_FUNCTION]["name"] for given in holder.objects("tools") for tool in read(given)}


def _read_named(chosen: Fields) -> tuple[str, str]:
    kind = chosen.word("type")
    if kind in _UNNAMED_TOOLS:
        return _FUNCTION, str(kind)
    # The Responses API has the name directly, chat nests the name in an object.
    is_flat = chosen.get(_FUNCTION) is None and kind in _NAMED_TOOLS
    named = chosen if is_flat else chosen.within(_FUNCTION, "tool_choice.function is not a valid JSON object")
    if named is None:
        if chosen.get(_FUNCTION) is None:
            chosen.refuse(_FUNCTION, "tool_choice.function is not a valid JSON object")
        return "auto", ""
    name = named.word("name")
    if not isinstance(name, str) or not name:
        named.refuse("name", f"{named.path('name')} is not a valid string", got=shown(name))
        return "auto", ""
    return _FUNCTION, name


def read_function_tool(fields: Fields) -> Mapping[str, Any]:
    """Return a tool, in chat's nested or the Responses API's flat form."""
    kind = fields.name_text("type")
    if kind not in {None, _FUNCTION}:
        fields.refuse("type", "Only function tools are supported", got=shown(kind), code="unsupported_parameter")
        return {"type": _FUNCTION, _FUNCTION: {"name": ""}}
    is_flat = fields.get(_FUNCTION) is None and fields.get("name") is not None
    function = fields if is_flat else fields.within(_FUNCTION)
    if function is None:
        if fields.get(_FUNCTION) is None:
            fields.refuse(_FUNCTION, f"{fields.path(_FUNCTION)} is missing")
        return {"type": _FUNCTION, _FUNCTION: {"name": ""}}
    return {"type": _FUNCTION, _FUNCTION: _read_function(function)}


def _read_function(fields: Fields) -> Mapping[str, Any]:
    name = fields.name_text("name")
    if not fields.get("name"):
        fields.refuse("name", f"{fields.path('name')} is missing")
    fields.prompt.add(len(name or ""))
    function: dict[str, Any] = {"name": name or ""}
    description = fields.prompt_text("description")
    if description is not None:
        function["description"] = description
    # Chat templates access the parameters unconditionally.
    function["parameters"] = fields.mapping("parameters", is_prompt=True) or {"type": "object", "properties": {}}
    strict = fields.flag("strict")
    if strict is not None:
        function["strict"] = strict
    return function


# Messages

_TEXT_PARTS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Text fields of content parts, by part type."""
_IMAGE_PARTS: Final = frozenset({"image_url", "input_image"})
_OTHER_PARTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("video_url", "video", "input_video"), "video"),
    **dict.fromkeys(("input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("file", "input_file"), "files"),
}
"""Parts that no model takes, by their type."""
_DETAILS: Final = ("auto", "low", "high", "original")
_PASSED_FIELDS: Final = ("name", "tool_call_id")
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
_REFUSED_IN_MESSAGES: Final[Mapping[str, str]] = {
    "function_call": "use tool_calls",
    "audio": "messages have text and images",
    **dict.fromkeys(("prefix", "partial"), "use continue_final_message"),
}
"""Fields of messages that would change the prompt, with a hint."""
_ROLE_ALIASES: Final[Mapping[str, str]] = {"developer": "system"}
"""Roles that chat templates do not know, with replacements."""


def read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a chat, in the form that chat templates expect."""
    if fields.get("messages") is None:
        fields.refuse("messages", "Messages missing in request", code="missing_required_parameter")
        return ()
    if fields.get("messages") == []:
        fields.refuse("messages", "Messages array cannot be empty")
    objects = fields.objects("messages", "Messages are not an array", "Message is not a JSON object")
    return tuple(read_chat_message(each) for each in objects)


def read_role(fields: Fields) -> str:
    """Return the role, in the names that chat templates know."""
    role = fields.word("role")
    if role is None or role == "":
        fields.refuse("role", "Every message must have 'role' field")
        return ""
    if not isinstance(role, str) or len(role) > MAX_NAME_CHARACTERS:
        fields.refuse("role", "Invalid message structure", got=shown(role))
        return ""
    return _ROLE_ALIASES.get(role, role)


def read_chat_message(fields: Fields) -> dict[str, Any]:
    """Return a message of a chat, in the form that chat templates expect."""
    message: dict[str, Any] = {"role": read_role(fields), "content": content_text(fields, "content")}
    for name in _PASSED_FIELDS:
        text = fields.prompt_text(name, "Invalid message structure")
        if text is not None:
            message[name] = text
    # Chat templates use the one name or the other, so both have the text; a message may have both with equal texts.
    if any(fields.get(name) is not None for name in _REASONING_FIELDS):
        texts = [fields.text(name, "Invalid message structure") for name in _REASONING_FIELDS]
        message |= dict.fromkeys(_REASONING_FIELDS, next((text for text in texts if text), ""))
        fields.prompt.add(len(message["reasoning"]))
    for name, reason in _REFUSED_IN_MESSAGES.items():
        if fields.get(name):
            text = f"{fields.path(name)} is not supported: {reason}"
            fields.refuse(name, text, code="unsupported_parameter")
    calls = [_read_tool_call(call) for call in fields.objects("tool_calls", "", "Each tool_call must be an object")]
    if calls:
        message["tool_calls"] = calls
    return message


def _read_tool_call(fields: Fields) -> dict[str, Any]:
    function = fields.within("function", "Each tool_call must have a 'function' object")
    if function is None:
        if fields.get("function") is None:
            fields.refuse("function", "Each tool_call must have a 'function' object")
        return {}
    name = function.prompt_text("name")
    if not name:
        function.refuse("name", f"{function.path('name')} is missing")
    return {
        "id": fields.prompt_text("id") or "",
        "type": "function",
        "function": {"name": name or "", "arguments": _read_arguments(function)},
    }


def _read_arguments(function: Fields) -> str:
    """Return tool call arguments as JSON text; some clients send an object."""
    value = function.get("arguments")
    if not isinstance(value, dict):
        return function.prompt_text("arguments") or "{}"
    arguments = function.mapping("arguments", is_prompt=True)
    return "{}" if arguments is None else orjson.dumps(arguments).decode()


def content_text(fields: Fields, name: str) -> str:
    """Return the content, a string or a list of parts, as a string."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return fields.prompt_text(name) or ""
    if not isinstance(value, list):
        fields.refuse(name, "Invalid message structure", got=shown(value))
        return ""
    texts = []
    for part in fields.objects(name, "", "Invalid message structure - content array should contain objects"):
        kind = part.word("type")
        if not isinstance(kind, str):
            part.refuse("type", "Invalid message structure - content object type missing")
        elif kind in _TEXT_PARTS:
            text = part.prompt_text(_TEXT_PARTS[kind], "Invalid message structure - content text missing")
            if part.get(_TEXT_PARTS[kind]) is None:
                part.refuse(_TEXT_PARTS[kind], "Invalid message structure - content text missing")
            texts.append(text or "")
        elif kind in _IMAGE_PARTS and fields.prompt.takes_images:
            texts.append(_read_image(part))
        else:
            known = "text and images" if fields.prompt.takes_images else "text only"
            nouns = "images" if kind in _IMAGE_PARTS else _OTHER_PARTS.get(kind)
            known = f"this model accepts {known}" if nouns else "expected text"
            part.refuse("type", "Unsupported content type", got=f"{shown(kind)}, and {known}")
    return "\n".join(texts)


def _read_image(part: Fields) -> str:
    """Record an image and return its mark; chat has the URL in an object, the Responses API as a string."""
    if part.get("file_id") is not None:
        part.refuse("file_id", "files are not supported: send the image as image_url", code="unsupported_parameter")
        return ""
    holder: Fields | None = part
    if isinstance(part.get(_IMAGE_URL), dict):
        holder = part.within(_IMAGE_URL)
    if holder is None:
        return ""
    name = _IMAGE_URL if holder is part else "url"
    url = holder.text(name)
    if not url:
        if holder.get(name) is None or url == "":
            holder.refuse(name, f"{holder.path(name)} is missing")
        return ""
    for each in dict.fromkeys((part, holder)):
        each.choice("detail", _DETAILS)
    images = part.prompt.images
    images.append(Image(url, holder.path(name)))
    return image_mark(len(images) - 1)


_IMAGE_URL: Final = "image_url"


# Common request


@dataclass(frozen=True, slots=True)
class _StreamOptions:
    """Usage reporting of a stream: at the end (``includes_usage``) or in every chunk (``has_continuous_usage``)."""

    includes_usage: bool = False
    has_continuous_usage: bool = False


def read_stream_options(fields: Fields, *, is_stream: bool) -> _StreamOptions:
    """Return the stream options, including vLLM's ``continuous_usage_stats``."""
    if fields.get("stream_options") is None:
        return _StreamOptions()
    if not is_stream:
        fields.refuse("stream_options", "stream_options provided, but stream not set to true")
        return _StreamOptions()
    options = fields.within("stream_options")
    if options is None:
        return _StreamOptions()
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    unknown = sorted(options.names() - known)
    if unknown:
        message = "Found unexpected stream options. Properties accepted in stream_options: include_usage"
        fields.refuse("stream_options", message, got=", ".join(name[:40] for name in unknown[:4]))
    includes_usage = options.flag("include_usage", "stream_options.include_usage is not a boolean")
    return _StreamOptions(bool(includes_usage), bool(includes_usage and options.flag("continuous_usage_stats")))


MAX_TOP_LOGPROBS: Final = 20
_COUNTS: Final = range(MAX_TOP_LOGPROBS + 1)


def read_top_logprobs(fields: Fields, *, is_stream: bool, logprobs: bool, requirement: str = "logprobs") -> int:
    """Return the number of most likely tokens to return at each place, with the log-probabilities of a text."""
    name = "top_logprobs"
    count = fields.integer(name, f"{name} is not an integer from 0 to {MAX_TOP_LOGPROBS}", _COUNTS)
    if count and not logprobs:
        fields.refuse(name, f"{name} requires {requirement}")
    elif count:
        refuse_in_stream(fields, name, is_stream=is_stream)
    return count or 0


def read_prompt_logprobs(fields: Fields, *, is_stream: bool) -> int | None:
    """Return the number of most likely tokens to return at each place of the prompt."""
    name = "prompt_logprobs"
    count = fields.integer(name, f"{name} is not an integer from 0 to {MAX_TOP_LOGPROBS}", _COUNTS)
    if count is not None:
        refuse_in_stream(fields, name, is_stream=is_stream)
    return count


def refuse_in_stream(fields: Fields, name: str, values: str = "", *, is_stream: bool) -> None:
    """Refuse a field, or some of its values, in a stream, because of the most likely tokens."""
    if is_stream:
        reason = "the most likely tokens are found after the end of the text"
        message = f"{name}{values} is not supported with stream: {reason}"
        fields.refuse(name, message, code="unsupported_parameter")


def make_request(
    fields: Fields,
    limits: GenerationLimits,
    prompt: Prompt,
    *,
    max_tokens: int | None,
    is_stream: bool,
    logprobs: bool,
    top_logprobs: int = 0,
    prompt_logprobs: int | None = None,
    echo: bool = False,
    grammar: Grammar | None = None,
    prompt_field: str = "prompt",
    deadline: float,
) -> GenerationRequest:
    """Return the request for one prompt, from the fields common to all endpoints; see :func:`read_grammar`."""
    sampling = _read_sampling(fields, limits, max_tokens=max_tokens, is_stream=is_stream)
    keeps_special = fields.flag("skip_special_tokens") is False
    return GenerationRequest(
        prompt,
        sampling,
        stop=read_stop(fields),
        includes_stop=bool(fields.flag("include_stop_str_in_output")),
        n=_read_n(fields, limits, sampling.best_of),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        grammar=read_grammar(fields, grammar),
        skips_special_tokens=not keeps_special,
        # Text with special tokens is returned raw, without parsing tool calls and reasoning.
        parses_output=not keeps_special,
        deadline=deadline,
        prompt_field=prompt_field,
        adds_special_tokens=fields.flag("add_special_tokens"),
        prompt_limit=_read_prompt_limit(fields),
        truncates_end=fields.choice("truncation_side", _TRUNCATION_SIDES) == _TRUNCATION_SIDES[1],
        bad_words=_read_bad_words(fields),
        cache_salt=_read_cache_salt(fields),
    )


def _read_cache_salt(fields: Fields) -> str:
    salt = fields.name_text("cache_salt")
    if salt == "":
        fields.refuse("cache_salt", "cache_salt: expected a string that is not empty")
    return salt or ""
