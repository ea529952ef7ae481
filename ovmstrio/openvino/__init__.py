"""The only package that imports OpenVINO: read, shape, compile and run models."""

import sys

# OpenVINO's package tells its makers of each import, from a thread of its own.  It goes without where this is missing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
