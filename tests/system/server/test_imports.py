from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_FRAMEWORKS = (
    "quart",
    "hypercorn",
    "PIL",
    "grpc",
    "openvino",
    "ovmstrio.ops.executor",
    "ovmstrio.graphs.python_nodes.api",
)
_FRONT_ENDS = ("ovmstrio.transport.grpc.server", "ovmstrio.encoding.messages", "grpclib", "hpack", "h2")
_WORKERS = ("ovmstrio.workers.supervisor",)
_SERVE = """
import trio
from functools import partial
from ovmstrio import ServerSettings, serve

async def main():
    async with trio.open_nursery() as nursery:
        settings = ServerSettings(model_name="none", model_path="{folder}", port=0, rest_bind_address="unix:{folder}/s")
        running = await nursery.start(partial(serve, settings, handle_signals=False))
        nursery.cancel_scope.cancel()

trio.run(main)
"""
_OPEN_TRACES = """
import os, trio
from ovmstrio.server.server import trace_calls
import ovmstrio.server.server, ovmstrio.server.front_ends

async def main():
    async with trace_calls() as traces:
        assert not traces.calls and not traces.requests and traces.recent is None

for variables in {}, {"OTEL_SERVICE_NAME": "x"}, {"OTEL_TRACES_EXPORTER": "none"}:
    os.environ.update(variables)
    trio.run(main)
    for name in variables:
        del os.environ[name]
"""


_LATER = """
import sys
from ovmstrio.util.optional_imports import skip_optional_imports

skip_optional_imports(["structlog", "openvino"])
import structlog
import ovmstrio.inference.compile

left = {"rich.traceback", "pygments", "openvino.tools.ovc"} & set(sys.modules)
assert not left, left
assert "rich" not in sys.modules
import openvino
from rich.traceback import Traceback
from openvino import convert_model

assert convert_model is openvino.convert_model is sys.modules["openvino.tools.ovc"].convert_model
assert not hasattr(openvino, "no_such_name")
"""
_EARLIER = """
import sys, rich.console
from ovmstrio.util.optional_imports import skip_optional_imports

known = sys.modules["rich"]
skip_optional_imports(["structlog"])
import structlog.dev

assert structlog.dev.rich is None
assert sys.modules["rich"] is known
"""


def _imported(code: str) -> list[str]:
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import ovmstrio.workers.serve, ovmstrio.server.front_ends", _FRAMEWORKS),
        ("import ovmstrio.workers.serve", (*_FRAMEWORKS, *_FRONT_ENDS, *_WORKERS)),
        (_OPEN_TRACES, ("opentelemetry",)),
    ],
    ids=["server", "process before models begin to load", "traces without their variables"],
)
def test_packages_of_services_are_not_imported_before_they_are_needed(code: str, names: tuple[str, ...]) -> None:
    assert not set(names) & set(_imported(code))


def test_openvino_is_imported_before_front_ends(tmp_path: Path) -> None:
    order = _imported(_SERVE.format(folder=tmp_path))
    loading = [order.index(name) for name in ("ovmstrio.models.kind", "openvino")]
    assert max(loading) < order.index("ovmstrio.server.front_ends")


def test_optional_imports_of_libraries_are_made_at_their_first_use() -> None:
    assert "openvino.tools.ovc" in _imported(_LATER)


def test_modules_that_are_imported_already_stay() -> None:
    assert "rich.console" in _imported(_EARLIER)
