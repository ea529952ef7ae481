"""Model repository: version directories on disk, version policies, and the model file of a version.

::

    <base_path>/<version>/<files>       the usual form
    <base_path>/<files>                 no versions: version 1, or N if the folder is named N
    <base_path> = model.onnx            a single file, served as version 1

All functions block on the file system; the event loop must call them in a worker thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from ovmstrio.config.specs import VersionPolicy
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.regular_files import find_irregular

log = structlog.get_logger(__name__)

ONLY_VERSION: Final = 1
"""Version of services without versions."""

_LEADING_INTEGER: Final = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
"""The prefix that C's ``stoll`` reads, so that ``1abc`` is version 1, as in OVMS."""

_MAX_VERSION: Final = 2**63 - 1

MODEL_SUFFIXES: Final = ((".xml", ".bin"), (".onnx", ""), (".pdmodel", ".pdiparams"), (".pb", ""), (".tflite", ""))
"""Suffix of a model file and of its weights file; the first match wins."""

EXPECTED_MODEL: Final = "model.xml with model.bin, .onnx, .pdmodel with .pdiparams, .pb or .tflite"


@dataclass(frozen=True, slots=True)
class Listing:
    """The versions below a base path, ascending, with warnings about ignored entries.

    ``fingerprint`` changes with the files; empty for models, which are not reloaded when files change.
    """

    versions: dict[int, Path]
    warnings: tuple[str, ...] = ()
    fingerprint: str = ""


def list_versions(base_path: Path) -> dict[int, Path]:
    """Return the version directories of ``base_path``, ascending; logs warnings. See :func:`scan_versions`."""
    listing = scan_versions(base_path)
    for warning in listing.warnings:
        log.warning("repository entry ignored", base_path=str(base_path), problem=warning)
    return listing.versions


def scan_versions(base_path: Path) -> Listing:
    """List the versions below ``base_path``.

    A base path that is a model file is version 1, with itself as the directory. A folder without versions that has a
    model file is version 1 as well, or version N if the folder's name is the number N.

    Raises:
        ConfigError: the path does not exist, cannot be read, is not a model file, or contains ``..``.
    """
    if ".." in base_path.parts:
        raise _problem("the path leads through '..'", base_path, suggestion="write the path without '..'")
    try:
        if base_path.is_file():
            return Listing({1: find_model_file(base_path)})
        # `scandir` needs no system call per entry, each of which may cost a time slice under the interpreter lock.
        with os.scandir(base_path) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
    except FileNotFoundError:
        raise _problem(
            "the model's path does not exist", base_path, suggestion="create it, or correct base_path"
        ) from None
    except (OSError, ValueError) as error:
        raise _problem(f"the model's path cannot be read: {error}", base_path) from error
    listing = _listing(base_path, names)
    return listing if listing.versions else _unversioned(base_path) or listing


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder without permission
        return False


def _unversioned(base_path: Path) -> Listing | None:
    """Return the only version of a folder that has a model file itself; None if it has none."""
    try:
        find_model_file(base_path)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # the folder was readable before
            raise
        return None
    version = _version_of(base_path.name) if base_path.name.isdecimal() else None
    return Listing({version or ONLY_VERSION: base_path})


def choose_versions(
    policy: VersionPolicy, listed: Iterable[int], broken: Collection[int]
) -> tuple[list[int], frozenset[int]]:
    """Apply a version policy, repeatedly without chosen versions that are broken.

    Returns:
        The versions to serve, ascending, and these together with the broken versions that were chosen.
    """
    candidates = set(listed)
    wanted: set[int] = set()
    while True:
        chosen = policy.select(candidates)
        wanted.update(chosen)
        failing = set(chosen).intersection(broken)
        if not failing:
            return chosen, frozenset(wanted)
        candidates -= failing


def check_regular_files(directory: Path) -> None:
    """Check that a model's folder has no FIFOs, sockets and devices, because reading them may block forever.

    Raises:
        ConfigError: the folder has one, or cannot be read.
    """
    if directory.is_dir():
        try:
            irregular = find_irregular(directory)
        except OSError as error:
            raise _problem(f"the version's directory cannot be read: {error.strerror}", directory) from error
        if irregular is not None:
            raise _problem("not a regular file", irregular[0], expected="a regular file", found=irregular[1])


def find_model_file(directory: Path) -> Path:
    """Return the path for OpenVINO's reader: the model file, or the directory of a TensorFlow SavedModel.

    ``directory`` may be a model file.

    Raises:
        ConfigError: there is no model file, or its weights are missing.
    """
    if directory.is_file():
        return _single_file(directory)
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as error:
        raise _problem(f"the version's directory cannot be read: {error.strerror}", directory) from error
    for suffix, weights in MODEL_SUFFIXES:
        found = [path for path in files if path.suffix.lower() == suffix and _has_weights(path, weights)]
        if found:
            return _choose(directory, found)
    raise _no_model(directory, files)


def _listing(base_path: Path, names: list[str]) -> Listing:
    versions: dict[int, Path] = {}
    warnings: list[str] = []
    # The plain spelling of a number takes precedence over `001` and `1abc`.
    for name in sorted(names, key=lambda name: not name.isdecimal() or name.startswith("0")):
        version = _version_of(name)
        if version is None:
            warnings.append(f'directory "{name}" is not a version: expected a positive integer')
        elif version in versions:
            warnings.append(f'directory "{name}" is version {version}, as is "{versions[version].name}"; ignored')
        else:
            versions[version] = base_path / name
    if not versions:
        warnings.append("no version directory found: expected " + str(base_path / "1"))
    return Listing(dict(sorted(versions.items())), tuple(warnings))


def _version_of(name: str) -> int | None:
    match = _LEADING_INTEGER.match(name)
    # Python refuses to convert thousands of digits; versions have at most nineteen significant ones.
    if match is None or len(match[1]) > len(str(_MAX_VERSION)) * 2:
        return None
    version = int(match[1])
    return version if 0 < version <= _MAX_VERSION else None


def _has_weights(path: Path, weights: str) -> bool:
    return not weights or companion_file(path, weights) is not None


def companion_file(path: Path, suffix: str) -> Path | None:
    """Return the file with the name of a model file and another suffix, in lower or upper case."""
    files = (path.with_suffix(each) for each in (suffix, suffix.upper()))
    return next((file for file in files if file.is_file()), None)


def _choose(directory: Path, found: list[Path]) -> Path:
    saved_model = directory / "saved_model.pb"
    if saved_model in found:
        return directory
    if len(found) > 1:
        others = [path.name for path in found[1:]]
        log.warning("several model files found", directory=str(directory), chosen=found[0].name, ignored=others)
    return found[0]


def _single_file(path: Path) -> Path:
    if path.suffix.lower() == ".pdiparams":
        path = companion_file(path, ".pdmodel") or path.with_suffix(".pdmodel")
    weights = dict(MODEL_SUFFIXES).get(path.suffix.lower())
    if weights is None:
        raise _problem("the file is not a model", path, expected=EXPECTED_MODEL, found=path.name)
    if not path.is_file() or not _has_weights(path, weights):
        raise _no_model(path.parent, [found for found in (path, path.with_suffix(weights)) if found.is_file()])
    return path


def _no_model(directory: Path, files: list[Path]) -> ConfigError:
    found = ", ".join(path.name for path in files[:5]) or "no file"
    if len(files) > len(files[:5]):
        found += ", ..."
    incomplete = [
        f"{path.name} needs {path.with_suffix(weights).name} in the same directory"
        for suffix, weights in MODEL_SUFFIXES
        for path in files
        if path.suffix.lower() == suffix and not _has_weights(path, weights)
    ]
    return _problem("no model found", directory, expected=EXPECTED_MODEL, found=found, suggestion="; ".join(incomplete))


def _problem(message: str, path: Path, *, expected: str = "", found: str = "", suggestion: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=str(path), expected=expected, found=found, suggestion=suggestion)])
