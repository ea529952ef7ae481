"""The keys that only matter in an image: which Python, which CUDA, what to install."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import structlog

from ovmstrio.runtimes.handlers.config.image_versions import DEFAULT_PYTHON, python_for, system_for, tensorflow_for
from ovmstrio.runtimes.handlers.config.sections import Section
from ovmstrio.runtimes.handlers.config.specs import Dependencies, GpuVersion, ImageSpec, ProjectSpec

__all__ = ["IMAGE_KEYS", "log_image_only_keys", "read_image"]

IMAGE_KEYS: Final = (
    "py_version",
    "tfs_version",
    "gpu",
    "gpu_version",
    "dependencies",
    "use_local_cortex_libs",
)
_GPU_KEYS: Final = ("cuda", "cudnn", "development_image")
_NO_SERVING: Final = "the server runs SavedModels itself, without TensorFlow Serving"
_EXPLANATIONS: Final = {
    "py_version": "the server's own Python runs the handler",
    "tfs_version": _NO_SERVING,
    "gpu": "the handler finds the devices that this machine has",
    "gpu_version": "the handler finds the CUDA that this machine has",
    "dependencies": "what the handler imports must be installed where the server is",
    "use_local_cortex_libs": "the server that runs is the one that was started",
}
_FITTING: Final = {
    "py_version": (python_for, f"the image gets Python {DEFAULT_PYTHON}; 3.11 to 3.13 can be had"),
    "tfs_version": (
        tensorflow_for,
        "the image gets no TensorFlow unless the requirements name one; 2.12 or newer can be had",
    ),
    "cuda": (system_for, "its images are too old for OpenVINO; write 11.0 or newer"),
}
"""What finds the part of an image that a version asks for, and what happens if there is none."""
log = structlog.get_logger(__name__)


def log_image_only_keys(project: ProjectSpec) -> None:
    """Say for each key of the file that only matters in an image why serving does not follow it."""
    for key in project.image.keys:
        log.info("key is for images only", project=project.name, key=key, reason=_EXPLANATIONS[key])
    if project.tfs_container_dns is not None:
        log.info("key has no effect", project=project.name, key="tfs_container_dns", reason=_NO_SERVING)


def read_image(top: Section, project_type: str | None) -> ImageSpec:
    """Read the keys, and note what contradicts the type of the project or each other."""
    fields: dict[str, Any] = {"keys": tuple(key for key in top.members if key in IMAGE_KEYS)}
    fields |= {key: version for key in _FITTING if (version := _version(top, key)) is not None}
    if project_type == "python" and "tfs_version" in fields:
        top.refuse("tfs_version", "the key is for the type tensorflow", suggestion="remove it")
    fields |= {key: top.flag(key) for key in ("gpu", "use_local_cortex_libs")}
    fields["gpu_version"] = _gpu_version(top, project_type, gpu=fields["gpu"])
    return ImageSpec(dependencies=_dependencies(top), **fields)


def _version(section: Section, key: str) -> str | None:
    """Give a version as it is written, and warn if the image cannot have it."""
    version = section.text(key)
    fits, consequence = _FITTING[key]
    if version is not None and fits(version) is None:
        section.findings.warn(section.node.find(key), f"the server does not run with {version}", consequence)
    return version


def _gpu_version(top: Section, project_type: str | None, *, gpu: bool) -> GpuVersion | None:
    section = top.section("gpu_version")
    if section is None:
        if project_type == "python" and gpu and "gpu_version" not in top.members:
            top.refuse("gpu", "a GPU needs the key 'gpu_version'", suggestion="add it, with 'cuda' and 'cudnn'")
        return None
    if project_type == "tensorflow":
        top.refuse("gpu_version", "the key is for the type python", suggestion="remove it")
    elif not gpu:
        top.refuse("gpu_version", "the key needs 'gpu: true' beside it", suggestion="add it, or remove this")
    section.warn_unknown(_GPU_KEYS, _GPU_KEYS[:2])
    cuda, cudnn = _version(section, "cuda"), section.text("cudnn")
    is_development = section.flag("development_image")
    return GpuVersion(cuda=cuda, cudnn=cudnn, development_image=is_development) if cuda and cudnn else None


def _dependencies(top: Section) -> Dependencies:
    section = top.section("dependencies")
    if section is None:
        return Dependencies()
    keys: Sequence[str] = tuple(Dependencies.model_fields)
    section.warn_unknown(keys)
    given = {key: _relative(section, key) for key in keys}
    return Dependencies(**{key: path for key, path in given.items() if path})


def _relative(section: Section, key: str) -> str | None:
    text = section.text(key)
    if text is not None and (PurePosixPath(text).is_absolute() or ".." in PurePosixPath(text).parts):
        section.refuse(key, "only the project's folder is in the image", expected="a path below the project's folder")
        return None
    return text
