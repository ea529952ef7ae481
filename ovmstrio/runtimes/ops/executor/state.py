"""Whether an Op keeps something of a sample on itself, which samples of one batch would take from each other."""

from __future__ import annotations

import dis
import inspect
from typing import Any

from ovmstrio.runtimes.ops.op import Op

__all__ = ["kept_by_preprocess"]


def kept_by_preprocess(op: Op) -> list[str]:
    """Give the names of the attributes that an Op's ``preprocess`` sets, as far as its own code shows."""
    method: Any = inspect.unwrap(type(op).preprocess)
    code = getattr(method, "__code__", None)
    if code is None or not code.co_argcount:
        return []
    owner, names, loaded = code.co_varnames[0], [], ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and loaded == owner:
            names.append(str(instruction.argval))
        loaded = _loaded(instruction)
    return list(dict.fromkeys(names))


def _loaded(instruction: dis.Instruction) -> str:
    """Tell which variable an instruction leaves on top of the stack; empty for none."""
    if "LOAD_FAST" not in instruction.opname:
        return ""
    # One instruction may load or store two of them.
    value = instruction.argval
    return str(value[-1] if isinstance(value, tuple) else value)
