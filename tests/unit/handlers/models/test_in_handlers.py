from __future__ import annotations

import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.core.errors import UserCodeError
from ovmstrio.runtimes.handlers.building import Supplies
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from ovmstrio.runtimes.handlers.models.library import LibraryOptions
from ovmstrio.runtimes.handlers.models.opening import ProjectModels, open_models
from ovmstrio.runtimes.handlers.project import open_handler
from tests.support.model_projects import paths_below, wait_gone, write_model
from tests.support.projects import make_project

_CODE = """
from pathlib import Path
from cortex_internal.lib.exceptions import UserRuntimeException

class Handler:
    def __init__(self, config, {client}):
        self.client = {client}
        self.first = self.client.get_model("a")

    def load_model(self, model_path):
        return {{"path": model_path, "text": Path(model_path, "model.txt").read_text()}}

    def handle_post(self, payload):
        model = self.client.get_model(payload["model"], payload.get("version"))
        if "wait" in payload:
            payload["begun"].set()
            assert payload["wait"].wait(60)
        return model["text"], Path(model["path"], "model.txt").exists(), model is self.first

    async def handle_get(self, query_params):
        return (await self.client.aget_model(query_params["model"]))["text"]

    def handle_put(self, payload):
        try:
            self.client.get_model("none")
        except UserRuntimeException as error:
            return str(error)
"""


@asynccontextmanager
async def _served(
    tmp_path: Path, client: str = "model_client", **keys: Any
) -> AsyncIterator[tuple[LoadedHandler, ProjectModels]]:
    models = {"multi_model_reloading": {"dir": "up", **keys}}
    project = make_project(tmp_path, _CODE.format(client=client), threads_per_process=2, **models)
    options = LibraryOptions(root=tmp_path / "down")
    async with (
        open_models(project, options=options) as opened,
        open_handler(project, Supplies(opened.clients)) as handler,
    ):
        yield handler, opened


@pytest.mark.parametrize("client", ["model_client", "python_client"])
async def test_a_handler_gets_models_from_its_constructor_on(tmp_path: Path, client: str) -> None:
    """The client comes by either name, works in the constructor already, and has a way of its own for async methods."""
    for name in "ab":
        write_model(tmp_path, name, "up", name)
    async with _served(tmp_path, client) as (handler, opened):
        assert await handler.call("handle_post", payload={"model": "a"}) == ("a", True, True)
        assert await handler.call("handle_post", payload={"model": "b", "version": 1}) == ("b", True, False)
        assert await handler.call("handle_get", query_params={"model": "b"}) == "b"
        message = await handler.call("handle_put", payload={})
        assert message.startswith("error: model 'none' was not found: choose one of the following: a, b")
        with pytest.raises(UserCodeError):
            await handler.call("handle_post", payload={"model": "none"})
        assert opened.info()["model_metadata"]["a"]["versions"] == ["1"]


async def test_a_model_in_use_keeps_its_place_until_the_call_ends(tmp_path: Path) -> None:
    """Neither the cache nor its storage takes the files from under a call, also when its caller has left."""
    for name in "ab":
        write_model(tmp_path, name, "up", name)
    async with _served(tmp_path, cache_size=1, disk_cache_size=1) as (handler, opened):
        library = opened.library
        assert library is not None
        begun, go_on = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()

        class _Begun:
            def set(self) -> None:
                token.run_sync_soon(begun.set)

        async with trio.open_nursery() as nursery:
            payload = {"model": "a", "begun": _Begun(), "wait": go_on}
            nursery.start_soon(lambda: handler.call("handle_post", payload=payload))
            await begun.wait()
            nursery.cancel_scope.cancel()
        assert await handler.call("handle_post", payload={"model": "b"}) == ("b", True, False)
        await trio.to_thread.run_sync(shutil.rmtree, tmp_path / "up" / "a")
        await library.watcher.look_now()
        folders = await trio.to_thread.run_sync(_folders, tmp_path)
        assert "a" in folders
        go_on.set()
        await wait_gone(tmp_path, "down/*/*/a")
        assert library.shelf.counts() == (0, 0)


def _folders(root: Path) -> set[str]:
    return {path.name for path in paths_below(root, "down/*/*/*")}
