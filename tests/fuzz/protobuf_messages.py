"""Messages that are nearly right: a valid one, with fields that were changed, filled or taken away."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from tests.fuzz.values import NUMBERS, changed_bytes, text

_INTEGERS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_FLOATS: Final = (0.0, -0.0, 1.5, 1e30, float("nan"), float("inf"), float("-inf"))


def changed_serialised(random: Random, message: Any) -> bytes:
    """Change a message, and now and then the bytes that it is written with."""
    changed = changed_message(random, message) if random.random() < 0.85 else message
    data: bytes = changed.SerializeToString()
    return changed_bytes(random, data) if random.random() < 0.25 else data


def changed_message(random: Random, message: Any) -> Any:
    """Change a copy in one to three places, at any depth."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(random.randint(1, 3)):
        _change(random, _somewhere(random, changed))
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


def _change(random: Random, message: Any) -> None:
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
        _change(random, getattr(message, field.name))
    else:
        setattr(message, field.name, _scalar(random, field))


def _change_map(random: Random, entries: Any, field: Any) -> None:
    key = random.choice(list(entries)) if entries and random.random() < 0.5 else text(random)
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        _change(random, entries[key])
    else:
        entries[key] = _scalar(random, field)


def _change_list(random: Random, values: Any, field: Any) -> None:
    choice = random.randrange(4)
    if choice == 0 and values:
        del values[random.randrange(len(values))]
    elif choice == 1 and values:
        values.extend(list(values) * random.choice((1, 3)))
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        _change(random, values.add())
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
