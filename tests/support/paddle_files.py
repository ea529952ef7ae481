"""Paddle models as files, written by the tests themselves: fully connected layers in each of Paddle's layouts."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ovmstrio.core.tensor import Array

Layout = Literal["pdmodel", "params", "separate"]

_FP32, _LOD_TENSOR, _FEED, _FETCH = 5, 7, 9, 10
_INT_ATTRIBUTE = 0
_LOW_BITS = 0x7F


@dataclass(frozen=True)
class Layer:
    """Product of the input ``x`` and ``weights``: Paddle's operation, output name and bias.

    ``columns`` is how many dimensions of ``x`` are rows of the matrix (``mul`` alone has it).
    """

    weights: Array
    bias: Array | None = None
    output: str = "fc_0.tmp_1"
    columns: int = 1

    def of(self, rows: Array) -> Array:
        product: Array = rows.astype(np.float32) @ self.weights
        return product if self.bias is None else product + self.bias


def write_field(number: int, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return _write_varint(number << 3) + _write_varint(value % 2**64)
    content = value.encode() if isinstance(value, str) else value
    return _write_varint(number << 3 | 2) + _write_varint(len(content)) + content


def _write_varint(value: int) -> bytes:
    written = bytearray()
    while value > _LOW_BITS:
        written.append(value & _LOW_BITS | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _message(*fields: bytes) -> bytes:
    return b"".join(fields)


def _tensor(shape: tuple[int, ...]) -> bytes:
    return _message(write_field(1, _FP32), *(write_field(2, size) for size in shape))


def _variable(name: str, kind: int, shape: tuple[int, ...] | None = None, *, persistable: bool = False) -> bytes:
    described = [write_field(1, kind)]
    if shape is not None:
        described.append(write_field(3, write_field(1, _tensor(shape))))
    return write_field(
        3, _message(write_field(1, name), write_field(2, _message(*described)), write_field(3, int(persistable)))
    )


def _operation(kind: str, inputs: dict[str, str], outputs: dict[str, str], **attributes: int) -> bytes:
    sides = [
        write_field(number, _message(write_field(1, parameter), write_field(2, argument)))
        for number, side in ((1, inputs), (2, outputs))
        for parameter, argument in side.items()
    ]
    settings = [
        write_field(4, _message(write_field(1, name), write_field(2, _INT_ATTRIBUTE), write_field(3, value)))
        for name, value in attributes.items()
    ]
    return write_field(4, _message(*sides, write_field(3, kind), *settings))


def _program(layers: list[Layer], sample: tuple[int, ...], version: int, extra: tuple[str, ...]) -> bytes:
    parts = [write_field(1, 0), write_field(2, -1)]
    parts += [_variable("feed", _FEED, persistable=True), _variable("fetch", _FETCH, persistable=True)]
    parts += [_variable("x", _LOD_TENSOR, (-1, *sample))]
    operations = [_operation("feed", {"X": "feed"}, {"Out": "x"}, col=0)]
    for number, layer in enumerate(layers):
        shape = (-1, *sample[: layer.columns - 1], layer.weights.shape[1])
        product = layer.output if layer.bias is None else f"{layer.output}.product"
        parts += [_variable(f"w{number}", _LOD_TENSOR, layer.weights.shape, persistable=True)]
        parts += [_variable(product, _LOD_TENSOR, shape)]
        columns = {"x_num_col_dims": layer.columns, "y_num_col_dims": 1}
        operations.append(_operation("mul", {"X": "x", "Y": f"w{number}"}, {"Out": product}, **columns))
        if layer.bias is not None:
            parts += [_variable(f"b{number}", _LOD_TENSOR, layer.bias.shape, persistable=True)]
            parts += [_variable(layer.output, _LOD_TENSOR, shape)]
            sides = {"X": product, "Y": f"b{number}"}
            operations.append(_operation("elementwise_add", sides, {"Out": layer.output}, axis=len(shape) - 1))
    for kind in extra:
        parts.append(_variable(f"{kind}.out", _LOD_TENSOR, (-1, *sample)))
        operations.append(_operation(kind, {"X": "x"}, {"Out": f"{kind}.out"}))
    operations += [
        _operation("fetch", {"X": layer.output}, {"Out": "fetch"}, col=number) for number, layer in enumerate(layers)
    ]
    block = write_field(1, _message(*parts, *operations))
    return block if not version else block + write_field(4, write_field(1, version))


def _parameter(array: Array) -> bytes:
    described = _tensor(array.shape)
    return struct.pack("<IQIi", 0, 0, 0, len(described)) + described + array.astype("<f4").tobytes()


def write_model(
    folder: Path,
    *layers: Layer,
    layout: Layout = "pdmodel",
    sample: tuple[int, ...] | None = None,
    version: int = 0,
    extra: tuple[str, ...] = (),
) -> None:
    """Write a model that takes ``x`` [-1, *sample] and gives the output of each layer.

    ``extra`` are further operations, which need not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = layers[0]
    program = _program(list(layers), sample or (first.weights.shape[0],), version, extra)
    parameters = {f"w{number}": layer.weights for number, layer in enumerate(layers)}
    parameters |= {f"b{number}": layer.bias for number, layer in enumerate(layers) if layer.bias is not None}
    files = {name: _parameter(array) for name, array in sorted(parameters.items())}
    if layout == "separate":
        for name, content in files.items():
            (folder / name).write_bytes(content)
    together = {"pdmodel": ("inference.pdmodel", "inference.pdiparams"), "params": ("__model__", "__params__")}
    program_file, parameters_file = together.get(layout, ("__model__", ""))
    if parameters_file:
        (folder / parameters_file).write_bytes(b"".join(files.values()))
    (folder / program_file).write_bytes(program)


def write_prototxt(folder: Path, feeds: dict[str, str], fetches: dict[str, str], **more: Any) -> None:
    """Write ``serving_server_conf.prototxt``: name in the model -> alias; ``more`` are fields of every variable."""
    fields = {"is_lod_tensor": "false", "shape": 3} | more
    texts = []
    for side, variables in (("feed", feeds), ("fetch", fetches)):
        for name, alias in variables.items():
            own = {f"{side}_type": 1} | {key: value for key, value in fields.items() if not key.endswith("_type")}
            own |= {key: value for key, value in fields.items() if key == f"{side}_type"}
            rest = "".join(f"  {key}: {value}\n" for key, value in own.items())
            texts.append(f'{side}_var {{\n  name: "{name}"\n  alias_name: "{alias}"\n{rest}}}\n')
    (folder / "serving_server_conf.prototxt").write_text("".join(texts), encoding="utf-8")


def write_described(folder: Path, *layers: Layer, **settings: Any) -> Path:
    """Write a model with its description, aliases being ``feed`` and ``first``, ``second``, ...; gives the folder."""
    write_model(folder, *layers, **settings)
    ordinals = ("first", "second", "third")
    aliases = {layer.output: alias for layer, alias in zip(layers, ordinals, strict=False)}
    write_prototxt(folder, {"x": "feed"}, aliases)
    return folder


def layers(count: int = 1) -> list[Layer]:
    """Return layers of three inputs and two outputs, each twice the previous one."""
    one = Layer(np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0.5, -1], np.float32))
    return [replace(one, weights=one.weights * 2**number, output=f"fc_{number}.tmp_1") for number in range(count)]
