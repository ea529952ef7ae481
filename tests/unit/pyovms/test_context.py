from __future__ import annotations

import time
from typing import Any

import pytest

from pyovms import Context, Storage, current_context


def test_there_is_no_context_outside_nodes() -> None:
    with pytest.raises(RuntimeError, match="works in execute, open and close of a Python node"):
        current_context()


def test_parameters_can_only_be_read() -> None:
    given = {"a": 1}
    parameters: Any = Context(given, "").parameters
    given["b"] = 2
    assert dict(parameters) == {"a": 1}
    with pytest.raises(TypeError):
        parameters["a"] = 2


def test_storage_is_read_by_items_and_attributes() -> None:
    storage = Storage()
    storage.seen = 1
    storage["more"] = 2
    assert (storage["seen"], storage.more, dict(storage)) == (1, 2, {"seen": 1, "more": 2})
    del storage.seen
    with pytest.raises(AttributeError, match="nothing called 'seen' is stored; stored are: more"):
        _ = storage.seen
    with pytest.raises(AttributeError, match="'seen'"):
        del storage.seen


def test_a_deadline_is_a_time_and_remaining_seconds() -> None:
    none, soon, past = Context({}, ""), Context({}, "", 60), Context({}, "", -1)
    assert (none.deadline, none.remaining()) == (None, None)
    assert soon.deadline == pytest.approx(time.time() + 60, abs=1)
    assert soon.remaining() == pytest.approx(60, abs=1)
    assert past.remaining() == 0
