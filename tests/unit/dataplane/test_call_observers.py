"""Who is told what of a call."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.api.doors import KSERVE_REST
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.events import CallEvent, CallObserver
from ovmstrio.dataplane.call_observers import CallObservers


class Failures(CallObserver):
    """Notes failures alone."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def call_failed(self, event: CallEvent) -> None:
        """Note one."""
        self._told.append(("failed", event.code))


class Ends(CallObserver):
    """Notes ends alone."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def call_finished(self, event: CallEvent) -> None:
        """Note one."""
        self._told.append(("finished", event.code))


class Starts:
    """Is no kind of observer that the server knows, and has but one of their methods."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def call_started(self, event: CallEvent) -> None:
        """Note one."""
        self._told.append(("started", event.code))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, [("started", ""), ("finished", "OK")]),
        (
            InvalidRequest("no"),
            [("started", ""), ("finished", "InvalidRequest"), ("failed", "InvalidRequest")],
        ),
    ],
)
def test_each_is_told_what_it_has_methods_for(error: Exception | None, told: list[Any]) -> None:
    """Failures are told once everybody has been told of the end."""
    heard: list[Any] = []
    everybody: list[Any] = [Failures(heard), Ends(heard), Starts(heard)]
    observers = CallObservers(everybody)
    event = CallEvent("m", "1", "model", KSERVE_REST, "ModelInfer")
    observers.start(event)
    observers.end(event, error)
    assert heard == told
