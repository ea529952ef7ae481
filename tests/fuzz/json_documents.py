"""Documents that are nearly right: a valid one, changed in places."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from tests.fuzz.values import NUMBERS, changed_bytes, text


def changed_json(random: Random, document: Any) -> bytes:
    """Change a document, and now and then the bytes that it is written with."""
    changed = changed_document(random, document) if random.random() < 0.85 else document
    written = json.dumps(
        changed, ensure_ascii=random.random() < 0.5, separators=random.choice(((", ", ": "), (",", ":")))
    )
    data = written.encode(errors="surrogatepass")
    return changed_bytes(random, data) if random.random() < 0.2 else data


def changed_document(random: Random, document: Any) -> Any:
    root = [copy.deepcopy(document)]
    for _ in range(random.randint(1, 3)):
        holder, key = random.choice(_places(root))
        _change(random, holder, key)
    return root[0] if root else None


def _places(node: Any) -> list[tuple[Any, Any]]:
    keys: list[Any] = []
    if isinstance(node, dict):
        keys = list(node)
    elif isinstance(node, list):
        keys = list(range(len(node)))
    found = [(node, key) for key in keys]
    for key in keys:
        found += _places(node[key])
    return found


def _change(random: Random, holder: Any, key: Any) -> None:
    old = holder[key]
    match random.randrange(8):
        case 0:
            del holder[key]
            if isinstance(holder, list) and not holder:
                holder.append(old)
        case 1 if isinstance(holder, dict):
            holder[text(random)] = holder.pop(key)
        case 2 if isinstance(holder, dict):
            holder[text(random)] = value(random)
        case 3 if isinstance(old, list):
            holder[key] = old * random.choice((0, 2, 50))
        case 4:
            holder[key] = [old] if random.random() < 0.5 else {text(random): old}
        case _:
            holder[key] = value(random)


def value(random: Random) -> Any:
    match random.randrange(8):
        case 0:
            return random.choice((None, True, False, {}, [], [[]], [{}], "\ud800"))
        case 1:
            return random.choice((0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")))
        case 2:
            return _nested(random.choice((3, 20, 200)))
        case 3:
            return [random.choice(NUMBERS) for _ in range(random.choice((1, 2, 10)))]
        case 4 | 5:
            return random.choice(NUMBERS)
        case _:
            return text(random)


def _nested(depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = [node]
    return node
