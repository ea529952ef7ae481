"""Reader of PyTorch programs; requires torch."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import openvino as ov

from ovmstrio.inference.conversion.sources import TORCH_EXPORT, conversion_error, is_traced
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.util.extras import Extra, way_to_install
from ovmstrio.util.regular_files import open_regular
from ovmstrio.util.truncation import text_of

_NEEDED: Final = ("torch", "packaging")
_REWRITE: Final = "save the model with the installed torch version, by torch.export.save() or torch.jit.save()"


def read_torch(source: Path, framework: str) -> ov.Model:
    """Read a ``torch.export`` or TorchScript program; inputs are named after the arguments of ``forward``.

    TorchScript has input types and ranks only if it was traced.

    Raises:
        ConfigError: torch is not installed or cannot read the file, or OpenVINO cannot convert the program.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        message = f"reading {framework} needs {' and '.join(missing)}"
        raise conversion_error(source, message, f"{way_to_install(Extra.TORCH)}, or give the model as ONNX")
    with _quiet():
        program = _load(source, framework)
        try:
            model: ov.Model = ov.convert_model(program)
        except OPENVINO_ERRORS as error:
            raise conversion_error(
                source, f"OpenVINO cannot convert the model: {openvino_error_message(error)}"
            ) from error
        if framework == TORCH_EXPORT:
            _describe(model, _sizes(program))
        else:
            _describe(model, {str(argument.name): None for argument in program.forward.schema.arguments[1:]})
    return model


def _load(source: Path, framework: str) -> Any:
    torch: Any = importlib.import_module("torch")
    try:
        if framework == TORCH_EXPORT:
            with open_regular(source) as opened:  # by path, torch requires the suffix .pt2
                return importlib.import_module("torch.export").load(opened)
        return torch.jit.load(str(source), map_location="cpu", _restore_shapes=is_traced(source)).eval()
    except Exception as error:
        # A file of another version may raise any exception.
        first, _, _ = text_of(error).strip().partition("\n")
        raise conversion_error(
            source, f"torch cannot read the file: {type(error).__name__}: {first}", _REWRITE
        ) from error


def _sizes(program: Any) -> dict[str, list[int] | None]:
    """Return the inputs of an exported program with their shapes; -1 is a dynamic size."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    shapes: dict[str, list[int] | None] = {}
    for name in program.graph_signature.user_inputs:
        value = placeholders[name].meta.get("val") if name in placeholders else None
        shape = getattr(value, "shape", None)
        shapes[str(name)] = None if shape is None else [size if isinstance(size, int) else -1 for size in shape]
    return shapes


def _describe(model: ov.Model, inputs: Mapping[str, Sequence[int] | None]) -> None:
    if len(inputs) != len(model.inputs):
        return
    for port, (name, shape) in zip(model.inputs, inputs.items(), strict=True):
        port.set_names({name})
        node = port.get_node()
        node.set_friendly_name(name)
        if shape is not None:
            node.set_partial_shape(ov.PartialShape(list(shape)))
    model.validate_nodes_and_infer_types()


@contextmanager
def _quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
