"""The contract of unit tests: no process, no socket with an address, no compiled OpenVINO model."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import openvino as ov
import pytest

_FOLDER: Final = Path(__file__).parent
_FORBIDDEN: Final = {
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "subprocess.Popen": "starts a process",
    "socket.bind": "binds a socket",
    "socket.connect": "connects a socket",
}
_compile_model: Final = ov.Core.compile_model
_is_unit_test = False


def _check_event(event: str, _: object) -> None:
    if event in _FORBIDDEN:
        _check(_FORBIDDEN[event])


def _check(action: str) -> None:
    if _is_unit_test:
        raise AssertionError(f"a unit test {action}; it belongs to tests/service, or to tests/system")


def _checked_compile_model(self: ov.Core, *arguments: Any, **options: Any) -> ov.CompiledModel:
    _check("compiles a model")
    return _compile_model(self, *arguments, **options)


def pytest_configure() -> None:
    """Watch this process; an audit hook stays until the process ends."""
    sys.addaudithook(_check_event)
    ov.Core.compile_model = _checked_compile_model


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Apply the contract to unit tests and their fixtures."""
    global _is_unit_test
    _is_unit_test = item.path.is_relative_to(_FOLDER)
    try:
        return (yield)
    finally:
        _is_unit_test = False
