"""Whether an Op may jump: whether every Op that runs because of the jump gets all its inputs, once each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["reach", "unsatisfiable_join"]

_Edges = Mapping[str, tuple[str, ...]]


def reach(names: Iterable[str], edges: _Edges) -> set[str]:
    """Give the names and everything that edges lead to from them."""
    found = list(dict.fromkeys(names))
    for name in found:
        found.extend(one for one in edges.get(name, ()) if one not in found)
    return set(found)


def unsatisfiable_join(jumper: str, targets: Iterable[str], inputs: _Edges, consumers: _Edges) -> str | None:
    """Tell what could go wrong after ``jumper`` has put its output in the place of that of ``targets``.

    An Op that has run before the jump and runs again needs all its inputs again; and none needs what the Ops that are
    jumped over would have made.  An Op that loops beside the one that jumps could run in two rounds at once.
    """
    targets = set(targets)
    before, after = reach([jumper], inputs), reach([jumper], consumers)
    again = reach((one for target in targets for one in consumers[target]), consumers)
    given = again | targets
    for name in inputs:
        if name not in again:
            continue
        missing = [one for one in inputs[name] if one not in given and (name in before or one in after)]
        if missing:
            return f"{name} would never get the output of {', '.join(missing)}"
    beside = [name for name in inputs if name in again and name not in before | after]
    if beside and again & before:
        return f"{', '.join(beside)} would run beside the loop"
    return None
