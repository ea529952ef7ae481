"""The program of an engine process."""

from __future__ import annotations

from ovmstrio.openvino.engine.own_process import run_process
from ovmstrio.openvino.engine.program import serve

__all__: list[str] = []

run_process(serve)
