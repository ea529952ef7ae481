"""Protobuf text format: parser with source positions, and validation against message descriptors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from google.protobuf.descriptor import FieldDescriptor as Field

from ovmstrio.config.documents import Findings, InvalidSyntax, InvalidValue, Located, did_you_mean

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s+|\#[^\n]*)+)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
      | (?P<number>\.?[0-9](?:[eE][+-]|[0-9A-Za-z_.])*)
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>[{}<>\[\]:,;/.\-])""",
    re.VERBOSE,
)
_CLOSING: Final = {"{": "}", "<": ">"}
_MAX_DEPTH: Final = 60


@dataclass(frozen=True, slots=True)
class ProtoScalar:
    """Source text of a scalar; adjacent strings are one, with quotes."""

    text: str
    kind: Literal["string", "number", "word"]
    line: int


@dataclass(frozen=True, slots=True)
class ProtoMessage:
    """Fields between braces; ``line`` is that of the opening brace."""

    fields: tuple[ProtoField, ...]
    line: int


ProtoValue = ProtoScalar | ProtoMessage


@dataclass(frozen=True, slots=True)
class ProtoField:
    """A field with its value, or the values of a list.

    ``bracketed`` names are extensions or types.  ``start`` and ``end`` are source offsets, including the separator.
    """

    name: str
    bracketed: bool
    values: tuple[ProtoValue, ...]
    is_list: bool
    line: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _ProtoToken:
    kind: str
    text: str
    line: int
    start: int
    end: int


def parse_proto(text: str) -> tuple[ProtoField, ...]:
    """Parse a text; raises InvalidSyntax at the first syntax error."""
    parser = _ProtoParser(text)
    fields = tuple(parser.fields("", 0))
    parser.finish()
    return fields


def _tokens(text: str) -> Iterator[_ProtoToken]:
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _invalid_character(text, at, line)
        kind = match.lastgroup or ""
        if kind != "space":
            yield _ProtoToken(kind, match[0], line, at, match.end())
        line += match[0].count("\n")
        at = match.end()
    yield _ProtoToken("end", "", line, at, at)


def _invalid_character(text: str, at: int, line: int) -> InvalidSyntax:
    if text[at] in "\"'":
        return InvalidSyntax("unterminated string", line, suggestion=f"close it with {text[at]}")
    return InvalidSyntax(f"unexpected {text[at]!r}", line, suggestion="remove it, or put the value in quotes")


class _ProtoParser:
    def __init__(self, text: str) -> None:
        self._rest = _tokens(text)
        self._next = next(self._rest)
        self._last = self._next

    def finish(self) -> None:
        if self._next.kind != "end":
            raise self._unexpected("the name of a field")

    def fields(self, closing: str, depth: int) -> Iterator[ProtoField]:
        while self._next.kind != "end" and self._next.text != closing:
            yield self._field(depth)

    def _field(self, depth: int) -> ProtoField:
        first = self._next
        bracketed = self._skip("[")
        name = self._bracketed_name() if bracketed else self._word("the name of a field")
        colon = self._skip(":")
        is_list = self._next.text == "["
        if not colon and self._next.text not in {"{", "<", "["}:
            raise self._unexpected(f"a colon or a brace after {name}")
        values = self._list(depth) if is_list else (self._value(depth),)
        if not self._skip(","):
            self._skip(";")
        return ProtoField(name, bracketed, values, is_list, first.line, first.start, self._last.end)

    def _list(self, depth: int) -> tuple[ProtoValue, ...]:
        self._take()
        values: list[ProtoValue] = []
        while self._next.text != "]":
            values.append(self._value(depth))
            if not self._skip(",") and self._next.text != "]":
                raise self._unexpected("a comma or ]")
        self._take()
        return tuple(values)

    def _value(self, depth: int) -> ProtoValue:
        if self._next.text in _CLOSING:
            return self._block(depth + 1)
        token = self._take()
        if token.kind == "string":
            text = token.text
            while self._next.kind == "string":
                text += self._take().text
            return ProtoScalar(text, "string", token.line)
        if token.text == "-" and self._next.kind in {"number", "word"}:
            following = self._take()
            return ProtoScalar(f"-{following.text}", "number", token.line)
        if token.kind == "number":
            return ProtoScalar(token.text, "number", token.line)
        if token.kind == "word":
            return ProtoScalar(token.text, "word", token.line)
        raise self._unexpected("a value", token)

    def _block(self, depth: int) -> ProtoMessage:
        opening = self._take()
        if depth > _MAX_DEPTH:
            raise InvalidSyntax("messages are nested too deeply", opening.line, expected=f"at most {_MAX_DEPTH}")
        closing = _CLOSING[opening.text]
        fields = tuple(self.fields(closing, depth))
        if self._next.text != closing:
            raise InvalidSyntax(
                f"unclosed {opening.text} of line {opening.line}", opening.line, suggestion=f"add a {closing}"
            )
        self._take()
        return ProtoMessage(fields, opening.line)

    def _bracketed_name(self) -> str:
        parts = []
        while self._next.kind in {"word", "number"} or self._next.text in {"/", ".", "-"}:
            parts.append(self._take().text)
        if not parts or not self._skip("]"):
            raise self._unexpected("[type.googleapis.com/package.Type] or [package.Type.extension]")
        return "".join(parts)

    def _word(self, expected: str) -> str:
        if self._next.kind != "word":
            raise self._unexpected(expected)
        return self._take().text

    def _skip(self, text: str) -> bool:
        if self._next.text != text:
            return False
        self._take()
        return True

    def _take(self) -> _ProtoToken:
        self._last = self._next
        if self._last.kind != "end":
            self._next = next(self._rest)
        return self._last

    def _unexpected(self, expected: str, found: _ProtoToken | None = None) -> InvalidSyntax:
        token = found or self._next
        shown = token.text or "the end of the file"
        if token.text in {"}", ">"}:
            return InvalidSyntax(f"unexpected {shown}", token.line, expected=expected, found=shown)
        return InvalidSyntax(f"unexpected {shown}", token.line, expected=expected, found=shown)


_INTEGER: Final = re.compile(r"-?(?:0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9][0-9]{0,19})")
_FLOAT: Final = re.compile(
    r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?|-?(?:inf|infinity|nan)", re.IGNORECASE
)
_BOOLEANS: Final = frozenset({"true", "True", "t", "false", "False", "f", "0", "1"})
_SIGNED_32: Final = frozenset({Field.TYPE_INT32, Field.TYPE_SINT32, Field.TYPE_SFIXED32})
_SIGNED_64: Final = frozenset({Field.TYPE_INT64, Field.TYPE_SINT64, Field.TYPE_SFIXED64})
_UNSIGNED_32: Final = frozenset({Field.TYPE_UINT32, Field.TYPE_FIXED32})
_FLOATS: Final = frozenset({Field.TYPE_FLOAT, Field.TYPE_DOUBLE})


def check_scalar(value: ProtoScalar, field: Any) -> None:
    """Validate a scalar against its field; raises Unusable if the value does not fit the type."""
    if field.type in {Field.TYPE_STRING, Field.TYPE_BYTES}:
        if value.kind != "string":
            raise InvalidValue("text in quotes", f'write "{value.text}"')
    elif value.kind == "string":
        raise InvalidValue(
            _expected_type(field), f"write {value.text[1:-1]} without quotes" if value.text[1:-1] else ""
        )
    elif field.type == Field.TYPE_ENUM:
        _check_enum(value, field)
    elif field.type == Field.TYPE_BOOL or field.type in _FLOATS:
        is_right = value.text in _BOOLEANS if field.type == Field.TYPE_BOOL else _FLOAT.fullmatch(value.text)
        if not is_right:
            raise InvalidValue(_expected_type(field))
    else:
        low, high = _limits(field)
        if not _INTEGER.fullmatch(value.text) or not low <= _integer(value.text) <= high:
            raise InvalidValue(f"an integer of {low} to {high}")


def _check_enum(value: ProtoScalar, field: Any) -> None:
    names = [each.name for each in field.enum_type.values]
    if value.text not in names and (value.kind != "number" or value.text not in map(str, range(len(names)))):
        raise InvalidValue(", ".join(names), did_you_mean(value.text, names))


def _expected_type(field: Any) -> str:
    if field.type == Field.TYPE_BOOL:
        return "true or false"
    if field.type == Field.TYPE_ENUM:
        return ", ".join(each.name for each in field.enum_type.values)
    return "a number"


def _integer(text: str) -> int:
    digits = text.lstrip("-")
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    number = int(digits, base)
    return -number if text.startswith("-") else number


def _limits(field: Any) -> tuple[int, int]:
    if field.type in _SIGNED_32:
        return -(2**31), 2**31 - 1
    if field.type in _SIGNED_64:
        return -(2**63), 2**63 - 1
    return 0, 2**32 - 1 if field.type in _UNSIGNED_32 else 2**64 - 1


_ANY: Final = "google.protobuf.Any"
_STRUCT: Final = "google.protobuf.Struct"
_PREFIX: Final = "type.googleapis.com/"


def fit_message(
    text: str, fields: tuple[ProtoField, ...], descriptor: Any, findings: Findings, *, refusal: str, options: Any
) -> tuple[Located, str]:
    """Validate a text against a message type and remove what does not fit.

    Args:
        text: the complete text.
        fields: the parsed fields.
        descriptor: message type; its pool has all nested types.
        findings: receives the problems.
        refusal: prefix of the messages.
        options: descriptor of the message whose extensions are allowed in an Any.

    Returns:
        The message, with lists for repeated fields, and the text with invalid fields blanked out.
    """
    validated = _Validator(findings, refusal, options, descriptor.file.pool)
    root = validated.members(fields, Located(None, 1), descriptor) or Located({}, 1)
    for start, end in validated.dropped:
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return root, text


@dataclass(slots=True)
class _Validator:
    findings: Findings
    refusal: str
    options: Any
    pool: Any
    dropped: list[tuple[int, int]] = field(default_factory=list)

    def members(self, fields: tuple[ProtoField, ...], at: Located, descriptor: Any) -> Located | None:
        """Return the message of valid fields; None if a required field is missing or invalid."""
        if descriptor.full_name == _ANY and any(each.bracketed for each in fields):
            return self._any(fields, at)
        given: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        for each in fields:
            place = _below(at, each)
            known = self._find(each, descriptor, place)
            if not (
                known
                and self._is_first(each, known, given, place)
                and self._keep_values(each, known, place, given, kept)
            ):
                self.dropped.append((each.start, each.end))
        required = {each.name for each in descriptor.fields if each.is_required}
        for name in sorted(required - given.keys()):
            missing = Located(None, at.line, f"{at.path}.{name}" if at.path else name)
            self._refuse(missing, f"{descriptor.name} needs {name}", fix=f'add {name}: "..."')
        return Located(kept, at.line, at.path) if required <= kept.keys() else None

    def _any(self, fields: tuple[ProtoField, ...], at: Located) -> Located:
        kept: dict[str, Located] = {}
        for number, each in enumerate(fields):
            place = _below(at, each)
            if number:
                self._refuse(place, "several messages in one Any", fix="use separate braces")
            inner = None if number else self._typed(each, place)
            if inner is None:
                self.dropped.append((each.start, each.end))
            else:
                kept[each.name] = inner
        return Located(kept, at.line, at.path)

    def _typed(self, given: ProtoField, at: Located) -> Located | None:
        prefix, _, name = given.name.rpartition("/")
        if f"{prefix}/" not in {_PREFIX, "type.googleprod.com/"}:
            self._refuse(at, f"[{given.name}] is not a type", fix=f"write [{_PREFIX}{name}]")
            return None
        try:
            descriptor = self.pool.FindMessageTypeByName(name)
        except KeyError:
            types = [_STRUCT, *(each.message_type.full_name for each in self.pool.FindAllExtensions(self.options))]
            fix = did_you_mean(name, types, otherwise=f"use [{_PREFIX}{_STRUCT}] for options of other calculators")
            self._refuse(at, f"unknown message {name}", found=name, fix=fix)
            return None
        if given.is_list or not isinstance(given.values[0], ProtoMessage):
            self._refuse(at, f"{descriptor.name} is a message", expected="{ ... }")
            return None
        return self.members(given.values[0].fields, at, descriptor)

    def _find(self, given: ProtoField, descriptor: Any, at: Located) -> Any:
        extensions = self.pool.FindAllExtensions(descriptor) if descriptor.is_extendable else ()
        names = sorted(each.full_name for each in extensions)
        if given.bracketed:
            if given.name in names:
                return self.pool.FindExtensionByName(given.name)
            fix = did_you_mean(given.name, names, otherwise=_listed(f"[{name}]" for name in names))
            self._refuse(at, f"{descriptor.name} has no extension {given.name}", found=given.name, fix=fix)
            return None
        found = descriptor.fields_by_name.get(given.name)
        if found is None:
            names = [each.name for each in descriptor.fields] or names
            fix = did_you_mean(given.name, names, otherwise=_listed(names))
            self._refuse(at, f"{descriptor.name} has no field {given.name}", fix=fix)
        return found

    def _is_first(self, each: ProtoField, known: Any, given: dict[str, Any], at: Located) -> bool:
        if known.is_repeated:
            given.setdefault(known.name, 0)
            return True
        union = known.containing_oneof
        key = known.full_name if known.is_extension else known.name if union is None else union.name
        if key in given:
            self._refuse(at, f"duplicate field {each.name}", fix=f"remove one; also in line {given[key]}")
            return False
        given[key] = each.line
        if each.is_list:
            self._refuse(at, f"{each.name} is not a list", fix="write one value without [ and ]")
        return not each.is_list

    def _keep_values(
        self, each: ProtoField, known: Any, at: Located, given: dict[str, Any], kept: dict[str, Any]
    ) -> bool:
        """Keep all values of a field, or none."""
        values: list[Located] = []
        for value in each.values:
            path = at.path
            if known.is_repeated:
                path, given[known.name] = f"{path}[{given[known.name]}]", given[known.name] + 1
            line = value.line if each.is_list or not isinstance(value, ProtoMessage) else each.line
            validated = self._value(value, known, Located(None, line, path))
            if validated is None:
                return False
            values.append(validated)
        if not known.is_repeated:
            kept[each.name] = values[0]
        else:
            kept.setdefault(each.name, Located([], at.line, at.path)).value.extend(values)
        return True

    def _value(self, value: ProtoValue, known: Any, at: Located) -> Located | None:
        if isinstance(value, ProtoMessage):
            if known.message_type is not None:
                return self.members(value.fields, at, known.message_type)
            self._refuse(at, f"{known.name} is not a message", expected="a value", found="{ ... }")
        elif known.message_type is not None:
            self._refuse(at, f"{known.name} is a message", expected="{ ... }", found=value.text)
        else:
            try:
                check_scalar(value, known)
            except InvalidValue as wrong:
                details = f"{known.name} cannot be {value.text}"
                self._refuse(at, details, expected=wrong.expected, found=value.text, fix=wrong.suggestion)
            else:
                return Located(value.text, at.line, at.path)
        return None

    def _refuse(self, at: Located, details: str, *, expected: str = "", found: str = "", fix: str = "") -> None:
        self.findings.refuse(at, f"{self.refusal} - {details}", expected=expected, found=found, suggestion=fix)


def _below(at: Located, given: ProtoField) -> Located:
    name = f"[{given.name}]" if given.bracketed else given.name
    return Located(None, given.line, f"{at.path}.{name}" if at.path else name)


def _listed(names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return f"known are {listed}" if listed else ""
