"""Input types, shapes and state that the user specifies for a conversion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import openvino as ov
from openvino.passes import LowLatency2, MakeStateful, Manager

from ovmstrio.config.shapes import parse_shape
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import BY_NAME, BY_OPENVINO_NAME, Datatype, Dim
from ovmstrio.inference.conversion.sources import conversion_error
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.signature import port_names, to_partial_shape

_FORM: Final = re.compile(r"(?P<name>.+?)=(?P<type>[A-Za-z0-9]*)\s*[\[(](?P<dims>[^\])]*)[\])]")
_EXAMPLE: Final = "NAME=TYPE[SIZES] such as image=FP32[-1,3,224,224], with -1 for any size"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape of an input, and its type if specified."""

    shape: tuple[Dim, ...]
    datatype: Datatype | None = None


def parse_input_form(text: str) -> tuple[str, InputSpec]:
    """Parse ``image=FP32[-1,3,224,224]``, in which the type is optional; ConfigError if malformed."""
    matched = _FORM.fullmatch(text.strip())
    if matched is None:
        raise ConfigError([Problem(f"--input: expected {_EXAMPLE}, got {text!r}")])
    datatype = BY_NAME.get(matched["type"].upper())
    if matched["type"] and datatype is None:
        known = ", ".join(BY_NAME)
        raise ConfigError([Problem(f"--input: unknown element type {matched['type']!r}; known are {known}")])
    dims = parse_shape("--input", f"({matched['dims']})").dims
    return matched["name"], InputSpec(dims or (), datatype)


def apply_input_specs(source: Path, model: ov.Model, forms: Mapping[str, InputSpec]) -> None:
    """Set types and shapes of inputs; raise ConfigError if an input is unknown, incompatible or incomplete."""
    names = port_names(model.inputs, {}, is_input=True)
    _refuse_unknown(source, names, list(forms))
    for name, port in zip(names, model.inputs, strict=True):
        form = forms.get(name)
        if form is None:
            continue
        node, type_name = port.get_node(), port.get_element_type().get_type_name()
        if form.datatype is not None and type_name not in {"dynamic", form.datatype.openvino}:
            own = BY_OPENVINO_NAME[type_name].name if type_name in BY_OPENVINO_NAME else type_name
            raise conversion_error(source, f"input {name!r} is {own}, not {form.datatype.name}", "leave the type out")
        if form.datatype is not None:
            node.set_element_type(getattr(ov.Type, form.datatype.openvino))
        if not port.get_partial_shape().compatible(to_partial_shape(form.shape)):
            shapes = f"{port.get_partial_shape()}, not {to_partial_shape(form.shape)}"
            raise conversion_error(source, f"input {name!r} has the shape {shapes}")
        node.set_partial_shape(to_partial_shape(form.shape))
    try:
        model.validate_nodes_and_infer_types()
    except OPENVINO_ERRORS as error:
        raise conversion_error(
            source, f"the model does not accept these inputs: {openvino_error_message(error)}"
        ) from error
    _refuse_formless(source, names, model)


def _refuse_unknown(source: Path, names: Sequence[str], given: Sequence[str]) -> None:
    problems = []
    for name in given:
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
        options = " ".join(f"--input '{name}=FP32[-1,...]'" for name in formless)
        raise conversion_error(source, f"the file has no type or no rank for {listed}", f"specify {options}")


_STATE_WORDS: Final = re.compile(r"(?i)(^|[_./])(state|hidden|cell|cache|mem|memory|past|kv|h|c)")


def make_stateful(
    source: Path, model: ov.Model, *, pairs: Mapping[str, str] | None, low_latency: bool
) -> dict[str, str]:
    """Turn state inputs into variables; return the (input, output) pairs.

    ``pairs`` maps inputs to the outputs with their next value; empty to detect them, None for no variables.
    ``low_latency`` keeps the state of loops.

    Raises:
        ConfigError: there is no state, or it cannot become a variable.
    """
    made: dict[str, str] = {}
    manager = Manager()
    if pairs is not None:
        made = dict(pairs) or detect_state(model)
        _check_pairs(source, model, made)
        manager.register_pass(MakeStateful(made))
    if low_latency:
        manager.register_pass(LowLatency2())
    try:
        manager.run_passes(model)
    except OPENVINO_ERRORS as error:
        raise conversion_error(source, f"OpenVINO cannot make it stateful: {openvino_error_message(error)}") from error
    if low_latency and not model.get_sinks():
        message = "--low_latency requires TensorIterator or Loop operations, and the model has none"
        raise conversion_error(source, message, "leave out --low_latency")
    return made


def _next_names(name: str) -> list[str]:
    names = [f"{name}{end}" for end in ("n", "N", "_n", "_next", "_new", "_out", ".1")]
    names += [f"{start}{name}" for start in ("next_", "new_", "out_", "present_")]
    names += [name.replace(old, new) for old, new in (("past", "present"), ("prev", "next")) if old in name]
    if name.endswith("_in") and _STATE_WORDS.search(name):
        names.append(f"{name.removesuffix('_in')}_out")
    return names


def detect_state(model: ov.Model) -> dict[str, str]:
    """Return inputs with the outputs of their next value, matched by name, element type and shape."""
    outputs = {name: port for port in model.outputs for name in port.get_names()}
    pairs: dict[str, str] = {}
    for port in model.inputs:
        for name in sorted(port.get_names()):
            for candidate in _next_names(name):
                other = outputs.get(candidate)
                if (
                    other is not None
                    and other.get_element_type() == port.get_element_type()
                    and other.get_partial_shape().compatible(port.get_partial_shape())
                ):
                    pairs.setdefault(name, candidate)
    return pairs


def _check_pairs(source: Path, model: ov.Model, pairs: Mapping[str, str]) -> None:
    inputs = {name: port for port in model.inputs for name in port.get_names()}
    outputs = {name for port in model.outputs for name in port.get_names()}
    listing = f"its inputs are {sorted(inputs)}, its outputs {sorted(outputs)}"
    if not pairs:
        raise conversion_error(source, f"no state inputs found: {listing}", "name them: --state in=out")
    for name, successor in pairs.items():
        for side, known, wanted in (("input", inputs, name), ("output", outputs, successor)):
            if wanted not in known:
                raise conversion_error(source, f"the model has no {side} {wanted!r}: {listing}")
        shape = inputs[name].get_partial_shape()
        if shape.rank.is_static and len(shape) and shape[0].is_dynamic:
            message = f"the state {name!r} has no fixed batch size ({shape}), and thus no initial value"
            raise conversion_error(source, message, "export the model with a fixed batch, or keep the state in clients")
