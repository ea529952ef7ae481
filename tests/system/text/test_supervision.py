from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import trio
import trio.testing

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.core.errors import InvalidField, ModelFailure, NotReady
from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.isolation.worker_process import WorkerProcess
from ovmstrio.serving.kind import LoadContext, lease_nothing
from ovmstrio.text import load_text_model as loading
from ovmstrio.text.engine_sharing import create_engine
from ovmstrio.text.load_text_model import load_text_model
from ovmstrio.text.text_model import TextModel
from tests.support.served_text_models import greedy, made, text_of
from tests.support.waits import WAIT_SECONDS, until_async
from tests.system.text.conftest import ServeTiny

ENDLESS = GenerationRequest("of the barn", Sampling(ignore_eos=True))


async def until_ready(model: TextModel) -> None:
    with trio.fail_after(60):
        while True:
            try:
                await made(model, greedy("hello", 1))
            except NotReady:
                await trio.sleep(0.05)
            else:
                return


async def killed_midway(model: TextModel, number: signal.Signals = signal.SIGKILL) -> None:
    async with model.generate(ENDLESS) as generation:
        async for _ in generation:
            if model.pid is not None:
                os.kill(model.pid, number)


async def test_killed_engine_fails_its_streams_with_the_reason_and_is_replaced(serve_tiny: ServeTiny) -> None:
    async with serve_tiny() as model:
        before = text_of(await made(model, greedy("hello", 40)))
        with pytest.raises(ModelFailure, match="SIGKILL"):
            await killed_midway(model)
        assert "SIGKILL" in model.unready_reason
        with pytest.raises(NotReady, match="SIGKILL"):
            await made(model, greedy("hello", 1))
        await until_ready(model)
        assert model.unready_reason == ""
        assert text_of(await made(model, greedy("hello", 40))) == before


@pytest.mark.parametrize("seconds", [0.8, pytest.param(None, marks=pytest.mark.slow)])
async def test_stopped_engine_is_killed_and_replaced(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    if seconds is not None:
        short = partial(WorkerProcess, stopped_seconds=seconds)
        monkeypatch.setattr("ovmstrio.text.engine_process.WorkerProcess", short)
    async with serve_tiny() as model:
        before = text_of(await made(model, greedy("hello", 40)))
        with trio.fail_after(WAIT_SECONDS), pytest.raises(ModelFailure, match="was stopped"):
            await killed_midway(model, signal.SIGSTOP)
        await until_ready(model)
        assert text_of(await made(model, greedy("hello", 40))) == before


async def test_form_that_cannot_be_compiled_changes_no_other_text(serve_tiny: ServeTiny) -> None:
    prompts = [f"the {number} inn" for number in range(7)]
    poison = GenerationRequest("hello", grammar=Grammar(GrammarKind.REGEX, "(nonsense"))
    texts: dict[str, str] = {}

    async def ask(model: TextModel, prompt: str) -> None:
        texts[prompt] = text_of(await made(model, greedy(prompt, 200)))

    # bfloat16 would round numbers in other ways in other batches, which changes texts of noise.
    async with serve_tiny(plugin_config=_PRECISE) as model:
        alone = {prompt: text_of(await made(model, greedy(prompt, 200))) for prompt in prompts}
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, model, prompt)
            async with model.generate(greedy(prompts[0], 200)) as generation:
                async for _ in generation:
                    break
            with pytest.raises(InvalidField, match="parenthesis is not closed") as caught:
                await made(model, poison)
        assert caught.value.field == "response_format"
        assert texts == alone
        assert model.facts["engines started again"] == 0


async def test_idle_model_has_no_process_until_the_next_request(serve_tiny: ServeTiny) -> None:
    async with serve_tiny(idle_unload_seconds=0.2) as model:
        first = text_of(await made(model, greedy("hello", 30)))
        await until_async(lambda: model.pid is None)
        assert model.unready_reason == ""
        assert text_of(await made(model, greedy("hello", 30))) == first


async def test_shared_engine_is_identified_by_its_load_settings_and_its_failure_is_reported() -> None:
    shown, refused = list[str](), list[str]()
    sharing: Any = SimpleNamespace(
        row=0, rows=1, owner=lambda _: None, set_load_error=lambda key, _: refused.append(key)
    )

    def show(key: str, _: Any) -> nullcontext[None]:
        shown.append(key)
        return nullcontext()

    sharing.exported = show
    spec = TextModelSpec(name="m", base_path=Path("/m"), path=Path("/m"))
    for each in (spec, spec.model_copy(update={"max_concurrency": 3}), spec.model_copy(update={"device": "GPU"})):
        engine = create_engine(sharing, each, {}, lambda _: None, lambda _: None, program="ovmstrio.no_such_program")
        with trio.fail_after(WAIT_SECONDS), pytest.raises(BaseExceptionGroup):
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
    first, second, third = shown
    assert first == second != third
    assert refused == shown


_PRECISE: Final = {"INFERENCE_PRECISION_HINT": "f32"}


class _Server:
    def __init__(self, folder: Path, tasks: trio.Nursery) -> None:
        self._folder = folder
        self._context = LoadContext(lease_nothing, tasks)
        self.models: list[TextModel] = []

    async def load(self, **settings: Any) -> TextModel:
        settings = {"cache_size": 0.002, "plugin_config": _PRECISE, **settings}
        spec = TextModelSpec(name="tiny", base_path=self._folder, path=self._folder, **settings)
        self.models.append(await load_text_model(spec, self._context))
        return self.models[-1]


@asynccontextmanager
async def _server(folder: Path) -> AsyncIterator[_Server]:
    with trio.fail_after(120):
        async with trio.open_nursery() as tasks:
            server = _Server(folder, tasks)
            yield server
            for model in server.models:
                await model.aclose()


async def _text(model: TextModel, tokens: int = 40) -> str:
    return text_of(await made(model, greedy("hello", tokens)))


async def test_old_model_ends_its_texts_before_the_new_one_is_loaded(tiny_folder: Path) -> None:
    texts: dict[str, str] = {}
    async with _server(tiny_folder) as server:
        old = await server.load()
        alone = await _text(old, 600)

        async def ask(name: str) -> None:
            texts[name] = await _text(old, 600)

        async with trio.open_nursery() as nursery, old.generate(greedy("hello", 600)) as generation:
            pieces = aiter(generation)
            first = await anext(pieces)
            nursery.start_soon(partial(server.load, reload="retire_first"))
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(ask, "waits")
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert "being reloaded" in old.unready_reason
            assert (server.models, texts) == ([old], {})
            rest = [piece async for piece in pieces]
            assert text_of([first, *rest]) == alone
        _, new = server.models
        assert (old.pid, old.unready_reason) == (None, "")
        assert new.pid is not None
        assert texts == {"waits": alone}
        assert list((await old.tokenize(["hello"]))[0]) == list((await new.tokenize(["hello"]))[0])
        assert old.pid is None


async def test_old_model_answers_again_if_the_new_one_cannot_be_loaded(tiny_folder: Path) -> None:
    async with _server(tiny_folder) as server:
        old = await server.load()
        before, process = await _text(old), old.pid
        with pytest.raises(ModelFailure, match="cannot be loaded"):
            await server.load(reload="retire_first", device="NPU.7")
        assert old.unready_reason == ""
        assert await _text(old) == before
        assert old.pid not in {None, process}


async def test_old_model_answers_again_if_the_new_one_is_closed(tiny_folder: Path) -> None:
    async with _server(tiny_folder) as server:
        old = await server.load()
        before = await _text(old)
        await (await server.load(reload="retire_first")).aclose()
        assert await _text(old) == before
        assert old.pid is not None
        await old.aclose()
        first, second, third = [await server.load(reload="retire_first") for _ in range(3)]
        await second.aclose()
        assert await _text(first) == before
        assert (first.pid, third.pid is None) == (None, False)


@pytest.mark.parametrize(
    ("reload", "free", "goes"), [("auto", 2**20, True), ("auto", 2**40, False), ("swap", 0, False)]
)
async def test_free_memory_decides_whether_the_old_model_is_retired_first(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, reload: str, free: int, *, goes: bool
) -> None:
    async with _server(tiny_folder) as server:
        old = await server.load()
        monkeypatch.setattr(loading, "free_memory", lambda: free)
        new = await server.load(reload=reload)
        assert new.pid is not None
        assert (old.pid is None) is goes
        assert text_of(await made(old, greedy("hello", 20))) == text_of(await made(new, greedy("hello", 20)))
