from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ModelFailure
from ovmstrio.runtimes.generation import load_text_model as loading
from ovmstrio.runtimes.generation.load_text_model import load_text_model
from ovmstrio.runtimes.generation.text_model import TextModel
from ovmstrio.runtimes.kind import LoadContext, lease_nothing
from tests.support.served_text_models import greedy, made, text_of

_PRECISE: Final = {"INFERENCE_PRECISION_HINT": "f32"}


class _Server:
    """Loads models of one name, as a server does that reads its files again."""

    def __init__(self, folder: Path, tasks: trio.Nursery) -> None:
        self._folder = folder
        self._context = LoadContext(lease_nothing, tasks)

    async def load(self, **settings: Any) -> TextModel:
        settings = {"cache_size": 0.002, "plugin_config": _PRECISE, **settings}
        spec = TextModelSpec(name="tiny", base_path=self._folder, path=self._folder, **settings)
        return await load_text_model(spec, self._context)


@asynccontextmanager
async def _server(folder: Path) -> AsyncIterator[_Server]:
    with trio.fail_after(120):
        async with trio.open_nursery() as tasks:
            yield _Server(folder, tasks)


async def test_old_model_ends_its_texts_before_the_new_one_is_loaded(tiny_folder: Path) -> None:
    texts: dict[str, str] = {}
    async with _server(tiny_folder) as server:
        old = await server.load()
        alone = text_of(await made(old, greedy("hello", 600)))

        async def ask(name: str) -> None:
            texts[name] = text_of(await made(old, greedy("hello", 600)))

        async def replace(models: list[TextModel]) -> None:
            models.append(await server.load(reload="retire_first"))

        async with trio.open_nursery() as nursery, old.generate(greedy("hello", 600)) as generation:
            pieces = aiter(generation)
            first = await anext(pieces)
            loaded: list[TextModel] = []
            nursery.start_soon(replace, loaded)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(ask, "waits")
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert "being replaced" in old.obstacle
            assert (loaded, texts) == ([], {})
            rest = [piece async for piece in pieces]
            assert text_of([first, *rest]) == alone
        (new,) = loaded
        assert (old.pid, old.obstacle) == (None, "")
        assert new.pid is not None
        assert texts == {"waits": alone}
        assert list((await old.tokenize(["hello"]))[0]) == list((await new.tokenize(["hello"]))[0])
        assert old.pid is None
        for model in (old, new):
            await model.aclose()


async def test_old_model_answers_again_if_the_new_one_cannot_be_loaded(tiny_folder: Path) -> None:
    async with _server(tiny_folder) as server:
        old = await server.load()
        before, process = text_of(await made(old, greedy("hello", 40))), old.pid
        with pytest.raises(ModelFailure, match="cannot be loaded"):
            await server.load(reload="retire_first", device="NPU.7")
        assert old.obstacle == ""
        assert text_of(await made(old, greedy("hello", 40))) == before
        assert old.pid not in {None, process}
        await old.aclose()


async def test_old_model_answers_again_if_the_new_one_is_closed(tiny_folder: Path) -> None:
    async with _server(tiny_folder) as server:
        old = await server.load()
        before = text_of(await made(old, greedy("hello", 40)))
        await (await server.load(reload="retire_first")).aclose()
        assert text_of(await made(old, greedy("hello", 40))) == before
        assert old.pid is not None
        await old.aclose()
        first, second, third = [await server.load(reload="retire_first") for _ in range(3)]
        await second.aclose()
        assert text_of(await made(first, greedy("hello", 40))) == before
        assert (first.pid, third.pid is None) == (None, False)
        for model in (first, third):
            await model.aclose()


@pytest.mark.parametrize(
    ("reload", "free", "goes"), [("auto", 2**20, True), ("auto", 2**40, False), ("swap", 0, False)]
)
async def test_free_memory_decides_whether_the_old_model_is_retired_first(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, reload: str, free: int, *, goes: bool
) -> None:
    async with _server(tiny_folder) as server:
        old = await server.load()
        monkeypatch.setattr(loading, "_free_memory", lambda: free)
        new = await server.load(reload=reload)
        assert new.pid is not None
        assert (old.pid is None) is goes
        assert text_of(await made(old, greedy("hello", 20))) == text_of(await made(new, greedy("hello", 20)))
        for model in (old, new):
            await model.aclose()
