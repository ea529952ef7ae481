"""Whether a text's fields are those of a message: what fits becomes located values, the rest is noted and left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from ovmstrio.config.findings import Findings, did_you_mean
from ovmstrio.config.located import Located
from ovmstrio.config.proto_scalars import check_scalar
from ovmstrio.config.proto_text import ProtoField, ProtoMessage, ProtoValue
from ovmstrio.config.value_rules import Unusable

__all__ = ["fit_message"]

_ANY: Final = "google.protobuf.Any"
_STRUCT: Final = "google.protobuf.Struct"
_PREFIX: Final = "type.googleapis.com/"


def fit_message(
    text: str, fields: tuple[ProtoField, ...], descriptor: Any, findings: Findings, *, refusal: str, options: Any
) -> tuple[Located, str]:
    """Check a text against a message type and leave out what does not fit.

    Args:
        text: the whole text.
        fields: what was parsed of it.
        descriptor: of the message type, whose pool has all types that it can hold.
        findings: where what does not fit is noted.
        refusal: what such problems begin with.
        options: the descriptor of the message whose extensions name what an Any can hold.

    Returns:
        The message, in which repeated fields are lists, and the same as text in which the others are blank.
    """
    fitting = _Fitting(findings, refusal, options, descriptor.file.pool)
    root = fitting.members(fields, Located(None, 1), descriptor) or Located({}, 1)
    for start, end in fitting.dropped:
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return root, text


@dataclass(slots=True)
class _Fitting:
    findings: Findings
    refusal: str
    options: Any
    pool: Any
    dropped: list[tuple[int, int]] = field(default_factory=list)

    def members(self, fields: tuple[ProtoField, ...], at: Located, descriptor: Any) -> Located | None:
        """Give a message of the fields that fit; None if it is none without some of the others."""
        if descriptor.full_name == _ANY and any(each.bracketed for each in fields):
            return self._any(fields, at)
        given: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        for each in fields:
            place = _below(at, each)
            known = self._find(each, descriptor, place)
            if not (known and self._is_first(each, known, given, place) and self._fit(each, known, place, given, kept)):
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
                self._refuse(place, "there is more than one message in one Any", fix="give each its own braces")
            inner = None if number else self._typed(each, place)
            if inner is None:
                self.dropped.append((each.start, each.end))
            else:
                kept[each.name] = inner
        return Located(kept, at.line, at.path)

    def _typed(self, given: ProtoField, at: Located) -> Located | None:
        prefix, _, name = given.name.rpartition("/")
        if f"{prefix}/" not in {_PREFIX, "type.googleprod.com/"}:
            self._refuse(at, f"[{given.name}] is no type", fix=f"write [{_PREFIX}{name}]")
            return None
        try:
            descriptor = self.pool.FindMessageTypeByName(name)
        except KeyError:
            types = [_STRUCT, *(each.message_type.full_name for each in self.pool.FindAllExtensions(self.options))]
            fix = did_you_mean(name, types, otherwise=f"options of other calculators go into [{_PREFIX}{_STRUCT}]")
            self._refuse(at, f"there is no message {name}", found=name, fix=fix)
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
            self._refuse(at, f"{each.name} is given twice", fix=f"keep one; line {given[key]} has one too")
            return False
        given[key] = each.line
        if each.is_list:
            self._refuse(at, f"{each.name} is no list", fix="write one value without [ and ]")
        return not each.is_list

    def _fit(self, each: ProtoField, known: Any, at: Located, given: dict[str, Any], kept: dict[str, Any]) -> bool:
        """Keep the values of a field, all of them or none."""
        values: list[Located] = []
        for value in each.values:
            path = at.path
            if known.is_repeated:
                path, given[known.name] = f"{path}[{given[known.name]}]", given[known.name] + 1
            line = value.line if each.is_list or not isinstance(value, ProtoMessage) else each.line
            fitting = self._value(value, known, Located(None, line, path))
            if fitting is None:
                return False
            values.append(fitting)
        if not known.is_repeated:
            kept[each.name] = values[0]
        else:
            kept.setdefault(each.name, Located([], at.line, at.path)).value.extend(values)
        return True

    def _value(self, value: ProtoValue, known: Any, at: Located) -> Located | None:
        if isinstance(value, ProtoMessage):
            if known.message_type is not None:
                return self.members(value.fields, at, known.message_type)
            self._refuse(at, f"{known.name} is no message", expected="a value", found="{ ... }")
        elif known.message_type is not None:
            self._refuse(at, f"{known.name} is a message", expected="{ ... }", found=value.text)
        else:
            try:
                check_scalar(value, known)
            except Unusable as wrong:
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
    return f"there are: {listed}" if listed else ""
