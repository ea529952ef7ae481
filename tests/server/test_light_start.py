"""What a server that serves models alone does not import."""

from __future__ import annotations

import subprocess
import sys

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
