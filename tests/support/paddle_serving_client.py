"""Script that runs the original client of Paddle Serving against a server.

Arguments: the folder of the original package, the server's address, and what to send.  Prints what came as JSON.  Only
the client's own modules are loaded: the package would want Paddle, and its messages are as old as their compiler.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"

import numpy as np

PACKAGE = "paddle_serving_server"


class Errcode(Enum):
    OK = 0


def _package(name: str, path: Path) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(path)]
    sys.modules[name] = module
    return module


def load_client(home: Path) -> Any:
    _package(PACKAGE, home / PACKAGE)
    _package(f"{PACKAGE}.pipeline", home / PACKAGE / "pipeline")
    channel = ModuleType(f"{PACKAGE}.pipeline.channel")
    channel.__dict__["ChannelDataErrcode"] = Errcode
    sys.modules[channel.__name__] = channel
    sys.modules.setdefault("six", ModuleType("six"))  # imported and never used
    name = f"{PACKAGE}.pipeline.pipeline_client"
    spec = importlib.util.spec_from_file_location(name, home / PACKAGE / "pipeline" / "pipeline_client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PipelineClient()


FEEDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"x": "1,2"}, {}),
    "array": ({"x": np.arange(4, dtype=np.float32).reshape(2, 2)}, {}),
    "list": ({"x": [1, 2]}, {}),
    "profile": ({"x": "1"}, {"profile": True}),
    "log_id": ({"x": "1"}, {"log_id": 77}),
    "string_tensor": ({"x": "abc"}, {"pack_tensor_format": True}),
    "bytes_tensor": (
        {"x": np.arange(6, dtype=np.int64).reshape(2, 3)},
        {"pack_tensor_format": True, "use_tensor_bytes": True},
    ),
    "lod": ({"x": np.arange(3, dtype=np.int64).reshape(3, 1), "x.lod": [0, 1, 3]}, {"pack_tensor_format": True}),
}
for dtype in ("int64", "float32", "int32", "float64", "int16", "float16", "uint16", "uint8", "int8", "bool"):
    FEEDS[dtype] = ({"x": np.array([[1, 0], [3, 1]], dtype)}, {"pack_tensor_format": True})


def main() -> None:
    home, address = Path(sys.argv[1]), sys.argv[2]
    client = load_client(home)
    client.connect([address])
    answers = {}
    printed, sys.stdout = sys.stdout, sys.stderr
    for name, (feed, options) in FEEDS.items():
        response = client.predict(feed_dict={"clientip": "10.0.0.1", **feed}, **options)
        answers[name] = [response.err_no, response.err_msg, list(response.key), list(response.value)]
    futures = [client.predict({"clientip": "10.0.0.1", "x": str(i)}, asyn=True) for i in range(100)]
    answers["async"] = [list(future.result().value) for future in futures]
    sys.stdout = printed
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
