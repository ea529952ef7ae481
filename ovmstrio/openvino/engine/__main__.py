"""The program of an engine process: its arguments are the descriptors of its socket and of its server's lifeline."""

from __future__ import annotations

import sys

from ovmstrio.openvino.engine.program import serve

__all__: list[str] = []

serve(int(sys.argv[1]), int(sys.argv[2]))
