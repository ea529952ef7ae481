"""Libraries of custom nodes that are built again while a server runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from tests.support.native_nodes import copy_of_fixture
from tests.support.processes import serving
from tests.support.system_servers import write_config
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("options", [(), pytest.param(("--custom_node_isolation", "process"), marks=pytest.mark.slow)])
def test_a_reload_takes_a_rebuilt_library(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The library may be written over or renamed; no copies of it stay in its folder.

    Libraries stay loaded in a process, so the server is a process, and its own, as its files change.
    """
    folder = tmp_path / "nodes"
    folder.mkdir()
    library = copy_of_fixture(folder, build=1)
    node = {
        "name": "custom",
        "type": "custom",
        "library_name": "built",
        "params": {"execute": "build"},
        "inputs": [{"x": {"node_name": "request", "data_item": "x"}}],
        "outputs": [{"data_item": "y", "alias": "y"}],
    }
    outputs = [{"y": {"node_name": "custom", "data_item": "y"}}]
    config = write_config(
        tmp_path,
        custom_node_library_config_list=[{"name": "built", "base_path": str(library)}],
        pipeline_config_list=[{"name": "p", "inputs": ["x"], "nodes": [node], "outputs": outputs}],
    )
    given = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.zeros((1, 2), np.float32))
    with (
        serving("--config_path", str(config), "--file_system_poll_wait_seconds", "0", *options) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc) as client,
    ):
        for build in range(1, 5):
            if build > 1:
                written = copy_of_fixture(folder, "new.so" if build % 2 else library.name, build)
                written.rename(library)
                assert httpx.post(f"{server.rest}/v1/config/reload", timeout=WAIT_SECONDS).status_code == 201
            answer = client.infer("p", [given], client_timeout=WAIT_SECONDS)
            assert answer.as_numpy("y").tolist() == [[build, build]]
        assert list(folder.iterdir()) == [library]
