"""What a server that serves models alone does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_HEAVY = ("quart", "hypercorn", "PIL", "grpc", "openvino", "ovmstrio.runtimes.ops.executor", "pyovms")
_FOR_FRONT_ENDS = ("ovmstrio.wire.grpc.server", "ovmstrio.protocol.descriptors", "grpclib", "hpack", "h2")
_FOR_WORKERS = ("ovmstrio.server.workers.parent",)


def _imported(code: str, names: tuple[str, ...]) -> list[str]:
    """Tell which modules are there once a program has been run."""
    show = f"{code}\nimport sys\nprint(*(name for name in {names!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


def test_what_no_service_needs_is_not_imported_before_something_is_served() -> None:
    """Frameworks, decoders of images, OpenVINO, grpcio and the runtimes of Ops and of nodes wait for who needs them."""
    assert _imported("import ovmstrio.server.own_process, ovmstrio.server.front_ends", _HEAVY) == []


def test_what_front_ends_and_other_processes_need_is_not_imported_before_models_begin_to_load() -> None:
    """What speaks gRPC is imported while they do; what starts workers is not at all."""
    assert _imported("import ovmstrio.server.own_process", (*_HEAVY, *_FOR_FRONT_ENDS, *_FOR_WORKERS)) == []


_SERVED = """
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


def test_what_models_are_loaded_with_is_imported_before_front_ends(tmp_path: Path) -> None:
    """Else both would share an interpreter that runs one at a time, and OpenVINO would begin later to compile."""
    code = f"{_SERVED.format(folder=tmp_path)}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    order = done.stdout.split()
    loading = [order.index(name) for name in ("ovmstrio.runtimes.models.load_model", "openvino")]
    assert max(loading) < order.index("ovmstrio.server.front_ends")
