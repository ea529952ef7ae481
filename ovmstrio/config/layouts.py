"""Layouts as OVMS writes them: ``NHWC``, ``N...``, or ``NHWC:NCHW`` for what callers see and what the model has."""

from __future__ import annotations

import re
from typing import Any, Final

from ovmstrio.config.by_tensor import by_tensor
from ovmstrio.config.findings import wrong
from ovmstrio.config.specs import LayoutSpec

__all__ = ["format_layout", "parse_layout", "parse_layouts"]

_LETTERS: Final = "NCHWD"
_FORM: Final = "letters of NCHWD, ? and ... such as NHWC or N..., or two layouts such as NHWC:NCHW"
_BLANKS: Final = re.compile(r"[ \t\r\n]+")
_PART: Final = re.compile(rf"[{_LETTERS}?]*(?:\.\.\.)?[{_LETTERS}?]*")


def parse_layouts(value: Any) -> dict[str, LayoutSpec]:
    """Read the option ``layout``: one layout, or an object with that of each tensor.

    Raises:
        ConfigError: with every layout that cannot be read.
    """
    return by_tensor("layout", value, parse_layout)


def parse_layout(option: str, text: str) -> LayoutSpec:
    """Read one layout, in letters of either case.

    Raises:
        ConfigError: it has another form.
    """
    parts = _BLANKS.sub("", text).upper().split(":")
    if len(parts) > len(("tensor", "model")):
        raise wrong(option, text, _FORM, message="more than two layouts")
    for part in parts:
        if not part or not _PART.fullmatch(part):
            raise wrong(option, text, _FORM, message=f"{part!r} is no layout")
        twice = [letter for letter in _LETTERS if part.count(letter) > 1]
        if twice:
            raise wrong(option, text, _FORM, message=f"the layout {part} has {twice[0]} twice")
    return LayoutSpec(tensor=parts[0], model=parts[1] if len(parts) > 1 else None)


def format_layout(layout: LayoutSpec) -> str:
    """Write a layout as :func:`parse_layout` reads it."""
    return layout.tensor if layout.model is None else f"{layout.tensor}:{layout.model}"
