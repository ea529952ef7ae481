"""Whether a text's fields are those of a message: everything that is not is found, and left out."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ovmstrio.config.findings import did_you_mean
from ovmstrio.protocol.descriptors import POOL
from ovmstrio.runtimes.graphs.config.found import FILE_INVALID, GraphFindings
from ovmstrio.runtimes.graphs.config.scalars import check_scalar
from ovmstrio.runtimes.graphs.config.syntax import Block, Entry, Scalar, Value

__all__ = ["Pruned", "prune"]

_ANY: Final = "google.protobuf.Any"
_STRUCT: Final = "google.protobuf.Struct"
_PREFIX: Final = "type.googleapis.com/"


@dataclass(slots=True)
class Pruned:
    """What is left of a text: its entries, and the same as text in which the others are blank."""

    entries: tuple[Entry, ...]
    text: str


def prune(text: str, entries: tuple[Entry, ...], message: str, findings: GraphFindings) -> Pruned:
    """Check a text against a message type and leave out what does not fit, which is noted."""
    checker = _Checker(findings)
    left = checker.block(entries, 1, POOL.FindMessageTypeByName(message), "")
    for start, end in checker.dropped:
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return Pruned(left or (), text)


@dataclass(slots=True)
class _Checker:
    findings: GraphFindings
    dropped: list[tuple[int, int]] = field(default_factory=list)

    def block(self, entries: tuple[Entry, ...], line: int, descriptor: Any, path: str) -> tuple[Entry, ...] | None:
        """Give the entries that fit; None if a message without some of the others is none."""
        if descriptor.full_name == _ANY and any(entry.bracketed for entry in entries):
            return self._any(entries, path)
        given: dict[str, int] = {}
        counts: Counter[str] = Counter()
        left = []
        for entry in entries:
            at = _join(path, f"[{entry.name}]" if entry.bracketed else entry.name)
            known = self._find(entry, descriptor, at)
            kept = known and self._once(entry, known, given, at) and self._fit(entry, known, at, counts)
            if kept:
                left.append(kept)
            else:
                self.dropped.append((entry.start, entry.end))
        required = {each.name for each in descriptor.fields if each.is_required}
        for name in sorted(required - given.keys()):
            self._refuse(f"{descriptor.name} needs {name}", line, _join(path, name), fix=f'add {name}: "..."')
        return tuple(left) if required <= {entry.name for entry in left} else None

    def _any(self, entries: tuple[Entry, ...], path: str) -> tuple[Entry, ...]:
        left = []
        for number, entry in enumerate(entries):
            at = _join(path, f"[{entry.name}]")
            if number:
                self._refuse(
                    "there is more than one message in one Any", entry.line, at, fix="give each its own braces"
                )
                kept = None
            else:
                kept = self._typed(entry, at)
            if kept is None:
                self.dropped.append((entry.start, entry.end))
            else:
                left.append(kept)
        return tuple(left)

    def _typed(self, entry: Entry, path: str) -> Entry | None:
        prefix, _, name = entry.name.rpartition("/")
        if f"{prefix}/" not in {_PREFIX, "type.googleprod.com/"}:
            self._refuse(f"[{entry.name}] is no type", entry.line, path, fix=f"write [{_PREFIX}{name}]")
            return None
        try:
            descriptor = POOL.FindMessageTypeByName(name)
        except KeyError:
            fix = did_you_mean(
                name, _option_types(), otherwise=f"options of other calculators go into [{_PREFIX}{_STRUCT}]"
            )
            self._refuse(f"there is no message {name}", entry.line, path, found=name, fix=fix)
            return None
        return self._message(entry, entry.values[0], descriptor, path)

    def _find(self, entry: Entry, descriptor: Any, path: str) -> Any:
        if not entry.bracketed:
            found = descriptor.fields_by_name.get(entry.name)
            names = [each.name for each in descriptor.fields] or _extensions(descriptor)
            if found is None:
                fix = did_you_mean(entry.name, names, otherwise=_listed(names))
                self._refuse(f"{descriptor.name} has no field {entry.name}", entry.line, path, fix=fix)
            return found
        names = _extensions(descriptor)
        if entry.name in names:
            return POOL.FindExtensionByName(entry.name)
        fix = did_you_mean(entry.name, names, otherwise=_listed([f"[{name}]" for name in names]))
        self._refuse(f"{descriptor.name} has no extension {entry.name}", entry.line, path, found=entry.name, fix=fix)
        return None

    def _once(self, entry: Entry, known: Any, given: dict[str, int], path: str) -> bool:
        if known.is_repeated:
            return True
        union = known.containing_oneof
        key = known.full_name if known.is_extension else known.name if union is None else union.name
        if key in given:
            self._refuse(
                f"{entry.name} is given twice", entry.line, path, fix=f"keep one; line {given[key]} has one too"
            )
            return False
        given[key] = entry.line
        if entry.is_list:
            self._refuse(f"{entry.name} is no list", entry.line, path, fix="write one value without [ and ]")
            return False
        return True

    def _fit(self, entry: Entry, known: Any, path: str, counts: Counter[str]) -> Entry | None:
        values: list[Value] = []
        for value in entry.values:
            at = path
            if known.is_repeated:
                at = f"{path}[{counts[known.name]}]"
                counts[known.name] += 1
            kept = self._value(value, known, at)
            if kept is None:
                return None
            values.append(kept)
        return replace(entry, values=tuple(values))

    def _value(self, value: Value, known: Any, path: str) -> Value | None:
        if known.message_type is not None:
            if isinstance(value, Scalar):
                self._refuse(f"{known.name} is a message", value.line, path, expected="{ ... }", found=value.text)
                return None
            left = self.block(value.entries, value.line, known.message_type, path)
            return None if left is None else replace(value, entries=left)
        if isinstance(value, Block):
            self._refuse(f"{known.name} is no message", value.line, path, expected="a value", found="{ ... }")
            return None
        wrong = check_scalar(value, known)
        if wrong is None:
            return value
        self._refuse(
            f"{known.name} cannot be {value.text}", value.line, path,
            expected=wrong.expected, found=value.text, fix=wrong.fix,
        )  # fmt: skip
        return None

    def _message(self, entry: Entry, value: Value, descriptor: Any, path: str) -> Entry | None:
        if not isinstance(value, Block) or entry.is_list:
            self._refuse(f"{descriptor.name} is a message", entry.line, path, expected="{ ... }")
            return None
        left = self.block(value.entries, value.line, descriptor, path)
        return None if left is None else replace(entry, values=(replace(value, entries=left),))

    def _refuse(
        self, details: str, line: int, path: str, *, expected: str = "", found: str = "", fix: str = ""
    ) -> None:
        self.findings.add(FILE_INVALID, details, line, path, expected=expected, found=found, fix=fix)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(names: list[str]) -> str:
    return f"there are: {', '.join(names)}" if names else ""


def _extensions(descriptor: Any) -> list[str]:
    if not descriptor.is_extendable:
        return []
    return sorted(each.full_name for each in POOL.FindAllExtensions(descriptor))


def _option_types() -> list[str]:
    holder: Any = POOL.FindMessageTypeByName("mediapipe.CalculatorOptions")
    extensions: list[Any] = POOL.FindAllExtensions(holder)
    return [_STRUCT, *(each.message_type.full_name for each in extensions)]
