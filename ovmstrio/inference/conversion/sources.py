"""What lies at a path: a model of which framework, or a folder with several, each with a name to serve it under."""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.reading import PROGRAM
from ovmstrio.util.regular_files import open_regular

__all__ = [
    "EXPORT",
    "SCRIPT",
    "FoundModel",
    "find_models",
    "framework_of",
    "refused",
    "torch_framework_of",
    "was_traced",
]

# ----------------------------------------------------------------------
# What PyTorch's files hold, as their tables of contents tell without torch: programs, or weights alone
# ----------------------------------------------------------------------

EXPORT: Final = "PyTorch export"
SCRIPT: Final = "TorchScript"

_WAY_OUT: Final = (
    "load the weights into their module and write torch.export.save(torch.export.export(module, inputs), 'model.pt2')"
)
_MARKS_OF_EXPORTS: Final = ("archive_format", "serialized_exported_program.json")
_TRACED: Final = "traced_inputs.pkl"


def torch_framework_of(source: Path) -> str:
    """Tell whether a file holds a program of ``torch.export`` or TorchScript, whatever its suffix.

    Raises:
        ConfigError: it holds pickled objects, such as weights, that tell no computation, or is no such file.
    """
    inner = _entries(source)
    if inner & {*_MARKS_OF_EXPORTS}:
        return EXPORT
    if any(entry.startswith("code/") for entry in inner):
        return SCRIPT
    message = "holds pickled objects of PyTorch, such as weights, and no program"
    raise ConfigError([Problem(message, file=str(source), suggestion=_WAY_OUT)])


def was_traced(source: Path) -> bool:
    """Tell whether TorchScript was written with the inputs that it was traced with."""
    return _TRACED in _entries(source)


def _entries(source: Path) -> set[str]:
    """Give the names of what is in a file, with the folder that they all lie in and without it.

    Raises:
        ConfigError: it is no archive.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        message = f"is no file that PyTorch writes programs to: {error}"
        raise ConfigError([Problem(message, file=str(source), suggestion=_WAY_OUT)]) from error
    return {entry.partition("/")[2] for entry in entries} | set(entries)


# ----------------------------------------------------------------------
# What lies at a path: a model of which framework, or a folder with several, each with a name to serve it under
# ----------------------------------------------------------------------

_FRAMEWORK_BY_SUFFIX: Final = {
    ".xml": "OpenVINO IR",
    ".onnx": "ONNX",
    ".pb": "TensorFlow frozen graph",
    ".tflite": "TensorFlow Lite",
    ".pdmodel": "PaddlePaddle",
}
_TORCH: Final = (".pt2", ".pt")
_SAVED_MODEL: Final = "saved_model.pb"

_ELSEWHERE: Final = {
    ".pth": "load the weights in PyTorch and save torch.export.export(module, inputs) as .pt2",
    ".h5": "load it in Keras and write model.export('saved_model')",
    ".keras": "load it in Keras and write model.export('saved_model')",
    ".gguf": "OpenVINO itself does not read GGUF; OpenVINO GenAI does",
    ".bin": "give the .xml beside it",
    ".pdiparams": "give the .pdmodel beside it",
}
_PARTNERS: Final = {".xml": ".bin", ".pdmodel": ".pdiparams"}
_SAYS_NOTHING: Final = {"model", "inference", "openvino_model", "frozen_inference_graph"}
_HEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's file or folder, and a name to serve it under."""

    path: Path
    name: str


def refused(source: Path, message: str, suggestion: str = "") -> ConfigError:
    """Make the error of a source that cannot be converted."""
    return ConfigError([Problem(message, file=str(source), suggestion=suggestion)])


def framework_of(source: Path) -> str:
    """Name the framework that wrote ``source``, by its suffix or, for a folder, by what lies in it.

    Raises:
        ConfigError: nothing is there, or nothing that can be read.
    """
    if not source.exists():
        raise refused(source, "no such file or folder")
    if source.is_dir():
        if (source / _SAVED_MODEL).is_file():
            return "TensorFlow SavedModel"
        if _is_paddle(source, _names_in(source)):
            return "PaddlePaddle"
        raise refused(source, f"the folder is no model: it holds no {_SAVED_MODEL} and no {PROGRAM}")
    if source.name == PROGRAM:
        return "PaddlePaddle"
    suffix = source.suffix.lower()
    if suffix in _TORCH:
        return torch_framework_of(source)
    if suffix not in _FRAMEWORK_BY_SUFFIX:
        known = ", ".join([*_FRAMEWORK_BY_SUFFIX, *_TORCH])
        way_out = _ELSEWHERE.get(suffix, f"known are {known}, and folders of TensorFlow (SavedModel) and Paddle")
        raise refused(source, f"files of the kind {suffix or '(no suffix)'} cannot be read", way_out)
    partner = source.with_suffix(_PARTNERS.get(suffix, suffix))
    if not partner.is_file():
        raise refused(source, f"the weights {partner.name} are missing beside it")
    return _FRAMEWORK_BY_SUFFIX[suffix]


def find_models(source: Path) -> tuple[FoundModel, ...]:
    """Find the models at a path: the one that a file or folder is, or all that lie in a folder, by their paths.

    A model is called like its file or, if that says nothing (``inference.pdmodel``), like its folder; where two would
    have one name, like both.  Hidden files and folders are passed over.

    Raises:
        ConfigError: there is none, or two would have one name.
    """
    if not source.is_dir() or _is_model(source, _names_in(source)):
        return (FoundModel(source, _fit(source.resolve().stem)),)
    paths = list(_walk(source))
    if not paths:
        known = ", ".join([*_FRAMEWORK_BY_SUFFIX, *_TORCH])
        way_out = f"known are {known}, and folders of TensorFlow (SavedModel) and Paddle"
        raise refused(source, "no model lies in the folder", way_out)
    return tuple(FoundModel(*pair) for pair in zip(paths, _names(source, paths), strict=True))


def _is_paddle(folder: Path, names: Sequence[str]) -> bool:
    """Tell a folder of Paddle's that is more than a ``.pdmodel``; what cannot be read of them is told by the reader."""
    alone = (name for name in names if name.endswith(".pdiparams"))
    return PROGRAM in names or any(not (folder / name).with_suffix(".pdmodel").exists() for name in alone)


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _is_model(folder: Path, names: Sequence[str]) -> bool:
    return _SAVED_MODEL in names or _is_paddle(folder, names)


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if _is_model(here, files):
            folders.clear()
            yield here
        else:
            yield from (here / name for name in sorted(files) if _is_model_file(here / name))


def _is_model_file(file: Path) -> bool:
    suffix = file.suffix.lower()
    if file.name.startswith(".") or suffix not in {*_FRAMEWORK_BY_SUFFIX, *_TORCH}:
        return False
    if suffix != ".xml":
        return True
    with open_regular(file) as opened:  # there is much other XML
        return b"<net" in opened.read(_HEAD_BYTES)


def _names(root: Path, paths: Sequence[Path]) -> list[str]:
    """Name models found in a folder.

    Raises:
        ConfigError: two would have one name.
    """
    short = [
        _fit(path.stem if path.is_file() and _says_something(path) else _folder_name(root, path)) for path in paths
    ]
    counts = Counter(short)
    names = [
        name if counts[name] == 1 else _fit(f"{path.parent.resolve().name}_{path.stem}")
        for name, path in zip(short, paths, strict=True)
    ]
    problems = []
    for name, count in Counter(names).items():
        if count > 1:
            same = [str(path) for path, other in zip(paths, names, strict=True) if other == name]
            message = f"these would all be called {name!r}: {', '.join(same)}"
            problems.append(Problem(message, file=str(root), suggestion="prepare them one by one, with --name"))
    if problems:
        raise ConfigError(problems)
    return names


def _says_something(path: Path) -> bool:
    return path.is_file() and path.stem.lower() not in _SAYS_NOTHING


def _folder_name(root: Path, path: Path) -> str:
    """Give the name of the folder that a model is or lies in, passing over those of versions."""
    folder = path if path.is_dir() else path.parent
    while folder.name.isdigit() and folder != root:
        folder = folder.parent
    return folder.resolve().name


def _fit(name: str) -> str:
    """Make a name that can be served and be a folder's."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip(".+-") or "model"
