"""A pipeline's script, run by the real ``ovms run`` in a folder of its own, on free ports, ended with the test."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, running


@contextlib.contextmanager
def running_service(folder: Path, *arguments: str, config: str = "config.yml") -> Iterator[OvmsProcess]:
    """Run ``web_service.py`` of a folder until the block ends; gives the ports in its configuration others."""
    grpc, http = free_ports(2)
    file = folder / config
    text = re.sub(r"(?m)^rpc_port:.*$", f"rpc_port: {grpc}", file.read_text(encoding="utf-8"))
    file.write_text(re.sub(r"(?m)^http_port:.*$", f"http_port: {http}", text), encoding="utf-8")
    with running("run", "web_service.py", *arguments, grpc=grpc, rest=http, folder=folder) as server:
        yield server
