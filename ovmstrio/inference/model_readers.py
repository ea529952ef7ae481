"""Readers of model files in every format that OpenVINO supports, with checks of ONNX external data and Paddle fixes."""

from __future__ import annotations

import glob
import mmap
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op
import structlog
from openvino.frontend import FrontEndManager, NodeContext
from openvino.frontend.paddle import ConversionExtension

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.encoding.protobuf_wire import wire_fields
from ovmstrio.inference.runtime import OPENVINO_ERRORS, core, openvino_error_message
from ovmstrio.serving.model_versions import companion_file
from ovmstrio.util.regular_files import check_regular, open_regular, read_regular_bytes
from ovmstrio.util.truncation import cut

# ----------------------------------------------------------------------
# ONNX external data
# ----------------------------------------------------------------------

_ONNX_SUFFIX: Final = ".onnx"
_KEY: Final = b"location"  # A file without this key has no external data
_EXPECTED: Final = "a relative path below the folder"
_PIECE_BYTES: Final = 2**20
_IN_MEMORY: Final = "_ORT_MEM_ADDR_"
_MAX_DEPTH: Final = 100
_MAX_FIELDS: Final = 10_000_000

# Messages of onnx.proto, with the fields that lead to tensors (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _FUNCTION, _TRAINING, _SPARSE, _TENSOR = range(8)
_CHILDREN: Final[Mapping[int, Mapping[int, int]]] = {
    _MODEL: {7: _GRAPH, 20: _TRAINING, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _TRAINING: {1: _GRAPH, 2: _GRAPH},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
}
_TENSOR_NAME: Final = 8
_TENSOR_EXTERNAL_DATA: Final = 13
_TENSOR_DATA_LOCATION: Final = 14
_ENTRY_KEY: Final = 1
_ENTRY_VALUE: Final = 2
_EXTERNAL: Final = 1


@dataclass(frozen=True, slots=True)
class _ExternalTensor:
    """A tensor's name and its ``external_data`` entries, which have no effect unless ``is_external``."""

    name: str
    entries: tuple[tuple[str, str], ...]
    is_external: bool

    def values(self, key: str) -> list[str]:
        return [value for found, value in self.entries if found == key]


def check_external_data(file: Path) -> bool:
    """Check that the external data of an ONNX model is complete and in the model's folder; return whether there is any.

    Files of other formats pass. The content decides the format, as in OpenVINO, not the suffix. Blocks.

    Raises:
        ConfigError: a location leads out of the folder or to no regular file, a tensor's file is too short, or a
            ``.onnx`` file cannot be parsed.
        OSError: the file cannot be read.
    """
    tensors = _external_tensors(file)
    folder = file.parent
    problems = [problem for tensor in tensors for problem in _problems_of(tensor, folder)]
    if problems:
        raise ConfigError([replace(problem, file=str(file)) for problem in problems])
    return bool(tensors)


def _external_tensors(file: Path) -> list[_ExternalTensor]:
    with open_regular(file) as opened:
        if not _has_key(opened):
            return []
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            return _parsed(view, file)


def _has_key(opened: BinaryIO) -> bool:
    """Search a file for the key in pieces, because a search holds the GIL."""
    rest = b""
    while piece := opened.read(_PIECE_BYTES):
        if _KEY in rest + piece:
            return True
        rest = piece[-len(_KEY) :]
    return False


def _parsed(view: memoryview, file: Path) -> list[_ExternalTensor]:
    try:
        return list(_walk(view))
    except ValueError as error:
        reason = str(error)
    # Raised outside the handler: the first error's traceback holds views that prevent closing the file.
    if file.suffix.lower() == _ONNX_SUFFIX:
        raise ConfigError([Problem(f"the file is not an ONNX model: {reason}", str(file))])
    return []


def _walk(model: memoryview) -> Iterator[_ExternalTensor]:
    waiting = [(_MODEL, model, 0)]
    count = 0
    while waiting:
        kind, message, depth = waiting.pop()
        if kind == _TENSOR:
            tensor = _read_tensor(message)
            if tensor.entries:
                yield tensor
            continue
        if depth > _MAX_DEPTH:
            raise ValueError("messages are nested too deeply")
        children = _CHILDREN[kind]
        for field in wire_fields(message):
            count += 1
            if count > _MAX_FIELDS:
                raise ValueError(f"more than {_MAX_FIELDS} fields")
            child = children.get(field.number)
            if child is not None and isinstance(field.value, memoryview):
                waiting.append((child, field.value, depth + 1))


def _read_tensor(message: memoryview) -> _ExternalTensor:
    name, entries, is_external = "", [], False
    for field in wire_fields(message):
        if field.number == _TENSOR_DATA_LOCATION and isinstance(field.value, int):
            is_external = field.value == _EXTERNAL
        elif not isinstance(field.value, memoryview):
            continue
        elif field.number == _TENSOR_NAME:
            name = bytes(field.value[:_MAX_DEPTH]).decode(errors="replace")
        elif field.number == _TENSOR_EXTERNAL_DATA:
            entries.append(_read_entry(field.value))
    return _ExternalTensor(name, tuple(entries), is_external)


def _read_entry(message: memoryview) -> tuple[str, str]:
    texts = {_ENTRY_KEY: "", _ENTRY_VALUE: ""}
    for field in wire_fields(message):
        if field.number in texts and isinstance(field.value, memoryview):
            texts[field.number] = bytes(field.value).decode("utf-8", "surrogateescape")
    return texts[_ENTRY_KEY], texts[_ENTRY_VALUE]


def _problems_of(tensor: _ExternalTensor, folder: Path) -> Iterator[Problem]:
    subject = f'external data of tensor "{cut(tensor.name, 80)}"'
    locations = tensor.values("location")
    if tensor.is_external and not locations:
        yield Problem(f"{subject}: the location is missing", expected="a file in the model's folder")
    for location in locations:
        found = cut(location.encode("utf-8", "backslashreplace").decode(), 80)
        if not _is_inside(location, folder):
            yield Problem(f"{subject} is outside of the model's folder", expected=_EXPECTED, found=repr(found))
        elif tensor.is_external:
            try:
                check_regular(folder / location)
                size = (folder / location).stat().st_size
            except OSError as error:
                yield Problem(f"{subject}: {found} cannot be read: {error.strerror}")
                continue
            begin, length = _number(tensor, "offset"), _number(tensor, "length")
            if begin is None or length is None:
                others = (f"{key} {value!r}" for key, value in tensor.entries if key != "location")
                entries = cut(", ".join(others), 80)
                yield Problem(f"{subject}: invalid extent", expected="offset and length in bytes", found=entries)
            elif begin + length > size:
                yield Problem(
                    f"{subject}: {found} is too short", expected=f"{begin + length} bytes", found=f"{size} bytes"
                )


def _is_inside(location: str, folder: Path) -> bool:
    """Return whether a location is a plain relative path below a folder, after following links."""
    parts = location.split("/")
    if set(parts) & {"", ".."} or set(location) & {"\0", "\\"} or _IN_MEMORY in location or ":" in parts[0]:
        return False
    try:
        location.encode()
        return (folder / location).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def _number(tensor: _ExternalTensor, key: str) -> int | None:
    """Return the value of a key (default 0); None if it is not a number of bytes."""
    values = tensor.values(key) or ["0"]
    if any(not value.isascii() or not value.isdecimal() or len(value) > len(str(2**63)) for value in values):
        return None
    return max(map(int, values))


# ----------------------------------------------------------------------
# Paddle program files
# ----------------------------------------------------------------------

_BLOCKS: Final = 1
_VERSION: Final = 4
_VERSION_NUMBER: Final = 1
_BLOCK_VARIABLES: Final = 3
_VARIABLE_NAME: Final = 1
_BLOCK_OPERATIONS: Final = 4
_OPERATION_TYPE: Final = 3

_FIRST_READABLE: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class PaddleProgram:
    """Paddle program: version of Paddle that wrote it (1007000 is 1.7.0; 0 if unknown) and its operations."""

    content: bytes
    version: int
    operations: frozenset[str]

    def readable(self) -> bytes:
        """Return the file in a form that OpenVINO accepts: without the version field if that is old."""
        if self.version >= _FIRST_READABLE:
            return self.content
        return b"".join(field.extent for field in wire_fields(self.content) if field.number != _VERSION)


def message_fields(data: bytes, number: int) -> Iterator[bytes]:
    """Yield each value of a string or message field; ValueError if ``data`` is not a message."""
    for field in wire_fields(data):
        if field.number == number and isinstance(field.value, memoryview):
            yield bytes(field.value)


def paddle_variable_names(data: bytes) -> Iterator[str]:
    """Yield the names of a program's variables; ValueError if ``data`` is not a program."""
    for block in message_fields(data, _BLOCKS):
        for variable in message_fields(block, _BLOCK_VARIABLES):
            yield from (name.decode() for name in message_fields(variable, _VARIABLE_NAME))


def parse_paddle_program(content: bytes) -> PaddleProgram:
    """Parse a program file; ValueError if the content is not a program."""
    version = 0
    for message in message_fields(content, _VERSION):
        numbers = (field.value for field in wire_fields(message) if field.number == _VERSION_NUMBER)
        version = next((value for value in numbers if isinstance(value, int)), 0)
    operations = frozenset(
        kind.decode()
        for block in message_fields(content, _BLOCKS)
        for operation in message_fields(block, _BLOCK_OPERATIONS)
        for kind in message_fields(operation, _OPERATION_TYPE)
    )
    if not operations:
        raise ValueError("it has no operations")
    return PaddleProgram(content, version, operations)


# ----------------------------------------------------------------------
# Paddle models
# ----------------------------------------------------------------------

# Prefixes of operations on LoD tensors (batches of variable-length sequences), which OpenVINO lacks.
_LOD_OPERATIONS: Final = ("sequence_", "lod_", "im2sequence", "gru", "lstm")


def read_paddle(source: Path) -> ov.Model:
    """Read a Paddle model from a folder (any of three layouts) or program file; raise ConfigError if that fails."""
    files = find_paddle_files(source)
    program = load_paddle_program(files)
    frontend = FrontEndManager().load_by_framework("paddle")
    frontend.add_extension(ConversionExtension("mul", _mul))
    try:
        with openvino_readable_files(files, program) as given:
            return frontend.convert(frontend.load(str(given)))
    except ConfigError:
        raise
    except OPENVINO_ERRORS as error:
        raise ConfigError([_cannot_convert(files.program, program, error)]) from error


def _cannot_convert(file: Path, program: PaddleProgram, error: BaseException) -> Problem:
    on_sequences = sorted(kind for kind in program.operations if kind.startswith(_LOD_OPERATIONS))
    if on_sequences:
        message = f"OpenVINO has no operations on LoD tensors, and the model uses {', '.join(on_sequences)}"
        return Problem(message, file=str(file), suggestion="export a model that takes padded batches instead")
    return Problem(f"OpenVINO cannot convert the model: {openvino_error_message(error)}", file=str(file))


def _mul(node: NodeContext) -> dict[str, list[ov.Output]]:
    """Convert ``mul``, Paddle's product of inputs flattened to matrices at an axis given by an attribute."""
    left, right = node.get_input("X"), node.get_input("Y")
    left_rows, right_rows = (int(node.get_attribute(f"{side}_num_col_dims", 1)) for side in "xy")
    product = op.matmul(_matrix(left, left_rows), _matrix(right, right_rows), False, False)
    if _is_matrix(left, left_rows) and _is_matrix(right, right_rows):
        return {"Out": [product.output(0)]}
    shape = op.concat([_sizes(left, 0, left_rows), _sizes(right, right_rows, None)], 0)
    return {"Out": [op.reshape(product, shape, special_zero=False).output(0)]}


def _is_matrix(value: ov.Output, rows: int) -> bool:
    shape = value.get_partial_shape()
    return bool(shape.rank.is_static) and (len(shape), rows) == (2, 1)


def _sizes(value: ov.Output, start: int, end: int | None) -> ov.Node:
    last = np.iinfo(np.int64).max if end is None else end
    numbers = (np.array([number], np.int64) for number in (start, last, 1, 0))
    return op.slice(op.shape_of(value, "i64"), *numbers)


def _matrix(value: ov.Output, rows: int) -> ov.Output:
    if _is_matrix(value, rows):
        return value
    joined = [op.reduce_prod(_sizes(value, *span), np.array([0]), keep_dims=True) for span in ((0, rows), (rows, None))]
    return op.reshape(value, op.concat(joined, 0), special_zero=False).output(0)


PADDLE_PROGRAM: Final = "__model__"
_PARAMETERS: Final = "__params__"
_PADDLE_SUFFIX: Final = ".pdmodel"


@dataclass(frozen=True, slots=True)
class PaddleFiles:
    """Program and parameter file of a model; without the latter, each parameter has a file in the program's folder."""

    program: Path
    parameters: Path | None


def _error(folder: Path, message: str, suggestion: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=str(folder), suggestion=suggestion)])


def find_paddle_files(source: Path) -> PaddleFiles:
    """Find the files of a ``*.pdmodel``, or of the first one in a folder; raise ConfigError if some are missing."""
    if source.suffix.lower() == _PADDLE_SUFFIX and source.is_file():
        return _with_parameters(source)
    folder = source.parent if source.name == PADDLE_PROGRAM and source.is_file() else source
    if not folder.is_dir():
        raise _error(folder, "no such folder", "model_config is a folder with serving_server_conf.prototxt")
    for program in sorted(folder.glob(f"*{_PADDLE_SUFFIX}")):
        return _with_parameters(program)
    program = folder / PADDLE_PROGRAM
    if program.is_file():
        together = folder / _PARAMETERS
        return PaddleFiles(program, together if together.is_file() else None)
    if list(folder.glob("*.json")) and list(folder.glob("*.pdiparams")):
        hint = "export the model with FLAGS_enable_pir_api=0, which writes a .pdmodel"
        raise _error(folder, "the model is in the format of Paddle 3, which OpenVINO cannot read", hint)
    raise _error(folder, "the folder has no *.pdmodel with *.pdiparams, and no __model__")


def _with_parameters(program: Path) -> PaddleFiles:
    parameters = companion_file(program, ".pdiparams")
    if parameters is None:
        raise _error(program.parent, f"{program.name} has no parameter file {program.stem}.pdiparams")
    return PaddleFiles(program, parameters)


def load_paddle_program(files: PaddleFiles) -> PaddleProgram:
    """Read the program of a model; raise ConfigError if the file cannot be read, or is not a program."""
    try:
        return parse_paddle_program(read_regular_bytes(files.program, max_bytes=None))
    except OSError as error:
        raise _error(files.program, f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # includes names that are not UTF-8
        raise _error(files.program, f"not a Paddle program: {error}", "is it encrypted, or incomplete?") from error


def _check_names(file: Path, program: PaddleProgram) -> None:
    """Reject parameter names that lead out of the folder: OpenVINO uses the names as paths."""
    try:
        names = list(paddle_variable_names(program.content))
    except ValueError as error:
        raise _error(file, f"not a Paddle program: {error}") from None
    for name in names:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name or "\\" in name:
            raise _error(file, f"the parameter {cut(name, 80)!r} is outside of the model's folder")


@contextmanager
def openvino_readable_files(files: PaddleFiles, program: PaddleProgram) -> Iterator[Path]:
    """Provide a temporary file or folder that OpenVINO's Paddle frontend can load."""
    if files.parameters is None:
        _check_names(files.program, program)
    with tempfile.TemporaryDirectory(prefix="paddle-") as scratch:
        folder = Path(scratch)
        if files.parameters is not None:
            given = folder / "model.pdmodel"
            (folder / "model.pdiparams").symlink_to(files.parameters.resolve())
            given.write_bytes(program.readable())
        else:
            given = folder
            for parameter in files.program.parent.iterdir():
                if parameter.is_file() and parameter.name != PADDLE_PROGRAM:
                    (folder / parameter.name).symlink_to(parameter.resolve())
            (folder / PADDLE_PROGRAM).write_bytes(program.readable())
        yield given


# ----------------------------------------------------------------------
# Models of any format
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_ONNX: Final = ".onnx"
_PADDLE: Final = ".pdmodel"


def read_model(file: Path) -> ov.Model:
    """Read a model of any framework; raise ConfigError with OpenVINO's reason if that fails. Blocks."""
    if file.suffix.lower() == _PADDLE:
        return read_paddle(file)
    check_model_files(file)
    try:
        with _recognizable_name(file) as named:
            return core().read_model(named)
    except OPENVINO_ERRORS as error:
        model = read_onnx_content(file)
        if model is not None:
            return model
        problem = Problem(f"OpenVINO cannot read the model: {openvino_error_message(error)}", file=str(file))
        raise ConfigError([problem]) from error


@contextmanager
def _recognizable_name(file: Path) -> Iterator[Path]:
    """Provide the file with a suffix in lower case: OpenVINO recognizes most formats by it, and only then."""
    suffix = file.suffix.lower()
    if suffix in {file.suffix, _ONNX} or file.is_dir():
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="model-") as scratch:
        for source in {file, *file.parent.glob(f"{glob.escape(file.stem)}.[bB][iI][nN]")}:
            (Path(scratch) / f"model{source.suffix.lower()}").symlink_to(source.resolve())
        yield Path(scratch) / f"model{suffix}"


def check_model_files(file: Path) -> bool:
    """Check that a model's file is regular and its external data valid; return whether it has external data. Blocks."""
    try:
        return not file.is_dir() and check_external_data(file)
    except OSError as error:
        raise ConfigError([Problem(f"the file cannot be read: {error.strerror}", file=str(file))]) from None


def read_onnx_content(file: Path) -> ov.Model | None:
    """Read an ONNX file by its content after reading by path has failed; None if this fails too.

    OpenVINO 2026.4 fails to read attributes of subgraphs by path ("get_attribute is not implemented for this FrontEnd
    class"), but converts the same bytes. A model with external data is read by path only: from bytes, OpenVINO would
    look for the data in the working directory.
    """
    if file.suffix.lower() != _ONNX or check_model_files(file):
        return None
    try:
        model = core().read_model(read_regular_bytes(file, max_bytes=None))
    except (*OPENVINO_ERRORS, OSError):
        return None
    log.info("model read by content after reading by path failed", path=str(file))
    return model
