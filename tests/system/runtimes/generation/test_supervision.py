from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import InvalidField, ModelFailure, NotReady, ServerError
from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.runtimes.generation.sharing.choosing_engine import engine_of
from ovmstrio.runtimes.generation.text_model import TextModel
from ovmstrio.work.processes import WorkerProcess
from tests.support.served_text_models import greedy, made, text_of
from tests.support.waits import WAIT_SECONDS
from tests.system.runtimes.generation.conftest import ServeTiny

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
        assert "SIGKILL" in model.obstacle
        with pytest.raises(NotReady, match="SIGKILL"):
            await made(model, greedy("hello", 1))
        await until_ready(model)
        assert model.obstacle == ""
        assert text_of(await made(model, greedy("hello", 40))) == before


@pytest.mark.parametrize("seconds", [0.8, pytest.param(None, marks=pytest.mark.slow)])
async def test_stopped_engine_is_killed_and_replaced(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    if seconds is not None:
        short = partial(WorkerProcess, stopped_seconds=seconds)
        monkeypatch.setattr("ovmstrio.runtimes.generation.engine_process.WorkerProcess", short)
    async with serve_tiny() as model:
        before = text_of(await made(model, greedy("hello", 40)))
        with trio.fail_after(WAIT_SECONDS), pytest.raises(ModelFailure, match="was stopped"):
            await killed_midway(model, signal.SIGSTOP)
        await until_ready(model)
        assert text_of(await made(model, greedy("hello", 40))) == before


async def test_form_that_cannot_be_compiled_changes_no_other_text(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"the {number} inn" for number in range(7)]
    poison = GenerationRequest("hello", grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'))
    texts: dict[str, str] = {}
    # Most such forms are refused before; this is about the others.
    monkeypatch.setattr("ovmstrio.runtimes.generation.output_reading.check_grammar", lambda _: None)

    async def ask(model: TextModel, prompt: str) -> None:
        texts[prompt] = text_of(await made(model, greedy(prompt, 200)))

    # Texts of noise hang on the last bits of numbers, which shorter numbers round away in ways of their own.
    async with serve_tiny(plugin_config={"INFERENCE_PRECISION_HINT": "f32"}) as model:
        alone = {prompt: text_of(await made(model, greedy(prompt, 200))) for prompt in prompts}
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, model, prompt)
            async with model.generate(greedy(prompts[0], 200)) as generation:
                async for _ in generation:
                    break
            with pytest.raises(InvalidField, match="nonsense") as caught:
                await made(model, poison)
        assert caught.value.field == "response_format"
        assert texts == alone
        assert model.facts["engines started again"] == 0


async def test_idle_model_has_no_process_until_the_next_request(
    serve_tiny: ServeTiny,
) -> None:
    async with serve_tiny(idle_unload_seconds=0.2) as model:
        first = text_of(await made(model, greedy("hello", 30)))
        with trio.fail_after(60):
            while model.pid is not None:  # noqa: ASYNC110 - nobody tells of it
                await trio.sleep(0.05)
        assert model.obstacle == ""
        assert text_of(await made(model, greedy("hello", 30))) == first


SECONDS = 600


class _RecordedKeys:
    """Notes the keys that engines are shown by."""

    row, rows = 0, 1

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.refused: list[tuple[str, ServerError]] = []

    def owner(self, _: str) -> None:
        return None

    def shown(self, key: str, _: Any) -> nullcontext[None]:
        self.keys.append(key)
        return nullcontext()

    def refuse(self, key: str, error: ServerError) -> None:
        self.refused.append((key, error))


async def test_shared_engine_is_identified_by_its_load_settings_and_its_failure_is_reported() -> None:
    sharing = _RecordedKeys()
    spec = TextModelSpec(name="m", base_path=Path("/m"), path=Path("/m"))
    for each in (spec, spec.model_copy(update={"max_concurrency": 3}), spec.model_copy(update={"device": "GPU"})):
        engine = engine_of(
            cast("Any", sharing), each, {}, lambda _: None, lambda _: None, program="ovmstrio.no_such_program"
        )
        with trio.fail_after(SECONDS), pytest.raises(BaseExceptionGroup):
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
    first, second, third = sharing.keys
    assert first == second != third
    assert [key for key, _ in sharing.refused] == sharing.keys
