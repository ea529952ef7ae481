"""Opening of custom nodes: built-in nodes, Python files and shared libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.pipelines.builtin.builtin_node import BUILTIN_NAMES, builtin_name, open_builtin
from ovmstrio.pipelines.custom_node import CustomNode
from ovmstrio.pipelines.native.isolated_node import open_isolated_node
from ovmstrio.pipelines.native.node import open_native_node
from ovmstrio.pipelines.python_node import open_python_node

_PYTHON: Final = ".py"


async def open_custom_node(
    library: Path,
    name: str,
    params: Mapping[str, str],
    *,
    tasks: trio.Nursery,
    hide_errors: bool = False,
    is_isolated: bool = False,
) -> CustomNode:
    """Open a library for one node of a pipeline; the caller owns the node and closes it.

    Args:
        library: a shared library, a Python file, or the name of a built-in node.
        name: the node's name in its pipeline.
        params: the configured parameters.
        tasks: runs the node's threads or processes; must outlive the node.
        hide_errors: send clients only the type of exceptions of a Python file.
        is_isolated: run a shared library in a worker process.

    Raises:
        ConfigError: the library does not exist, cannot be used, or rejects the parameters.
    """
    builtin = builtin_name(library)
    if builtin is not None:
        return await open_builtin(builtin, name, params)
    problem = _find_problem(library, name)
    if problem is not None:
        raise ConfigError([problem])
    if library.suffix == _PYTHON:
        return await open_python_node(library, name, params, tasks=tasks, hide_errors=hide_errors)
    if is_isolated:
        return await open_isolated_node(library, name, params, nursery=tasks)
    return await open_native_node(library, name, params, tasks=tasks)


def _find_problem(library: Path, name: str) -> Problem | None:
    if library.is_file():
        return None
    found = "it is a folder" if library.is_dir() else "there is no such file"
    return Problem(
        f"the library of custom node {name!r} cannot be opened: {found}",
        file=str(library),
        suggestion=f"use a shared library, a .py file, or a built-in node: {', '.join(BUILTIN_NAMES)}",
    )
