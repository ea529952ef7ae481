"""Triton model repository: model folders, their ``config.pbtxt`` files and version folders.

::

    REPO/NAME/config.pbtxt      may be missing or incomplete
    REPO/NAME/VERSION/FILE      or a folder of that name
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format

from ovmstrio.config.documents import UNUSABLE, Findings, InvalidSyntax, Located
from ovmstrio.config.proto_text import fit_message, parse_proto
from ovmstrio.core.errors import Problem
from ovmstrio.encoding.messages import POOL, message_class
from ovmstrio.util.regular_files import read_regular_text

CONFIG: Final = "config.pbtxt"
ENSEMBLE: Final = "ensemble"
_MESSAGE: Final = "triton.ModelConfig"
_INVALID: Final = "invalid model configuration"

_BACKENDS: Final = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
}
"""Backend of each platform; other platforms are named as their backend."""
_FILES: Final = {
    "model.onnx": "onnxruntime",
    "model.xml": "openvino",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.pt": "pytorch",
    "model.plan": "tensorrt",
    "model.py": "python",
    "model.dali": "dali",
    "model.json": "vllm",
}
"""Backend by the default name of its model file or folder."""


@dataclass(frozen=True)
class TritonModel:
    """One model folder.

    Attributes:
        config: message ``ModelConfig``; empty without a file.
        root: the same with lines, as source texts.
        versions: version folders, ascending.
    """

    folder: Path
    config: Any
    root: Located
    versions: dict[int, Path]

    @property
    def name(self) -> str:
        """Name of the model, that of its folder."""
        return self.folder.name

    @property
    def config_file(self) -> Path:
        """Path of ``config.pbtxt``, which may be missing."""
        return self.folder / CONFIG

    @property
    def backend(self) -> str:
        """Backend, found in the order of Triton's autofill; empty if unknown."""
        if self.config.platform == ENSEMBLE or self.config.HasField("ensemble_scheduling"):
            return ENSEMBLE
        if named := str(self.config.backend or self.config.platform):
            return _BACKENDS.get(named, named)
        for file, backend in _FILES.items():
            if self.config.default_model_filename == file or self._has(file):
                return backend
        suffix = Path(self.config.default_model_filename).suffix
        by_suffix = next((backend for file, backend in _FILES.items() if suffix and file.endswith(suffix)), "")
        return by_suffix or self.name.rpartition(".")[2] * ("." in self.name)

    @property
    def filename(self) -> str:
        """Name of the model file or folder in each version folder."""
        default = str(self.config.default_model_filename)
        if default or self.config.platform == "tensorflow_graphdef":
            return default or "model.graphdef"
        names = [file for file, backend in _FILES.items() if backend == self.backend]
        return next((name for name in names if self._has(name)), names[0] if names else "")

    def _has(self, name: str) -> bool:
        return any((version / name).exists() for version in self.versions.values())

    def line(self, *steps: str | int) -> int | None:
        """Return the line of a value in ``config.pbtxt``."""
        return self.root.find(*steps).line or None


@dataclass(frozen=True)
class TritonRepository:
    """All models of a repository by name, without those whose configuration is invalid, and its problems."""

    models: dict[str, TritonModel]
    problems: tuple[Problem, ...]


def read_repository(path: Path) -> TritonRepository:
    """Read a model repository; blocking.

    Raises:
        OSError: the folder cannot be read.
    """
    models: dict[str, TritonModel] = {}
    problems: list[Problem] = []
    for folder in sorted(path.iterdir()):
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        findings = Findings(str(folder / CONFIG))
        config, root = _read_config(folder, findings)
        problems += findings.all
        if not findings.fatal:
            models[folder.name] = TritonModel(folder, config, root, _versions(folder))
    return TritonRepository(models, tuple(problems))


def _versions(folder: Path) -> dict[int, Path]:
    """Return the version folders; Triton ignores names that begin with 0."""
    names = [each.name for each in folder.iterdir() if each.is_dir() and each.name.isascii() and each.name.isdecimal()]
    return {int(name): folder / name for name in sorted(names, key=int) if not name.startswith("0")}


def _read_config(folder: Path, findings: Findings) -> tuple[Any, Located]:
    empty = message_class(_MESSAGE)()
    at = Located(None, 0)
    try:
        content = read_regular_text(folder / CONFIG)
        fields = parse_proto(content)
    except (FileNotFoundError, NotADirectoryError):
        return empty, Located({})
    except InvalidSyntax as error:
        message = f"{_INVALID} - {error.message}"
        at = Located(None, error.line or 1)
        findings.refuse(at, message, expected=error.expected, found=error.found, suggestion=error.suggestion)
        return empty, at
    except (OSError, ValueError) as error:
        findings.refuse(at, f"the file cannot be read: {error}", expected="a text file in UTF-8")
        return empty, at
    descriptor = POOL.FindMessageTypeByName(_MESSAGE)
    root, text = fit_message(content, fields, descriptor, findings, refusal=_INVALID, options=descriptor)
    if findings.fatal:
        return empty, root
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of unknown escapes, which stay unchanged
            config = text_format.Parse(text, empty, descriptor_pool=POOL)
    except text_format.ParseError as error:
        findings.refuse(Located(None, error.GetLine() or 1), f"{_INVALID} - {error}")
        return empty, root
    if config.name not in {"", folder.name}:
        message = "the name differs from that of the folder"
        findings.refuse(root.find("name"), message, expected=folder.name, found=config.name)
    if config.max_batch_size < 0:
        found = str(config.max_batch_size)
        findings.refuse(root.find("max_batch_size"), UNUSABLE, expected="an integer of 0 or more", found=found)
    return config, root
