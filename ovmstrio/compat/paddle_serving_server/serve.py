"""``python -m paddle_serving_server.serve stop|kill|check``: stops or lists running services."""

from __future__ import annotations

import argparse
import signal
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from ovmstrio.ops.process_info import list_processes, serving_home, signal_processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["main", "stop_serving"]

_SIGNALS: Final[Mapping[str, signal.Signals]] = {"stop": signal.SIGINT, "kill": signal.SIGKILL}


def stop_serving(command: str, port: int | None = None) -> bool:
    """Stop the services of ``ProcessInfo.json``, or the one on a port; return whether a signal was sent."""
    sent, stale = signal_processes(_SIGNALS[command], port)
    for process in sent:
        _print(f"{command}: process {process.pid}, ports {process.port}")
    for process in stale:
        _print(f"process {process.pid}, ports {process.port}: already ended")
    if not sent:
        where = f"on port {port} " if port is not None else ""
        _print(f"no running service {where}found in {serving_home()}")
    return bool(sent)


def check() -> bool:
    """Print versions and running services."""
    _print(f"ovmstrio {version('ovmstrio')}, OpenVINO {version('openvino')}")
    for process in list_processes():
        _print(f"process {process.pid}, ports {process.port}: {'running' if process.is_ours else 'ended'}")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser("serve", description=__doc__)
    parser.add_argument("server", choices=[*_SIGNALS, "check"], help="stop gracefully, kill, or list services")
    parser.add_argument("--port", type=int, help="only the service on this port")
    options = parser.parse_args(arguments)
    done = check() if options.server == "check" else stop_serving(options.server, options.port)
    return 0 if done else 1


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
