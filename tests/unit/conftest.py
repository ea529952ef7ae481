"""The contract of unit tests: no process, no socket with an address, no compiled OpenVINO model."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

# NumPy before 2.3 starts a process when this module is imported.
import numpy.testing  # noqa: F401
import openvino as ov
import pytest

_FOLDER: Final = Path(__file__).parent
_FORBIDDEN: Final = {
    "compile_model": "compiles a model",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "subprocess.Popen": "starts a process",
    "socket.bind": "binds a socket",
    "socket.connect": "connects a socket",
}
_compile_model: Final = ov.Core.compile_model


class _Contract:
    def __init__(self) -> None:
        self._applies = False

    def check(self, event: str, _: object) -> None:
        if self._applies and event in _FORBIDDEN:
            raise AssertionError(f"a unit test {_FORBIDDEN[event]}; it belongs to tests/service, or to tests/system")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._applies = item.path.is_relative_to(_FOLDER)
        try:
            return (yield)
        finally:
            self._applies = False


def pytest_configure(config: pytest.Config) -> None:
    """Watch this process; an audit hook stays until the process ends."""
    contract = _Contract()

    def compile_model(self: ov.Core, *arguments: Any, **options: Any) -> ov.CompiledModel:
        contract.check("compile_model", None)
        return _compile_model(self, *arguments, **options)

    sys.addaudithook(contract.check)
    ov.Core.compile_model = compile_model
    config.pluginmanager.register(contract)
