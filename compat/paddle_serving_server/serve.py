"""``python -m paddle_serving_server.serve stop|kill|check``: ends running services, or tells of them."""

from __future__ import annotations

import argparse
import signal
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from ovmstrio.ops.process_info import home, list_processes, signal_processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["main", "stop_serving"]

_SIGNALS: Final[Mapping[str, signal.Signals]] = {"stop": signal.SIGINT, "kill": signal.SIGKILL}


def stop_serving(command: str, port: int | None = None) -> bool:
    """End the services of ``ProcessInfo.json``, or the one of a port; True if any was told to end."""
    sent, stale = signal_processes(_SIGNALS[command], port)
    for process in sent:
        _say(f"{command}: process {process.pid}, ports {process.port}")
    for process in stale:
        _say(f"process {process.pid}, ports {process.port}: has ended already")
    if not sent:
        where = f"of port {port} " if port is not None else ""
        _say(f"no running service {where}is known in {home()}")
    return bool(sent)


def check() -> bool:
    """Tell versions, and what is known of running services."""
    _say(f"ovmstrio {version('ovmstrio')}, OpenVINO {version('openvino')}")
    for process in list_processes():
        _say(f"process {process.pid}, ports {process.port}: {'running' if process.is_ours else 'ended'}")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if it did what it was asked to."""
    parser = argparse.ArgumentParser("serve", description=__doc__)
    parser.add_argument("server", choices=[*_SIGNALS, "check"], help="stop gently, kill at once, or tell")
    parser.add_argument("--port", type=int, help="only the service of this port")
    asked = parser.parse_args(arguments)
    done = check() if asked.server == "check" else stop_serving(asked.server, asked.port)
    return 0 if done else 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
