"""Model configuration ``serving_server_conf.prototxt``: aliases, types and shapes, and checks of feeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import BYTES, Array, TensorSpec
from ovmstrio.ops.predictor.protocol import Feed, FeedMismatch, FeedTypeError
from ovmstrio.util.regular_files import read_regular_text

CONFIG_FILE: Final = "serving_server_conf.prototxt"

_PACKAGE: Final = "paddle_model"
_TYPES: Final = dict(enumerate(("i8", "f4", "i4", "f8", "i2", "f2", "u2", "u1", "i1", "?", "c8", "c16"))) | {20: "O"}
"""Numpy type by Paddle Serving's element type number; bfloat16 travels as its bits, 20 is string."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Input or output of a model: ``kind`` is Paddle Serving's element type, ``shape`` that of a sample.

    ``lod`` marks samples of different lengths.
    """

    name: str
    alias: str
    lod: bool
    kind: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy dtype."""
        return np.dtype(_TYPES[self.kind])

    def __str__(self) -> str:
        return f"{'str' if self.dtype.hasobject else self.dtype} [{','.join(map(str, ('batch', *self.shape)))}]"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Inputs and outputs in file order."""

    feeds: tuple[Variable, ...]
    fetches: tuple[Variable, ...]


def _variable(message: str, type_field: str) -> Any:
    optional, repeated = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.LABEL_REPEATED
    columns = (
        ("name", FieldDescriptorProto.TYPE_STRING, optional),
        ("alias_name", FieldDescriptorProto.TYPE_STRING, optional),
        ("is_lod_tensor", FieldDescriptorProto.TYPE_BOOL, optional),
        (type_field, FieldDescriptorProto.TYPE_INT32, optional),
        ("shape", FieldDescriptorProto.TYPE_INT32, repeated),
    )
    return {
        "name": message,
        "field": [
            {"name": name, "number": number, "type": kind, "label": label}
            for number, (name, kind, label) in enumerate(columns, 1)
        ],
    }


@cache
def _message_class() -> Any:
    file = FileDescriptorProto(name="model_config", package=_PACKAGE, syntax="proto2")
    fields: list[Any] = []
    for number, (field, message, type_field) in enumerate(
        (("feed_var", "FeedVar", "feed_type"), ("fetch_var", "FetchVar", "fetch_type")), 1
    ):
        file.message_type.add(**_variable(message, type_field))
        fields.append(
            {
                "name": field,
                "number": number,
                "type": FieldDescriptorProto.TYPE_MESSAGE,
                "label": FieldDescriptorProto.LABEL_REPEATED,
                "type_name": f".{_PACKAGE}.{message}",
            }
        )
    file.message_type.add(name="GeneralModelConfig", field=fields)
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.GeneralModelConfig"))


def read_model_config(path: Path) -> ModelConfig:
    """Read the configuration file, or the one of the usual name in a folder; ConfigError lists all problems."""
    if not path.exists():
        hint = "set the folder or the file; relative paths start at the current folder"
        expected, variables = f"a folder with {CONFIG_FILE}", str(path.absolute())
        raise ConfigError([Problem("no such file or folder", expected=expected, found=variables, suggestion=hint)])
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        message = text_format.Parse(read_regular_text(file), _message_class()(), allow_unknown_field=True)
    except FileNotFoundError as error:
        hint = "create it with paddle_serving_client.convert, or by hand with one feed_var or fetch_var per tensor"
        raise ConfigError([Problem(f"{file.name} is missing", file=str(path), suggestion=hint)]) from error
    except OSError as error:
        raise ConfigError([Problem(f"cannot be read: {error.strerror}", file=str(file))]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("is not UTF-8 text", file=str(file))]) from error
    except text_format.ParseError as error:
        problem = Problem(f"invalid model configuration: {error}", file=str(file), line=error.GetLine())
        raise ConfigError([problem]) from error
    return _checked(message, str(file))


def _checked(message: Any, file: str) -> ModelConfig:
    problems: list[Problem] = []
    sides = {}
    for side in ("feed", "fetch"):
        variables = [_read(each, getattr(each, f"{side}_type")) for each in getattr(message, f"{side}_var")]
        aliases = [variable.alias for variable in variables]
        if not variables:
            problems.append(Problem(f"no {side}_var", file=file, suggestion="list the inputs and outputs of the model"))
        repeated = sorted({alias for alias in aliases if aliases.count(alias) > 1})
        problems.extend(Problem(f"two {side}_var are called {alias!r}", file=file) for alias in repeated)
        problems.extend(_problems(variables, side, file))
        sides[side] = tuple(variables)
    if problems:
        raise ConfigError(problems)
    return ModelConfig(sides["feed"], sides["fetch"])


def _read(message: Any, kind: int) -> Variable:
    alias = message.alias_name or message.name
    return Variable(message.name, alias, message.is_lod_tensor, kind, tuple(message.shape))


def _problems(variables: list[Variable], side: str, file: str) -> list[Problem]:
    known = ", ".join(map(str, _TYPES))
    unknown = [
        Problem(
            "unknown element type", file=file, path=f"{each.alias}.{side}_type", expected=known, found=str(each.kind)
        )
        for each in variables
        if each.kind not in _TYPES
    ]
    return unknown + [Problem(f"a {side}_var has no name", file=file) for each in variables if not each.alias]


_LOD: Final = "lod"


def check_types(feed: Feed) -> None:
    """Raise FeedTypeError for values that are neither arrays nor lists of ``str``."""
    wrong = [f"{name!r} is {_type_name(value)}" for name, value in feed.items() if not _is_value(value)]
    if wrong:
        raise FeedTypeError(f"feed values must be numpy.ndarray or list[str], but {', '.join(wrong)}")


def _is_value(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _type_name(value: Any) -> str:
    inner = f"[{type(value[0]).__name__}]" if isinstance(value, list) and value else ""
    return f"{type(value).__name__}{inner}"


def check_names(feed: Feed, expected: Mapping[str, object]) -> None:
    """Raise FeedMismatch if names do not match the model; keys that contain ``lod`` are ignored.

    ``expected`` maps input names to their descriptions in messages.
    """
    names = {name for name in feed if _LOD not in name}
    differences = (("missing", expected.keys() - names), ("unknown", names - expected.keys()))
    problems = [f"{title} {sorted(which)}" for title, which in differences if which]
    if problems:
        raise FeedMismatch(
            f"feed names do not match the model: {'; '.join(problems)}. {_expected_and_given(feed, expected)}"
        )


def _expected_and_given(feed: Feed, expected: Mapping[str, object]) -> str:
    given = ", ".join(f"{name}: {_describe(value)}" for name, value in feed.items()) or "nothing"
    return f"Expected {', '.join(f'{name}: {what}' for name, what in expected.items())}; given {given}"


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} [{','.join(map(str, value.shape))}]"
    return f"{_type_name(value)} of {len(value)}" if isinstance(value, list) else _type_name(value)


def check_fetch(fetch: Iterable[str], known: Sequence[str]) -> None:
    """Raise FeedMismatch for unknown output names."""
    unknown = sorted(set(fetch) - set(known))
    if unknown:
        raise FeedMismatch(f"fetch names do not match the model: unknown {unknown}. Outputs are {list(known)}")


def check(feed: Feed, expected: Sequence[TensorSpec], *, batch: bool) -> None:
    """Raise FeedMismatch or FeedTypeError for feeds that :func:`prepare` rejects without a look at their elements."""
    known = {spec.name: spec for spec in expected}
    check_names(feed, known)
    check_types({name: feed[name] for name in known})
    texts = [spec.name for spec in expected if isinstance(feed[spec.name], list) and spec.datatype is not BYTES]
    if texts:
        raise FeedTypeError(f"feed has strings for numeric inputs. {_expected_and_given(feed, known)}")
    before = () if batch else (1,)
    if not all(_fits((*before, *np.shape(feed[spec.name])), spec) for spec in expected):
        without_batch_axis = [
            spec.name for spec in expected if len(before) + np.ndim(feed[spec.name]) + 1 == len(spec.shape)
        ]
        hint = f". Is the batch axis of {', '.join(without_batch_axis)} missing?" if without_batch_axis else ""
        raise FeedMismatch(f"feed shapes do not match the model. {_expected_and_given(feed, known)}{hint}")


def prepare(feed: Feed, expected: Sequence[TensorSpec], *, batch: bool) -> list[Array]:
    """Return the arrays in the order of ``expected``, cast to its types; raises FeedMismatch or FeedTypeError.

    Without ``batch`` an axis of size 1 is prepended.
    """
    check(feed, expected, batch=batch)
    arrays = [_cast(feed[spec.name], spec) for spec in expected]
    return arrays if batch else [array[np.newaxis] for array in arrays]


def _cast(value: Array | list[str], spec: TensorSpec) -> Array:
    if spec.datatype is BYTES:
        flat = [each.encode() if isinstance(each, str) else each for each in np.asarray(value, object).flat]
        strings = np.empty(len(flat), object)
        strings[:] = flat
        return strings.reshape(np.shape(value))
    try:
        return np.ascontiguousarray(value, spec.datatype.numpy).reshape(np.shape(value))
    except (TypeError, ValueError) as error:
        raise FeedTypeError(f"{spec.name!r} is {_describe(value)} and cannot be cast to {spec}: {error}") from error


def _fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    return len(shape) == len(spec.shape) and all(dim.accepts(size) for dim, size in zip(spec.shape, shape, strict=True))
