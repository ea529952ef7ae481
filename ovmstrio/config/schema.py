"""Validation of located documents against schemas: classes whose annotated fields are the keys of a mapping.

A schema is a pydantic model or a dataclass. Fields that are schemas, or lists or mappings of schemas, are validated key
by key; pydantic validates all other values strictly. Every problem gets the position of its key or value.

::

    Located ── Reader.read ──> instance of the schema, or None
                   └─────────> Findings: unknown, missing and invalid keys, with "did you mean"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ovmstrio.config.documents import (
    UNUSABLE,
    Findings,
    InvalidValue,
    Located,
    did_you_mean,
    suggest_key,
    to_short_json,
    with_paths,
)
from ovmstrio.core.errors import ConfigError

T = TypeVar("T")

OPTIONAL: Final[Any] = None
"""Default of optional keys in schemas that only validate."""


class Schema(BaseModel):
    """Schema of the keys of a mapping, which is only validated: no type conversion."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    hints: ClassVar[Mapping[str, str]] = {}
    """Suggestions for unknown keys."""


@dataclass(frozen=True)
class Key:
    """Metadata of a field: its names in files, if they differ from the field's; none if the field is not a key."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@dataclass(frozen=True)
class NoEffect:
    """Metadata of a field: the reason why its key is accepted without effect."""

    reason: str


@dataclass(frozen=True)
class ReadBy:
    """Metadata of a field: a function that converts its value, or raises :class:`InvalidValue`."""

    convert: Callable[[Located], Any]


class SchemaField(NamedTuple):
    """A key of a schema."""

    name: str
    type: Any
    is_required: bool
    no_effect: str


@cache
def keys_of(schema: Any) -> Mapping[str, SchemaField]:
    """Return the fields of a schema by key; its own keys before inherited ones."""
    hints: dict[str, Any]
    if issubclass(schema, BaseModel):
        fields = {each.alias or name: each for name, each in schema.model_fields.items()}
        hints = {
            key: Annotated[each.annotation, *each.metadata] if each.metadata else each.annotation
            for key, each in fields.items()
        }
        required = {name: each.is_required() for name, each in fields.items()}
    else:
        hints = get_type_hints(schema, include_extras=True)
        required = {
            each.name: each.default is each.default_factory is dataclasses.MISSING
            for each in dataclasses.fields(schema)
        }
    keys: dict[str, SchemaField] = {}
    for name in sorted(required, key=lambda name: name not in schema.__annotations__):
        metadata = _metadata(hints[name])
        names = next((each.names for each in metadata if isinstance(each, Key)), (name,))
        no_effect = next((each.reason for each in metadata if isinstance(each, NoEffect)), "")
        keys |= dict.fromkeys(names, SchemaField(name, hints[name], required[name], no_effect))
    return keys


# Reader


@dataclass(slots=True)
class Reader:
    """Validator of the mappings of one file.

    Attributes:
        findings: receives the problems.
        is_yaml: YAML conventions: a key without value is missing, an unknown key is a warning, and an invalid optional
            key has its default.
        without_effect: reasons by path of the keys without effect that were found.
    """

    findings: Findings
    is_yaml: bool = False
    without_effect: dict[str, str] = field(default_factory=dict)

    def read(self, node: Located, schema: type[T]) -> T | None:
        """Return an instance of a schema; None if it cannot be built."""
        count = len(self.findings.fatal)
        values = self.values(node, schema)
        missing = {each.name for each in keys_of(cast("type", schema)).values() if each.is_required} - values.keys()
        if missing or self._is_invalid(count):
            return None
        try:
            return schema(**values)
        except ValidationError as error:  # a check of the schema itself
            self.report(node, schema, error.errors(include_url=False))
            return None

    def values(self, node: Located, schema: type) -> dict[str, Any]:
        """Return the valid values of a mapping by field name."""
        if not self.is_mapping(node):
            return {}
        keys = keys_of(schema)
        members = {key: member for key, member in node.members.items() if member.value is not None or not self.is_yaml}
        self._check_keys(node, members, schema)
        values = {}
        for key, member in members.items():
            if key in keys:
                if keys[key].no_effect:
                    self.without_effect[member.path] = keys[key].no_effect
                value = self.value(member, keys[key].type)
                if value is not _INVALID:
                    values[keys[key].name] = value
        return values

    def value(self, node: Located, kind: Any) -> Any:
        """Return a valid value, or report it and return a marker."""
        kind, is_optional = _without_none(kind)
        if node.value is None and is_optional:
            return None
        if not _holds_schema(kind):
            return self._scalar(node, kind)
        count = len(self.findings.fatal)
        origin, inner = get_origin(kind), get_args(kind)
        found: Any
        if origin is Annotated:
            return self.value(node, inner[0])
        if origin in {dict, Mapping}:
            members = node.members if self.is_mapping(node) else {}
            if self.is_yaml and _is_schema(inner[1]):  # a key without value has the defaults of its schema
                members = {
                    key: replace(each, value={}) if each.value is None else each for key, each in members.items()
                }
            read = {str(key): self.value(each, inner[1]) for key, each in members.items()}
            found = {key: each for key, each in read.items() if each is not _INVALID}
        elif origin in {list, tuple}:
            items = [self.value(item, inner[0]) for item in self.items(node)]
            found = origin(each for each in items if each is not _INVALID)
        else:
            found = self.read(node, kind)
        return _INVALID if found is None or self._is_invalid(count) else found

    def _is_invalid(self, count: int) -> bool:
        """Return whether problems since ``count`` make a value invalid; in YAML they are left out."""
        return not self.is_yaml and len(self.findings.fatal) > count

    def is_mapping(self, node: Located) -> bool:
        """Return whether a value is a mapping; report other values."""
        if not isinstance(node.value, dict):
            self.refuse(node, UNUSABLE, "a mapping of keys to values" if self.is_yaml else "an object")
        return isinstance(node.value, dict)

    def items(self, node: Located) -> list[Located]:
        """Return the items of a list; report other values."""
        if not isinstance(node.value, list):
            self.refuse(node, UNUSABLE, "a list")
            return []
        return node.value

    def refuse(self, node: Located, message: str, expected: str = "", suggestion: str = "") -> None:
        """Report a problem of a value, with the value if another one was expected."""
        found = to_short_json(node.plain()) if expected else ""
        self.findings.refuse(node, message, expected=expected, found=found, suggestion=suggestion)

    def _check_keys(self, node: Located, members: Mapping[Any, Located], schema: type) -> None:
        keys = keys_of(schema)
        forbids = not issubclass(schema, BaseModel) or schema.model_config.get("extra") == "forbid"
        unknown = [str(key) for key in node.members if key not in keys] if forbids else []
        given = {keys[key].name for key in members if key in keys}
        missing: dict[str, str] = {}
        for key, each in keys.items():
            if each.is_required and each.name not in given:
                missing.setdefault(each.name, key)
        for key in missing.values():
            # A misspelt key is reported once.
            misspelt = get_close_matches(key, unknown, 1)
            if misspelt and not self.is_yaml:
                continue
            unknown = [each for each in unknown if each not in misspelt]
            hint = f"rename {misspelt[0]!r} to {key!r}" if misspelt else "add it"
            self.refuse(node.find(*misspelt), f"the key {key!r} is missing", suggestion=hint)
        for key in [key for key in node.members if str(key) in unknown]:
            hint = getattr(schema, "hints", {}).get(key) or suggest_key(key, keys)
            if self.is_yaml:
                self.findings.warn(node.find(key), f"unknown key {key!r}, ignored", hint)
            else:
                self.refuse(node.find(key), f"unknown key {key!r}", suggestion=hint)

    def _scalar(self, node: Located, kind: Any) -> Any:
        custom = next((each for each in _metadata(kind) if isinstance(each, ReadBy)), None)
        try:
            if custom is not None:
                return custom.convert(node)
            # Strict validation accepts no list for a tuple.
            value = node.plain(tuple if "tuple" in str(kind) else list)
            return _adapter(kind).validate_python(value, strict=kind is not Path)
        except ValidationError as error:
            self.report(node, kind, error.errors(include_url=False))
        except InvalidValue as error:
            self.findings.refuse_value(node, error)
        return _INVALID

    def report(self, node: Located, kind: Any, faults: list[ErrorDetails]) -> None:
        """Report errors of pydantic."""
        wrong: dict[str, tuple[Located, Any, list[ErrorDetails]]] = {}
        for fault in faults:
            place, inner = _locate(node, kind, fault["loc"])
            wrong.setdefault(place.path, (place, inner, []))[2].append(fault)
        for path, (place, inner, each) in wrong.items():
            # Every alternative of a union reports errors; the deepest ones are those of the intended alternative.
            if any(other != path and other.startswith((f"{path}.", f"{path}[")) for other in wrong):
                continue
            reason = each[0].get("ctx", {}).get("error")
            if isinstance(reason, InvalidValue):
                self.findings.refuse_value(place, reason)
            else:
                expected = " or ".join(dict.fromkeys(_expected(fault, inner) for fault in each))
                self.refuse(place, UNUSABLE, expected, _hint(place, inner, each))


def check_members(node: Located, schema: type[Schema], findings: Findings) -> dict[str, Located]:
    """Validate an object against a schema and return its valid members.

    All violations are fatal.
    """
    count, reader = len(findings.fatal), Reader(findings)
    keys, valid = keys_of(schema), reader.values(node, schema)
    if schema.__pydantic_decorators__.field_validators and len(findings.fatal) == count:
        try:
            schema(**valid)
        except ValidationError as error:
            reader.report(node, schema, error.errors(include_url=False))
            valid = {
                key: value for key, value in valid.items() if all(key not in each["loc"] for each in error.errors())
            }
    return {key: member for key, member in node.members.items() if key in keys and keys[key].name in valid}


def is_whole(node: Located, members: Mapping[str, Located], schema: type[Schema]) -> bool:
    """Return whether :func:`check_members` found the object complete and valid."""
    keys = keys_of(schema)
    required = {each.name for each in keys.values() if each.is_required}
    is_valid = isinstance(node.value, dict) and members.keys() == node.value.keys()
    return is_valid and {keys[key].name for key in members} >= required


def list_items(members: Mapping[str, Located], key: str) -> list[Located]:
    """Return the items of an optional list member."""
    return members[key].value if key in members else []


def parse_value(path: str, value: Any, kind: type[T]) -> T:
    """Return a plain value as a schema or another type; raises ConfigError with all problems, placed at ``path``."""
    reader = Reader(Findings(""))
    found: T = reader.value(with_paths(value, path), kind)
    if reader.findings.fatal:
        raise ConfigError(reader.findings.fatal)
    return found


# Types

_INVALID: Final = object()
_FLAGS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOUNS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "a list",
    Path: "a path",
    str: "a text",
    tuple: "a list",
}


def expected_text(fault: ErrorDetails, schema: type) -> str:
    """Return a description of the value that a field of a schema expects, for an error of pydantic."""
    field = keys_of(schema).get(str(fault["loc"][0])) if fault["loc"] else None
    return _expected(fault, field.type if field else Any)


def _expected(fault: ErrorDetails, kind: Any) -> str:
    own = fault["type"] == "value_error"
    return (not own and _describe(kind)) or fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def unquoted(value: Any) -> Any:
    """Convert a quoted number or boolean such as ``"8080"``; a validator before the type's own."""
    if isinstance(value, str) and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    if isinstance(value, str | float):
        with suppress(ValueError):
            number = float(value)
            return int(number) if number.is_integer() else number
    return value


def lower_case(value: Any) -> Any:
    """Convert a text to lower case; a validator before that of a choice."""
    return value.strip().lower() if isinstance(value, str) else value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    config = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    # Typed dictionaries have their own configuration.
    return TypeAdapter(kind, config=None if hasattr(kind, "__total__") else config)


def _metadata(kind: Any) -> tuple[Any, ...]:
    return kind.__metadata__ if get_origin(kind) is Annotated else ()


def _is_schema(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


@cache
def _without_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether it had None."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(base) not in {Union, UnionType}:
        return kind, False
    others = tuple(each for each in get_args(base) if each is not type(None))
    metadata = [each for each in _metadata(kind) if not isinstance(each, Key | NoEffect)]
    inner = reduce(or_, others)
    return Annotated[inner, *metadata] if metadata else inner, len(others) < len(get_args(base))


@cache
def _holds_schema(kind: Any) -> bool:
    """Return whether a type is a schema, or a list or mapping of schemas."""
    is_container = get_origin(kind) in {Annotated, dict, list, tuple, Mapping}
    return _is_schema(kind) or (is_container and any(map(_holds_schema, get_args(kind))))


@cache
def _describe(kind: Any) -> str:
    """Return a description of the values of a type; empty for types that only pydantic knows."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        text = _describe(arguments[0])
        return text and text + _describe_bounds(_metadata(kind))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in {Union, UnionType}:
        parts = dict.fromkeys(_describe(each) for each in arguments if each is not type(None))
        return " or ".join(parts) if all(parts) else ""
    if origin in {list, tuple} and arguments[0] is str:
        return "a list of texts"
    return _NOUNS.get(origin or kind, "")


def _describe_bounds(metadata: Sequence[Any]) -> str:
    constraints = [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else (each,))]
    names = ("ge", "gt", "le", "min_length", "max_length", "pattern")
    found = [[getattr(each, name) for each in constraints if hasattr(each, name)] for name in names]
    ge, gt, le, shortest, longest, pattern = (values[0] if values else None for values in found)
    parts = []
    if ge is not None:
        parts.append(f" of {ge} or more" if le is None else f" of {ge} to {le}")
    elif gt is not None:
        parts.append(f" above {gt}" if le is None else f" above {gt} and up to {le}")
    elif le is not None:
        parts.append(f" of {le} or less")
    if shortest:
        parts.append(" that is not empty" if longest is None else f" of {shortest} to {longest} items")
    if pattern:
        parts.append(f" that matches {pattern}" + (f", of up to {longest} characters" if longest else ""))
    return "".join(parts)


def _hint(node: Located, kind: Any, faults: Sequence[ErrorDetails]) -> str:
    value, types = node.value, {fault["type"] for fault in faults}
    if isinstance(value, str):
        if types & {"int_type", "float_type", "bool_type"} and not isinstance(unquoted(value), str):
            return "remove the quotes"
        if types & {"list_type", "tuple_type"} and "string_type" not in types:
            return f'write a list: ["{value}"]'
        return did_you_mean(value, [word for word in _words(kind) if isinstance(word, str)])
    return f'put it in quotes: "{value}"' if types == {"string_type"} and isinstance(value, int | float) else ""


def _words(kind: Any) -> Iterator[Any]:
    """Yield the words of a choice."""
    for each in get_args(kind):
        if get_origin(kind) is Literal:
            yield each
        else:
            yield from _words(each)


def _locate(node: Located, kind: Any, location: tuple[int | str, ...]) -> tuple[Located, Any]:
    """Follow a location of pydantic, which contains names of the members of unions between keys."""
    for step in location:
        inner = node.find(step)
        if inner is node and isinstance(step, str):
            continue
        containers, index = ({dict}, 1) if isinstance(step, str) else ({list, tuple}, 0)
        kinds = [get_args(each)[index] for each in _alternatives(kind) if get_origin(each) in containers]
        node, kind = inner, kinds[0] if kinds else Any
    return node, kind


def _alternatives(kind: Any) -> Sequence[Any]:
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_args(base) if get_origin(base) in {Union, UnionType} else (base,)
