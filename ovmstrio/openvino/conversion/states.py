"""Inputs that hold the last call's outputs, as variables of the model: found by name, or named by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import openvino as ov
from openvino.passes import LowLatency2, MakeStateful, Manager

from ovmstrio.openvino.conversion.sources import refused
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason

__all__ = ["detect_state", "make_stateful"]

_STATE_WORDS: Final = re.compile(r"(?i)(^|[_./])(state|hidden|cell|cache|mem|memory|past|kv|h|c)")


def make_stateful(
    source: Path, model: ov.Model, *, pairs: Mapping[str, str] | None, low_latency: bool
) -> dict[str, str]:
    """Change the model so that it remembers; give the pairs of inputs and outputs that became variables.

    Args:
        source: what it was read from, for messages.
        model: is changed.
        pairs: inputs, each with the output that holds its next value; none to find them, None to make no variables.
        low_latency: keep the state of loops.

    Raises:
        ConfigError: there is nothing to remember, or it cannot be.
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
        raise refused(source, f"OpenVINO cannot make it stateful: {reason(error)}") from error
    if low_latency and not model.get_sinks():
        message = "low latency keeps the state of TensorIterator and Loop operations, and the model has none"
        raise refused(source, message, "leave out --low_latency")
    return made


def _next_names(name: str) -> list[str]:
    """List the names that exporters give to the next value of the state ``name``."""
    names = [f"{name}{end}" for end in ("n", "N", "_n", "_next", "_new", "_out", ".1")]
    names += [f"{start}{name}" for start in ("next_", "new_", "out_", "present_")]
    names += [name.replace(old, new) for old, new in (("past", "present"), ("prev", "next")) if old in name]
    if name.endswith("_in") and _STATE_WORDS.search(name):
        names.append(f"{name.removesuffix('_in')}_out")
    return names


def detect_state(model: ov.Model) -> dict[str, str]:
    """Pair inputs with the outputs that hold their next value, by name, element type and shape."""
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
        raise refused(source, f"no input looks like the state of an output: {listing}", "name them: --state in=out")
    for name, successor in pairs.items():
        for side, known, wanted in (("input", inputs, name), ("output", outputs, successor)):
            if wanted not in known:
                raise refused(source, f"the model has no {side} {wanted!r}: {listing}")
        shape = inputs[name].get_partial_shape()
        if shape.rank.is_static and len(shape) and shape[0].is_dynamic:
            message = f"the state {name!r} has no fixed batch size ({shape}), so it has no initial value"
            raise refused(source, message, "export the model with a fixed batch, or let clients carry the state")
