"""``ovmstrio.testing``: servers and a clock for tests of users."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import numpy as np
import pytest
import trio

from ovmstrio import errors
from ovmstrio.testing import FakeClock, serving, serving_async, serving_in_memory
from tests.support import ir
from tests.support.projects import write_project

ONE = np.ones((1, 2), np.float32)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    base = str(ir.save(ir.accumulator(), tmp_path, "sums"))
    path.write_text(
        json.dumps({"model_config_list": [{"config": {"name": "sums", "base_path": base, "stateful": True}}]})
    )
    return path


def test_a_configuration_is_served_until_the_block_ends(config: Path) -> None:
    with serving(config) as server:
        for rest in (False, True):
            with server.client(rest=rest) as client, client.sequence("sums") as sequence:
                assert sequence.infer({"x": ONE})["y"].tolist() == [[1.0, 1.0]]
        assert server.grpc.startswith("grpc://127.0.0.1:")
    with server.client(retries=0) as client, pytest.raises(errors.ServerError, match="no server answers"):
        client.models()


def test_time_of_a_server_is_moved(config: Path) -> None:
    def alive() -> list[int]:
        # An idle connection does not outlive the jump either.
        with server.client(rest=True) as client:
            return [each.id for each in client.sequences("sums")]

    with serving(config, clock=FakeClock(), sequence_cleaner_poll_wait_minutes=5) as server:
        with server.client() as client:
            client.infer("sums", {"x": ONE}, parameters={"sequence_id": 7, "sequence_start": True})
        assert alive() == [7]
        # The cleaner removes a sequence after a whole interval without requests.
        for _ in range(100):
            server.advance(301)
            if not alive():
                break
        assert alive() == []
    with serving(config) as server, pytest.raises(RuntimeError, match="no fake clock"):
        server.advance(1)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_model_folder_is_served_for_asynchronous_tests(tmp_path: Path, backend: str) -> None:
    folder = ir.save(ir.dummy(), tmp_path, "plus")

    async def main() -> None:
        async with serving_async(folder) as server, server.async_client() as client:
            result = await client.infer("plus", {"b": np.zeros((1, 10), np.float32)})
            assert result["a"].tolist() == [[1.0] * 10]

    anyio.run(main, backend=backend)


def test_a_project_of_handlers_is_served(tmp_path: Path) -> None:
    project = tmp_path / "echo"
    project.mkdir()
    write_project(project, "class Handler:\n    def handle_post(self, payload):\n        return payload\n")
    with serving(project) as server, server.client(rest=True) as client:
        assert client.post("echo", b'{"a":1}', "application/json").body == b'{"a": 1}'


@pytest.mark.parametrize("rest", [False, True])
def test_a_server_in_memory_needs_no_sockets(config: Path, rest: bool) -> None:
    async def main() -> None:
        async with serving_in_memory(config) as server, server.async_client(rest=rest) as client:
            assert [each.name for each in await client.models()] == ["sums"]
            async with client.sequence("sums") as sequence:
                assert (await sequence.infer({"x": ONE}))["y"].tolist() == [[1.0, 1.0]]

    trio.run(main)


def test_what_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_config_list": [{"config": {"name": "m", "base_path": str(tmp_path / "none")}}]})
    )
    with pytest.raises(errors.ConfigError), serving(config):
        pass


def test_a_server_in_memory_on_asyncio_is_refused_with_the_function_to_use(config: Path) -> None:
    async def serve() -> None:
        async with serving_in_memory(config):
            pass

    with pytest.raises(RuntimeError, match="requires a trio loop; tests on asyncio use serving_async"):
        anyio.run(serve, backend="asyncio")
