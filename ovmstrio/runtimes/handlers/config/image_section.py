"""The keys that only matter in an image: which Python, which CUDA, what to install."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import structlog

from ovmstrio.config.sections import Rules, Section, any_spelling, flag, rules_of, written
from ovmstrio.runtimes.handlers.config.project_spec import Dependencies, GpuVersion, ImageSpec, ProjectSpec

__all__ = [
    "DEFAULT_PYTHON",
    "IMAGE_KEYS",
    "log_image_only_keys",
    "python_for",
    "read_image",
    "system_for",
    "tensorflow_for",
]

DEFAULT_PYTHON: Final = "3.11"
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(\.\d+)?")
_PYTHONS: Final = ((3, 11), (3, 14))
_FIRST_TENSORFLOW: Final = (2, 12)
"""The first one that there is for a Python of the server's."""
_SYSTEMS: Final = (((11, 7), "22.04"), ((11, 0), "20.04"))
"""Ubuntus by the first CUDA that has an image with them."""


def python_for(version: str) -> str | None:
    """Give the Python of an image, or None if the server does not run on it."""
    numbers = _numbers(version)
    return version if numbers is not None and _PYTHONS[0] <= numbers < _PYTHONS[1] else None


def tensorflow_for(version: str) -> str | None:
    """Give the TensorFlow package of an image, or None if there is none for the server's Pythons."""
    numbers = _numbers(version)
    return version if numbers is not None and numbers >= _FIRST_TENSORFLOW else None


def system_for(cuda: str) -> str | None:
    """Give the Ubuntu of a CUDA image, or None if its C library is too old for OpenVINO."""
    numbers = _numbers(cuda)
    if numbers is None:
        return None
    return next((system for first, system in _SYSTEMS if numbers >= first), None)


def _numbers(version: str) -> tuple[int, int] | None:
    match = _VERSION.fullmatch(version)
    return None if match is None else (int(match[1]), int(match[2]))


IMAGE_KEYS: Final[Rules] = {
    "py_version": written,
    "tfs_version": written,
    "gpu": any_spelling(flag),
    "gpu_version": None,
    "dependencies": None,
    "use_local_cortex_libs": any_spelling(flag),
}
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


def read_image(top: Section, given: Mapping[str, Any]) -> ImageSpec:
    """Note what contradicts the type of the project or each other; ``given`` is what could be read of ``top``."""
    _warn_unfit(top, given)
    if given.get("type") == "python" and "tfs_version" in given:
        top.refuse("tfs_version", "the key is for the type tensorflow", suggestion="remove it")
    dependencies = top.section("dependencies")
    return ImageSpec(
        keys=tuple(key for key in top.members if key in IMAGE_KEYS),
        gpu_version=_gpu_version(top, given.get("type"), gpu=given.get("gpu", False)),
        dependencies=Dependencies(**dependencies.read(rules_of(Dependencies))) if dependencies else Dependencies(),
        **{key: value for key, value in given.items() if key in IMAGE_KEYS},
    )


def _warn_unfit(section: Section, given: Mapping[str, Any]) -> None:
    """Warn of versions that the image cannot have."""
    for key, (fits, consequence) in _FITTING.items():
        if key in given and fits(given[key]) is None:
            section.warn(key, f"the server does not run with {given[key]}", consequence)


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
    values = section.read(rules_of(GpuVersion), required=("cuda", "cudnn"))
    _warn_unfit(section, values)
    return GpuVersion(**values) if {"cuda", "cudnn"} <= values.keys() else None
