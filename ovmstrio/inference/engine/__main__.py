"""Entry point of an engine process."""

from __future__ import annotations

from ovmstrio.inference.engine.chunk_worker import run_process
from ovmstrio.inference.engine.engine import serve

__all__: list[str] = []

run_process(serve)
