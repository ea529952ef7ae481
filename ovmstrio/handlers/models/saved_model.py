"""TensorFlow SavedModels: signatures, read without TensorFlow, and inference by OpenVINO, optionally batched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.encoding.messages import message_class
from ovmstrio.util.regular_files import read_regular_bytes
from ovmstrio.util.truncation import text_of

GRAPH_FILE: Final = "saved_model.pb"


_MESSAGE: Final = message_class("saved_model.SavedModel")
_SERVE: Final = "serve"
_INIT_OP: Final = "__saved_model_init_op"
_PREDICT: Final = "predict"

_DTYPES: Final = {
    1: ("DT_FLOAT", "float32"),
    2: ("DT_DOUBLE", "float64"),
    3: ("DT_INT32", "int32"),
    4: ("DT_UINT8", "uint8"),
    5: ("DT_INT16", "int16"),
    6: ("DT_INT8", "int8"),
    7: ("DT_STRING", "string"),
    9: ("DT_INT64", "int64"),
    10: ("DT_BOOL", "bool"),
    14: ("DT_BFLOAT16", "bfloat16"),
    17: ("DT_UINT16", "uint16"),
    19: ("DT_HALF", "float16"),
    22: ("DT_UINT32", "uint32"),
    23: ("DT_UINT64", "uint64"),
}


@dataclass(frozen=True, slots=True)
class SavedModelTensor:
    """Input or output of a signature; ``shape`` is None for any rank."""

    tensor: str
    dtype: int
    shape: tuple[int, ...] | None

    @property
    def type_name(self) -> str:
        """Numpy name of the element type."""
        return _DTYPES.get(self.dtype, ("", f"type {self.dtype}"))[1]

    def to_metadata(self) -> dict[str, Any]:
        """Return the TensorInfo as in TensorFlow Serving's metadata."""
        dims = [{"size": str(size), "name": ""} for size in self.shape or ()]
        return {
            "dtype": _DTYPES.get(self.dtype, (f"DT_{self.dtype}", ""))[0],
            "tensor_shape": {"dim": dims, "unknown_rank": self.shape is None},
            "name": self.tensor,
        }


@dataclass(frozen=True, slots=True)
class SavedModelSignature:
    """Signature of a SavedModel."""

    inputs: Mapping[str, SavedModelTensor]
    outputs: Mapping[str, SavedModelTensor]
    method_name: str

    def to_metadata(self) -> dict[str, Any]:
        """Return the SignatureDef as in TensorFlow Serving's metadata."""
        return {
            "inputs": {name: info.to_metadata() for name, info in self.inputs.items()},
            "outputs": {name: info.to_metadata() for name, info in self.outputs.items()},
            "method_name": self.method_name,
        }


class SavedModel:
    """Parsed SavedModel; ``signatures`` contains the callable signatures by key."""

    def __init__(self, message: Any) -> None:
        self._message = message
        graphs = list(message.meta_graphs)
        self._served = next((graph for graph in graphs if _SERVE in graph.info.tags), graphs[0] if graphs else None)
        entries = self._served.signature_def if self._served is not None else ()
        # TensorFlow stores internal entries as signatures, without outputs or under the key _INIT_OP.
        self.signatures: dict[str, SavedModelSignature] = {
            entry.key: SavedModelSignature(
                _tensors(entry.value.inputs), _tensors(entry.value.outputs), entry.value.method_name
            )
            for entry in entries
            if entry.value.outputs and entry.key != _INIT_OP
        }

    @property
    def keys_in_file(self) -> set[str]:
        """Keys of all signatures, including signatures that cannot be called."""
        return {entry.key for entry in self._served.signature_def} if self._served is not None else set()

    def with_only(self, key: str) -> bytes:
        """Return the serialized SavedModel with only one signature."""
        served = type(self._message).FromString(self._message.SerializeToString())
        for graph in served.meta_graphs:
            kept = [entry for entry in graph.signature_def if entry.key == key]
            del graph.signature_def[:]
            graph.signature_def.extend(kept)
        content: bytes = served.SerializeToString()
        return content


def read_saved_model(folder: Path) -> SavedModel:
    """Read the signatures of a SavedModel; blocking.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    file = folder / GRAPH_FILE
    try:
        return SavedModel(_MESSAGE.FromString(read_regular_bytes(file, max_bytes=None)))
    except (OSError, DecodeError) as error:
        raise ConfigError([Problem(f"the SavedModel cannot be read: {text_of(error)}", file=str(file))]) from error


def choose_signature(signatures: Mapping[str, SavedModelSignature], wanted: str | None) -> str:
    """Return the requested signature key, else the only key, else ``predict``; ConfigError if ambiguous."""
    known = ", ".join(sorted(signatures)) or "none"
    if wanted is not None:
        if wanted in signatures:
            return wanted
        raise _no_signature(f"the SavedModel has no signature {wanted!r}", known)
    if len(signatures) == 1:
        return next(iter(signatures))
    if _PREDICT in signatures:
        return _PREDICT
    message = "the SavedModel has several signatures" if signatures else "the SavedModel has no signatures"
    raise _no_signature(message, known)


def _no_signature(message: str, known: str) -> ConfigError:
    suggestion = "set 'signature_key' in the configuration"
    return ConfigError([Problem(message, expected=f"one of: {known}", suggestion=suggestion)])


def _tensors(entries: Any) -> dict[str, SavedModelTensor]:
    return {entry.key: _tensor(entry.value) for entry in entries}


def _tensor(info: Any) -> SavedModelTensor:
    shape = info.tensor_shape
    sizes = None if shape.unknown_rank else tuple(int(dim.size) for dim in shape.dim)
    return SavedModelTensor(info.name, int(info.dtype), sizes)


# Inference
