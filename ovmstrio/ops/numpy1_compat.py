"""What programs for numpy 1 expect of numpy, in processes that are such a program's own and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from importlib import import_module
from typing import Any, Final

import numpy as np

__all__ = ["numpy_one", "speak_numpy_one", "speaks_numpy_one"]

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
"""Names that numpy 2 has no more."""

_from_text: Final[Callable[..., Any]] = np.fromstring


@contextmanager
def numpy_one() -> Iterator[None]:
    """Let numpy be as it was for a while; for all threads of the process."""
    undo = speak_numpy_one()
    try:
        yield
    finally:
        undo()


def speak_numpy_one() -> Callable[[], None]:
    """Let numpy read bytes with ``fromstring``, print scalars as plain numbers and have its old names.

    All threads of the process see it; gives the function that puts everything back.
    """
    names: dict[str, Any] = vars(np)
    changed = {name: value for name, value in _ALIASES.items() if name not in names}
    before = {"fromstring": names["fromstring"]}
    names.update(changed, fromstring=_fromstring)
    put_back = _print_plainly()

    def undo() -> None:
        for name in changed:
            del names[name]
        names.update(before)
        put_back()

    return undo


def speaks_numpy_one() -> bool:
    """Tell whether numpy is as it was, now."""
    return vars(np)["fromstring"] is _fromstring


def _fromstring(string: Any, dtype: Any = float, count: int = -1, *, sep: str = "", like: Any = None) -> Any:
    """Read numbers out of text with separators, or, without any, out of bytes: a copy."""
    if sep:
        return _from_text(string, dtype, count, sep=sep, like=like)
    data = string.encode("latin-1") if isinstance(string, str) else string
    return np.frombuffer(data, dtype, count).copy()


def _print_plainly() -> Callable[[], None]:
    """Print scalars without their types; gives the function that ends it.

    Options of printing are a context's, and threads of user code begin with a context of their own: what is changed is
    what each begins with.
    """
    before = np.get_printoptions()["legacy"]
    try:
        variable = import_module("numpy._core.printoptions").format_options
    except (ImportError, AttributeError):  # one set of options for the process, in older releases
        np.set_printoptions(legacy=_LEGACY)
        return lambda: np.set_printoptions(legacy=before)
    first: dict[str, Any] = Context().run(variable.get)
    with np.printoptions(legacy=_LEGACY):
        changed = variable.get()["legacy"]
    old, first["legacy"] = first["legacy"], changed
    return lambda: first.update(legacy=old)
