"""Types and shapes of inputs that the user tells: for formats that do not say them, or to narrow them down."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import openvino as ov

from ovmstrio.config.shapes import parse_shape
from ovmstrio.core.datatypes import BY_NAME, BY_OPENVINO_NAME, Datatype
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Dim
from ovmstrio.openvino.conversion.sources import refused
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason
from ovmstrio.openvino.signature import port_names, to_partial_shape

__all__ = ["InputForm", "describe_inputs", "parse_input_form"]

_FORM: Final = re.compile(r"(?P<name>.+?)=(?P<type>[A-Za-z0-9]*)\s*[\[(](?P<dims>[^\])]*)[\])]")
_EXAMPLE: Final = "NAME=TYPE[SIZES] such as image=FP32[-1,3,224,224], with -1 for any size"


@dataclass(frozen=True, slots=True)
class InputForm:
    """The shape of an input, and its type if that is to be told."""

    shape: tuple[Dim, ...]
    datatype: Datatype | None = None


def parse_input_form(text: str) -> tuple[str, InputForm]:
    """Read ``image=FP32[-1,3,224,224]``; the type may be left out.

    Raises:
        ConfigError: it has another form.
    """
    matched = _FORM.fullmatch(text.strip())
    if matched is None:
        raise ConfigError([Problem(f"--input: expected {_EXAMPLE}, got {text!r}")])
    datatype = BY_NAME.get(matched["type"].upper())
    if matched["type"] and datatype is None:
        known = ", ".join(BY_NAME)
        raise ConfigError([Problem(f"--input: {matched['type']!r} is no element type; known are {known}")])
    dims = parse_shape("--input", f"({matched['dims']})").dims
    return matched["name"], InputForm(dims or (), datatype)


def describe_inputs(source: Path, model: ov.Model, forms: Mapping[str, InputForm]) -> None:
    """Give the model's inputs the types and shapes that the user tells; every input must have one then.

    Raises:
        ConfigError: an input is unknown, cannot have that form, or has none yet.
    """
    names = port_names(model.inputs, {}, is_input=True)
    _refuse_unknown(source, names, list(forms))
    for name, port in zip(names, model.inputs, strict=True):
        form = forms.get(name)
        if form is None:
            continue
        node, type_name = port.get_node(), port.get_element_type().get_type_name()
        if form.datatype is not None and type_name not in {"dynamic", form.datatype.openvino}:
            own = BY_OPENVINO_NAME[type_name].name if type_name in BY_OPENVINO_NAME else type_name
            raise refused(source, f"input {name!r} is {own}, and not {form.datatype.name}", "leave the type out")
        if form.datatype is not None:
            node.set_element_type(getattr(ov.Type, form.datatype.openvino))
        if not port.get_partial_shape().compatible(to_partial_shape(form.shape)):
            shapes = f"{port.get_partial_shape()}, and not {to_partial_shape(form.shape)}"
            raise refused(source, f"input {name!r} has the shape {shapes}")
        node.set_partial_shape(to_partial_shape(form.shape))
    try:
        model.validate_nodes_and_infer_types()
    except OPENVINO_ERRORS as error:
        raise refused(source, f"the model cannot take inputs of these forms: {reason(error)}") from error
    _refuse_formless(source, names, model)


def _refuse_unknown(source: Path, names: Sequence[str], told: Sequence[str]) -> None:
    problems = []
    for name in told:
        if name not in names:
            near = get_close_matches(name, names, 1)
            known = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
            problems.append(Problem(f"the model has no input {name!r}", file=str(source), suggestion=known))
    if problems:
        raise ConfigError(problems)


def _refuse_formless(source: Path, names: Sequence[str], model: ov.Model) -> None:
    formless = [
        name
        for name, port in zip(names, model.inputs, strict=True)
        if port.get_partial_shape().rank.is_dynamic or port.get_element_type().is_dynamic()
    ]
    if formless:
        listed = ", ".join(map(repr, formless))
        way_out = " ".join(f"--input '{name}=FP32[-1,...]'" for name in formless)
        message = f"the file tells no type or no number of dimensions of {listed}"
        raise refused(source, message, f"tell them: {way_out}")
