"""Imports that libraries can do without: skipped in the server's programs, which start faster.

``structlog`` imports all of ``rich`` to show tracebacks, which the server renders itself. ``openvino`` imports its
model conversion, which is imported at its first use instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

_OPTIONAL: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "structlog.dev": {"rich": (), "colorama": (), "better_exceptions": ()},
    "structlog.tracebacks": {"rich": ()},
    "openvino": {"openvino.tools.ovc": ("convert_model",)},
}
"""Optional imports of modules, each with the names that are imported at their first use."""


class _Finder:
    """Finder of modules whose optional imports are skipped."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self.names else None
        if spec is not None and spec.loader is not None:
            execute = partial(_execute, spec.loader.exec_module, _OPTIONAL[name])
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


_finder: Final = _Finder()


def skip_optional_imports(names: Iterable[str]) -> None:
    """Skip the optional imports of modules that are imported later: ``structlog`` or ``openvino``."""
    _finder.names.update(name for name in _OPTIONAL if name.partition(".")[0] in names)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _execute(
    execute: Callable[[ModuleType], None], optional: Mapping[str, tuple[str, ...]], module: ModuleType
) -> None:
    """Execute a module; an import of a name whose module is None fails like one that is not installed."""
    known = {name: sys.modules[name] for name in optional if name in sys.modules}
    sys.modules.update(dict.fromkeys(optional))  # type: ignore[arg-type]
    try:
        execute(module)
    finally:
        for name in optional:
            del sys.modules[name]
        sys.modules.update(known)
    homes = {name: home for home, names in optional.items() for name in names}
    if homes:
        vars(module)["__getattr__"] = partial(_import_name, module, homes)


def _import_name(module: ModuleType, homes: Mapping[str, str], name: str) -> Any:
    if name not in homes:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    value = getattr(import_module(homes[name]), name)
    setattr(module, name, value)
    return value
