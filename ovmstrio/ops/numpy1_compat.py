"""Numpy 1 compatibility: removed names and old number formats, for processes that run one numpy 1 program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from importlib import import_module
from typing import Any, Final

import numpy as np

_LEGACY: Final = "1.25"
_ALIASES: Final[Mapping[str, Any]] = {
    **{kind.__name__: kind for kind in (int, float, complex, object, str)},
    **dict.fromkeys(("NaN", "NAN"), np.nan),
    **dict.fromkeys(("Inf", "Infinity", "infty", "PINF"), np.inf),
    "NINF": -np.inf,
    "float_": np.float64,
    "complex_": np.complex128,
    "string_": np.bytes_,
    "unicode_": np.str_,
    "alltrue": np.all,
    "cumproduct": np.cumprod,
    "product": np.prod,
    "round_": np.round,
    "sometrue": np.any,
}
"""Names removed in numpy 2."""

_from_text: Final[Callable[..., Any]] = np.fromstring


@contextmanager
def numpy1_compat() -> Iterator[None]:
    """Enable numpy 1 compatibility within the block, for all threads."""
    undo = install_numpy1_compat()
    try:
        yield
    finally:
        undo()


def install_numpy1_compat() -> Callable[[], None]:
    """Enable ``fromstring`` on bytes, plain scalar printing and removed names; return a function to undo this."""
    names: dict[str, Any] = vars(np)
    changed = {name: value for name, value in _ALIASES.items() if name not in names}
    before = {"fromstring": names["fromstring"]}
    names.update(changed, fromstring=_fromstring)
    restore_printing = _print_plainly()

    def undo() -> None:
        for name in changed:
            del names[name]
        names.update(before)
        restore_printing()

    return undo


def has_numpy1_compat() -> bool:
    """Return whether numpy 1 compatibility is enabled."""
    return vars(np)["fromstring"] is _fromstring


def _fromstring(string: Any, dtype: Any = float, count: int = -1, *, sep: str = "", like: Any = None) -> Any:
    if sep:
        return _from_text(string, dtype, count, sep=sep, like=like)
    data = string.encode("latin-1") if isinstance(string, str) else string
    return np.frombuffer(data, dtype, count).copy()


def _print_plainly() -> Callable[[], None]:
    """Print scalars without their types; return the function that restores the old format.

    Print options live in the context, and user threads start with a new context, so the default value is changed.
    """
    before = np.get_printoptions()["legacy"]
    try:
        variable = import_module("numpy._core.printoptions").format_options
    except (ImportError, AttributeError):  # older releases have one set of options per process
        np.set_printoptions(legacy=_LEGACY)
        return lambda: np.set_printoptions(legacy=before)
    default_options: dict[str, Any] = Context().run(variable.get)
    with np.printoptions(legacy=_LEGACY):
        changed = variable.get()["legacy"]
    old, default_options["legacy"] = default_options["legacy"], changed
    return lambda: default_options.update(legacy=old)
