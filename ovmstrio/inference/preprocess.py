"""Preprocessing steps of a configuration: layout, precision, colour format, mean and scale."""

from __future__ import annotations

from typing import Any, Final

import openvino as ov
from openvino.preprocess import ColorFormat, PrePostProcessor

from ovmstrio.config.specs import ModelSpec
from ovmstrio.config.tensor_mapping import TensorMapping
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.signature import port_names, settings_by_port

_COLORS: Final = {
    "BGR": ColorFormat.BGR,
    "RGB": ColorFormat.RGB,
    "GRAY": ColorFormat.GRAY,
    "BGRX": ColorFormat.BGRX,
    "RGBX": ColorFormat.RGBX,
    "NV12": ColorFormat.NV12_SINGLE_PLANE,
    "NV12_2": ColorFormat.NV12_TWO_PLANES,
    "I420": ColorFormat.I420_SINGLE_PLANE,
    "I420_3": ColorFormat.I420_THREE_PLANES,
}


def preprocess(model: ov.Model, spec: ModelSpec, mapping: TensorMapping) -> ov.Model:
    """Add the preprocessing of ``spec`` to a model and return it; raise ConfigError if a setting does not fit."""
    if not (spec.layouts or spec.precisions or spec.color_formats or spec.mean or spec.scale):
        return model
    _check_values(spec)
    inputs = port_names(model.inputs, mapping.inputs, is_input=True)
    outputs = port_names(model.outputs, mapping.outputs, is_input=False)
    aliases = {**mapping.inputs, **mapping.outputs}
    anonymous = {"": spec.layouts[""]} if "" in spec.layouts else {}
    layouts = settings_by_port("layout", anonymous, inputs, aliases, origin=spec.origin)
    named = {name: layout for name, layout in spec.layouts.items() if name}
    positions = settings_by_port("layout", named, [*inputs, *outputs], aliases, origin=spec.origin)
    try:
        processor = PrePostProcessor(model)
        for index, layout in {**layouts, **positions}.items():
            at_input = index < len(inputs)
            port = processor.input(index) if at_input else processor.output(index - len(inputs))
            port.tensor().set_layout(ov.Layout(layout.tensor))
            port.model().set_layout(ov.Layout(layout.model or layout.tensor))
        _convert_inputs(processor, model, spec, inputs, aliases)
        return processor.build()
    except OPENVINO_ERRORS as error:
        if isinstance(error, ConfigError):
            raise
        raise _problem(
            spec,
            f"layout, precision, color_format, mean or scale do not fit the model: {openvino_error_message(error)}",
        ) from error


def _problem(spec: ModelSpec, message: str, path: str = "", suggestion: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=spec.origin, path=path, suggestion=suggestion)])


def _check_values(spec: ModelSpec) -> None:
    for name in spec.precisions.values():
        if name not in BY_NAME or name == "BYTES":
            known = ", ".join(sorted(set(BY_NAME) - {"BYTES"}))
            raise _problem(spec, f"unknown precision {name!r}", "precision", f"known are {known}")
    for text in spec.color_formats.values():
        for color in text.split(":"):
            if color not in _COLORS:
                raise _problem(
                    spec, f"unknown color_format {color!r}", "color_format", f"known are {', '.join(_COLORS)}"
                )
    for option in ("color_formats", "mean", "scale"):
        if getattr(spec, option) and not spec.layouts:
            raise _problem(
                spec, f"{option.removesuffix('s')} needs a layout", "layout", "set layout, such as NHWC:NCHW"
            )


def _convert_inputs(
    processor: PrePostProcessor, model: ov.Model, spec: ModelSpec, inputs: list[str], aliases: dict[str, str]
) -> None:
    precisions = settings_by_port(
        "precision", spec.precisions, inputs, aliases, origin=spec.origin, anonymous_everywhere=True
    )
    for index, name in precisions.items():
        processor.input(index).tensor().set_element_type(getattr(ov.Type, BY_NAME[name].openvino))
    colors = settings_by_port(
        "color_format", spec.color_formats, inputs, aliases, origin=spec.origin, anonymous_everywhere=True
    )
    for index, text in colors.items():
        given, _, wanted = text.partition(":")
        processor.input(index).tensor().set_color_format(_COLORS[given])
        if wanted:
            processor.input(index).preprocess().convert_color(_COLORS[wanted])
    if spec.mean or spec.scale:
        for index, port in enumerate(model.inputs):
            _normalise(processor.input(index).preprocess(), port, spec)


def _normalise(steps: Any, port: Any, spec: ModelSpec) -> None:
    # Mean and scale require floating point; OpenVINO converts back to the model's type afterwards.
    steps.convert_element_type(port.get_element_type() if port.get_element_type().is_real() else ov.Type.f32)
    if spec.mean:
        steps.mean(spec.mean[0] if len(spec.mean) == 1 else list(spec.mean))
    if spec.scale:
        steps.scale(spec.scale[0] if len(spec.scale) == 1 else list(spec.scale))
