"""Changes of bytes, JSON documents and protobuf messages, with values that often expose faults."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

NAMES: Final = (
    *("model", "dag", "graph", "handler", "ops", "strings", "dynamic", "stateful"),
    *("b", "a", "in", "out", "x", "y", "strings", "BYTES", "FP32", "INT64", "UINT8", "1", "serving_default"),
    *("sequence_id", "sequence_control_input", "binary_data", "binary_data_size", "OVMS_MP_TIMESTAMP"),
    *("classification", "inference.GRPCInferenceService", "grpc.health.v1.Health"),
    "tensorflow.serving.PredictionService",
)
"""Words that the server knows, in places where it may not expect them."""
NUMBERS: Final = (
    *(0, 1, 2, 3, 10, -1, -2, 127, 128, 255, 256, 65535, 65536),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**30),
)
TEXTS: Final = (
    *("", " ", "\0", "\n", "\r\n", "%s%n", "../../etc/passwd", "a" * 300, "a" * 5000),
    *("null", "NaN", "-1", "0", "1e400", "{}", "[]", "<a>", "'\";--", "\\", "/", "//", "%00", "%2e%2e", "+"),
    *("é", "\u202e", "\U0001f600", "\x7f", "\ufeff"),
)
_BYTES: Final = (b"", b"\0", b"\xff", b"\xff" * 8, b"\x80" * 10, b"\0" * 64, b"\r\n", b"\n", b"{", b'"', b"[" * 100)


def text(random: Random) -> str:
    return random.choice(NAMES if random.random() < 0.6 else TEXTS)


def changed_bytes(random: Random, data: bytes, changes: int = 3) -> bytes:
    given = bytearray(data)
    for _ in range(random.randint(1, changes)):
        at = random.randrange(len(given) + 1)
        end = min(len(given), at + random.choice((1, 1, 2, 4, 8, 64)))
        match random.randrange(7):
            case 0 if at < len(given):
                given[at] ^= 1 << random.randrange(8)
            case 1 if at < len(given):
                given[at] = random.randrange(256)
            case 2:
                given[at:at] = random.choice(_BYTES)
            case 3:
                del given[at:end]
            case 4:
                given[at:at] = given[at:end] * random.choice((1, 2, 16))
            case 5:
                del given[at:]
            case _:
                given[at:end] = random.randbytes(end - at)
    return bytes(given)


def changed_json(random: Random, document: Any) -> bytes:
    changed = changed_document(random, document) if random.random() < 0.85 else document
    written = json.dumps(
        changed, ensure_ascii=random.random() < 0.5, separators=random.choice(((", ", ": "), (",", ":")))
    )
    data = written.encode(errors="surrogatepass")
    return changed_bytes(random, data) if random.random() < 0.2 else data


def changed_document(random: Random, document: Any) -> Any:
    root = [copy.deepcopy(document)]
    for _ in range(random.randint(1, 3)):
        holder, key = random.choice(_json_places(root))
        _change_json(random, holder, key)
    return root[0] if root else None


def _json_places(node: Any) -> list[tuple[Any, Any]]:
    keys: list[Any] = []
    if isinstance(node, dict):
        keys = list(node)
    elif isinstance(node, list):
        keys = list(range(len(node)))
    found = [(node, key) for key in keys]
    for key in keys:
        found += _json_places(node[key])
    return found


def _change_json(random: Random, holder: Any, key: Any) -> None:
    old = holder[key]
    match random.randrange(8):
        case 0:
            del holder[key]
            if isinstance(holder, list) and not holder:
                holder.append(old)
        case 1 if isinstance(holder, dict):
            holder[text(random)] = holder.pop(key)
        case 2 if isinstance(holder, dict):
            holder[text(random)] = _json_value(random)
        case 3 if isinstance(old, list):
            holder[key] = old * random.choice((0, 2, 50))
        case 4:
            holder[key] = [old] if random.random() < 0.5 else {text(random): old}
        case _:
            holder[key] = _json_value(random)


def _json_value(random: Random) -> Any:
    match random.randrange(8):
        case 0:
            return random.choice((None, True, False, {}, [], [[]], [{}], "\ud800"))
        case 1:
            return random.choice((0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")))
        case 2:
            return _nested_list(random.choice((3, 20, 200)))
        case 3:
            return [random.choice(NUMBERS) for _ in range(random.choice((1, 2, 10)))]
        case 4 | 5:
            return random.choice(NUMBERS)
        case _:
            return text(random)


def _nested_list(depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = [node]
    return node


_INTEGERS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_FLOATS: Final = (0.0, -0.0, 1.5, 1e30, float("nan"), float("inf"), float("-inf"))


def changed_serialised(random: Random, message: Any) -> bytes:
    changed = changed_message(random, message) if random.random() < 0.85 else message
    data: bytes = changed.SerializeToString()
    return changed_bytes(random, data) if random.random() < 0.25 else data


def changed_message(random: Random, message: Any) -> Any:
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(random.randint(1, 3)):
        _change_field(random, _somewhere(random, changed))
    return changed


def _somewhere(random: Random, message: Any) -> Any:
    inner = []
    for field, value in message.ListFields():
        if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            continue
        if _is_map(field):
            if field.message_type.fields_by_name["value"].cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                inner += list(value.values())
        elif field.is_repeated:
            inner += list(value)
        else:
            inner.append(value)
    if not inner or random.random() < 0.3:
        return message
    return _somewhere(random, random.choice(inner))


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _change_field(random: Random, message: Any) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    is_set = [field for field, _ in message.ListFields()]
    field = random.choice(is_set) if is_set and random.random() < 0.7 else random.choice(fields)
    if random.random() < 0.2:
        message.ClearField(field.name)
    elif _is_map(field):
        _change_map(random, getattr(message, field.name), field.message_type.fields_by_name["value"])
    elif field.is_repeated:
        _change_list(random, getattr(message, field.name), field)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
        _change_field(random, getattr(message, field.name))
    else:
        setattr(message, field.name, _scalar(random, field))


def _change_map(random: Random, entries: Any, field: Any) -> None:
    key = random.choice(list(entries)) if entries and random.random() < 0.5 else text(random)
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        _change_field(random, entries[key])
    else:
        entries[key] = _scalar(random, field)


def _change_list(random: Random, values: Any, field: Any) -> None:
    choice = random.randrange(4)
    if choice == 0 and values:
        del values[random.randrange(len(values))]
    elif choice == 1 and values:
        values.extend(list(values) * random.choice((1, 3)))
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        _change_field(random, values.add())
    elif choice == 2 and values:
        values[random.randrange(len(values))] = _scalar(random, field)
    else:
        values.extend(_scalar(random, field) for _ in range(random.choice((1, 2, 10))))


def _scalar(random: Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        return min(max(random.choice(NUMBERS), low), high) if random.random() < 0.5 else random.randint(0, 20)
    if kind in {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}:
        return random.choice(_FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.randbytes(random.choice((0, 1, 3, 4, 8, 39, 40, 41)))
    return text(random)
