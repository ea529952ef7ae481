"""Models of all programs in this folder, compiled with the settings in the environment variable ``PEER``."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import numpy as np
import openvino as ov

__all__ = ["SETUP", "Models"]

SETUP: dict[str, Any] = json.loads(os.environ["PEER"])
"""``models``: paths by name; ``settings``: of OpenVINO; ``grpc``, ``rest``, ``metrics``: ports."""


class Models:
    """Compiled models, with an infer request for each thread that uses them."""

    def __init__(self) -> None:
        core = ov.Core()
        self._compiled = {
            name: core.compile_model(path, "CPU", SETUP["settings"]) for name, path in SETUP["models"].items()
        }
        self._requests = threading.local()

    def infer(self, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Infer on the calling thread."""
        requests = self._requests.__dict__
        if name not in requests:
            requests[name] = self._compiled[name].create_infer_request()
        output: np.ndarray[Any, Any] = requests[name].infer([array], share_inputs=True)[0]
        return output
