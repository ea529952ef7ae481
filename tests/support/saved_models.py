"""Small TensorFlow SavedModels, written without TensorFlow.

A SavedModel is a protobuf message of few fields; those that a model of constants needs are encoded here by hand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from ovmstrio.handlers.config.project_spec import DEFAULT_MODEL, ModelEntry, ModelsSpec, ProjectBatching, ProjectSpec
from ovmstrio.handlers.models.library import LibraryOptions, ProjectModels, open_models
from tests.support.paddle_files import write_field

FLOAT: Final = 1
INT32: Final = 3
STRING: Final = 7
INT64: Final = 9

_NUMPY: Final[Mapping[int, str]] = {FLOAT: "<f4", INT32: "<i4", INT64: "<i8"}

Info = tuple[str, int, Sequence[int]]
"""A tensor of a signature: its name in the graph, element type and shape."""

Node = bytes

_FEATURES: Final = {"features": ("x:0", FLOAT, [-1, 3])}
CLASSIFY: Final = (_FEATURES, {"scores": ("y:0", FLOAT, [-1, 2]), "class_ids": ("best:0", INT64, [-1])})
DOUBLE: Final = (_FEATURES, {"doubled": ("twice:0", FLOAT, [-1, 2])})
TOTAL: Final[tuple[Any, Any]] = (_FEATURES, {"total": ("total:0", FLOAT, [])})


def _entry(field: int, key: str, value: bytes) -> bytes:
    return write_field(field, write_field(1, key) + write_field(2, value))


def _shape(sizes: Sequence[int]) -> bytes:
    return b"".join(write_field(2, write_field(1, size)) for size in sizes)


def attribute(*, kind: int | None = None, shape: Sequence[int] | None = None, flag: bool | None = None) -> bytes:
    if kind is not None:
        return write_field(6, kind)
    return write_field(5, int(flag)) if flag is not None else write_field(7, _shape(shape or ()))


def node(name: str, op: str, inputs: Sequence[str] = (), **attributes: bytes) -> Node:
    encoded = write_field(1, name) + write_field(2, op) + b"".join(write_field(3, each) for each in inputs)
    return encoded + b"".join(_entry(5, key, value) for key, value in attributes.items())


def const(name: str, values: np.ndarray, kind: int) -> Node:
    tensor = (
        write_field(1, kind)
        + write_field(2, _shape(values.shape))
        + write_field(4, values.astype(_NUMPY[kind]).tobytes())
    )
    return node(name, "Const", dtype=attribute(kind=kind), value=write_field(8, tensor))


def _info(info: Info) -> bytes:
    name, kind, shape = info
    return write_field(1, name) + write_field(2, kind) + write_field(3, _shape(shape))


def _signature(inputs: Mapping[str, Info], outputs: Mapping[str, Info]) -> bytes:
    encoded = b"".join(_entry(1, key, _info(info)) for key, info in inputs.items())
    encoded += b"".join(_entry(2, key, _info(info)) for key, info in outputs.items())
    return encoded + write_field(3, "tensorflow/serving/predict")


def write_saved_model(
    folder: Path, nodes: Sequence[Node], signatures: Mapping[str, tuple[Mapping[str, Info], Mapping[str, Info]]]
) -> Path:
    graph = b"".join(write_field(1, each) for each in nodes) + write_field(4, write_field(1, 1087))
    meta = write_field(1, write_field(4, "serve")) + write_field(2, graph)
    meta += b"".join(_entry(5, key, _signature(*sides)) for key, sides in signatures.items())
    folder.mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(write_field(1, 1) + write_field(2, meta))
    return folder


def write_classifier(folder: Path, weight: float = 1.0, **signatures: Any) -> Path:
    """Write a model whose scores are the features times (0, 1), (2, 3), (4, 5), times a weight."""
    f, no = attribute(kind=FLOAT), attribute(flag=False)
    nodes = [
        node("x", "Placeholder", dtype=f, shape=attribute(shape=[-1, 3])),
        const("w", np.arange(6).reshape(3, 2) * weight, FLOAT),
        const("axis", np.array(1), INT32),
        const("axes", np.array([0, 1]), INT32),
        node("y", "MatMul", ["x", "w"], T=f, transpose_a=no, transpose_b=no),
        node("best", "ArgMax", ["y", "axis"], T=f, Tidx=attribute(kind=INT32), output_type=attribute(kind=INT64)),
        node("twice", "AddV2", ["y", "y"], T=f),
        node("total", "Sum", ["y", "axes"], T=f, Tidx=attribute(kind=INT32), keep_dims=no),
    ]
    return write_saved_model(folder, nodes, signatures or {"serving_default": CLASSIFY})


def single_model(path: Path, signature_key: str | None = None) -> ModelsSpec:
    """Return the section of a project with one model."""
    entry = ModelEntry(name=DEFAULT_MODEL, path=str(path), signature_key=signature_key)
    return ModelsSpec(section="models", kind="path", entries=(entry,), signature_key=signature_key)


@asynccontextmanager
async def open_tensorflow_models(
    folder: Path, models: ModelsSpec | None, batching: ProjectBatching | None = None
) -> AsyncIterator[ProjectModels]:
    """Open the models of a TensorFlow project."""
    project = ProjectSpec(
        name="p", directory=folder, file=folder / "nucleus.yaml", type="tensorflow", python_path=folder,
        handler_path=folder / "handler.py", models=models, batching=batching,
    )  # fmt: skip
    async with open_models(project, options=LibraryOptions(root=folder / "down")) as opened:
        yield opened


async def predict(opened: ProjectModels, *args: Any) -> dict[str, Any]:
    """Call the client of a handler in a thread."""
    client: Any = opened.clients["tensorflow_client"]
    return await trio.to_thread.run_sync(client.predict, *args)
