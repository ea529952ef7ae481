"""OpenVINO models: reading, compiling, running and tuning them; the only importer of ``openvino``."""

import sys

from ovmstrio.util.optional_imports import skip_optional_imports

# OpenVINO's package reports each import to its makers, from a separate thread, unless this package is missing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
skip_optional_imports(["openvino"])
