"""Model sources: framework detection for a file or folder, and discovery of several models in a folder."""

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
from ovmstrio.inference.model_readers import PADDLE_PROGRAM
from ovmstrio.util.regular_files import open_regular

TORCH_EXPORT: Final = "PyTorch export"
TORCHSCRIPT: Final = "TorchScript"

_EXPORT_HINT: Final = (
    "load the weights into their module and write torch.export.save(torch.export.export(module, inputs), 'model.pt2')"
)
_EXPORT_ENTRIES: Final = ("archive_format", "serialized_exported_program.json")
_TRACED: Final = "traced_inputs.pkl"


def detect_torch_framework(source: Path) -> str:
    """Return the kind of a PyTorch file by its content; raise ConfigError if it has weights but no program."""
    inner = _entries(source)
    if inner & {*_EXPORT_ENTRIES}:
        return TORCH_EXPORT
    if any(entry.startswith("code/") for entry in inner):
        return TORCHSCRIPT
    message = "has pickled PyTorch objects, such as weights, but no program"
    raise ConfigError([Problem(message, file=str(source), suggestion=_EXPORT_HINT)])


def is_traced(source: Path) -> bool:
    """Return whether a TorchScript file contains the inputs that it was traced with."""
    return _TRACED in _entries(source)


def _entries(source: Path) -> set[str]:
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        message = f"not a PyTorch program file: {error}"
        raise ConfigError([Problem(message, file=str(source), suggestion=_EXPORT_HINT)]) from error
    return {entry.partition("/")[2] for entry in entries} | set(entries)


_FRAMEWORK_BY_SUFFIX: Final = {
    ".xml": "OpenVINO IR",
    ".onnx": "ONNX",
    ".pb": "TensorFlow frozen graph",
    ".tflite": "TensorFlow Lite",
    ".pdmodel": "PaddlePaddle",
}
_TORCH: Final = (".pt2", ".pt")
_SAVED_MODEL: Final = "saved_model.pb"

_HINTS: Final = {
    ".pth": "load the weights in PyTorch and save torch.export.export(module, inputs) as .pt2",
    ".h5": "load it in Keras and write model.export('saved_model')",
    ".keras": "load it in Keras and write model.export('saved_model')",
    ".gguf": "OpenVINO itself does not read GGUF; OpenVINO GenAI does",
    ".bin": "use the .xml in the same folder",
    ".pdiparams": "use the .pdmodel in the same folder",
}
_PARTNERS: Final = {".xml": ".bin", ".pdmodel": ".pdiparams"}
_GENERIC_NAMES: Final = {"model", "inference", "openvino_model", "frozen_inference_graph"}
_HEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Model file or folder, with the name to serve it under."""

    path: Path
    name: str


def conversion_error(source: Path, message: str, suggestion: str = "") -> ConfigError:
    """Return the error of a source that cannot be converted."""
    return ConfigError([Problem(message, file=str(source), suggestion=suggestion)])


def detect_framework(source: Path) -> str:
    """Return the framework of a file (by suffix) or folder (by content); raise ConfigError if it is not supported."""
    if not source.exists():
        raise conversion_error(source, "no such file or folder")
    if source.is_dir():
        if (source / _SAVED_MODEL).is_file():
            return "TensorFlow SavedModel"
        if _is_paddle(source, _names_in(source)):
            return "PaddlePaddle"
        raise conversion_error(source, f"the folder is not a model: it has no {_SAVED_MODEL} and no {PADDLE_PROGRAM}")
    if source.name == PADDLE_PROGRAM:
        return "PaddlePaddle"
    suffix = source.suffix.lower()
    if suffix in _TORCH:
        return detect_torch_framework(source)
    if suffix not in _FRAMEWORK_BY_SUFFIX:
        known = ", ".join([*_FRAMEWORK_BY_SUFFIX, *_TORCH])
        hint = _HINTS.get(suffix, f"known are {known}, and folders of TensorFlow (SavedModel) and Paddle")
        raise conversion_error(source, f"unsupported file type {suffix or '(no suffix)'}", hint)
    partner = source.with_suffix(_PARTNERS.get(suffix, suffix))
    if not partner.is_file():
        raise conversion_error(source, f"the weights {partner.name} are missing")
    return _FRAMEWORK_BY_SUFFIX[suffix]


def find_models(source: Path) -> tuple[ModelSource, ...]:
    """Find the models at a path: the file or folder itself, or all models in the folder, sorted by path.

    A model is named after its file or, for generic names (``inference.pdmodel``), its folder; on conflict, after both.
    Hidden files and folders are skipped.

    Raises:
        ConfigError: there is no model, or two have the same name.
    """
    if not source.is_dir() or _is_model(source, _names_in(source)):
        return (ModelSource(source, _valid_name(source.resolve().stem)),)
    paths = list(_walk(source))
    if not paths:
        known = ", ".join([*_FRAMEWORK_BY_SUFFIX, *_TORCH])
        hint = f"known are {known}, and folders of TensorFlow (SavedModel) and Paddle"
        raise conversion_error(source, "no model found in the folder", hint)
    return tuple(ModelSource(*pair) for pair in zip(paths, _names(source, paths), strict=True))


def _is_paddle(folder: Path, names: Sequence[str]) -> bool:
    """Return whether a folder is a Paddle model other than a ``.pdmodel``; the reader reports incomplete ones."""
    alone = (name for name in names if name.endswith(".pdiparams"))
    return PADDLE_PROGRAM in names or any(not (folder / name).with_suffix(".pdmodel").exists() for name in alone)


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
    with open_regular(file) as opened:  # other XML files are common
        return b"<net" in opened.read(_HEAD_BYTES)


def _names(root: Path, paths: Sequence[Path]) -> list[str]:
    short = [
        _valid_name(
            path.stem if path.is_file() and path.stem.lower() not in _GENERIC_NAMES else _folder_name(root, path)
        )
        for path in paths
    ]
    counts = Counter(short)
    names = [
        name if counts[name] == 1 else _valid_name(f"{path.parent.resolve().name}_{path.stem}")
        for name, path in zip(short, paths, strict=True)
    ]
    problems = []
    for name, count in Counter(names).items():
        if count > 1:
            same = [str(path) for path, other in zip(paths, names, strict=True) if other == name]
            message = f"several models have the name {name!r}: {', '.join(same)}"
            problems.append(Problem(message, file=str(root), suggestion="prepare them one by one, with --name"))
    if problems:
        raise ConfigError(problems)
    return names


def _folder_name(root: Path, path: Path) -> str:
    """Return the name of a model's folder, skipping version folders."""
    folder = path if path.is_dir() else path.parent
    while folder.name.isdigit() and folder != root:
        folder = folder.parent
    return folder.resolve().name


def _valid_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip(".+-") or "model"
