"""An engine's end, its sleep and its poison: who is told, who goes on, and what is there again."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import trio

from ovmstrio.core.errors import InvalidField, ModelFailure, NotReady
from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.runtimes.generation.text_model import TextModel
from ovmstrio.work.processes import WorkerProcess
from tests.support.waits import WAIT_SECONDS
from tests.system.runtimes.generation.conftest import ServeTiny
from tests.system.runtimes.generation.test_text_model import greedy, made, text_of

ENDLESS = GenerationRequest("of the barn", Sampling(ignore_eos=True))


async def until_ready(model: TextModel) -> None:
    """Wait until requests are taken again."""
    with trio.fail_after(60):
        while True:
            try:
                await made(model, greedy("hello", 1))
            except NotReady:
                await trio.sleep(0.05)
            else:
                return


async def killed_midway(model: TextModel, number: signal.Signals = signal.SIGKILL) -> None:
    """Kill or stop the engine while it makes a text."""
    async with model.generate(ENDLESS) as generation:
        async for _ in generation:
            if model.pid is not None:
                os.kill(model.pid, number)


async def test_a_killed_engine_fails_its_streams_at_once_says_why_and_is_there_again(serve_tiny: ServeTiny) -> None:
    """Streams and new requests are told of a killed process; then another one answers as before."""
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
async def test_an_engine_that_is_stopped_is_killed_and_replaced(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    """Its streams end with the reason, within half a minute as engines are started, and the next engine answers."""
    if seconds is not None:
        short = partial(WorkerProcess, stopped_seconds=seconds)
        monkeypatch.setattr("ovmstrio.runtimes.generation.engine_process.WorkerProcess", short)
    async with serve_tiny() as model:
        before = text_of(await made(model, greedy("hello", 40)))
        with trio.fail_after(WAIT_SECONDS), pytest.raises(ModelFailure, match="was stopped"):
            await killed_midway(model, signal.SIGSTOP)
        await until_ready(model)
        assert text_of(await made(model, greedy("hello", 40))) == before


async def test_seven_neighbours_of_a_form_that_cannot_be_compiled_get_the_texts_they_get_alone(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema that the library cannot compile would break its step for ever: it is found out before it comes there."""
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


async def test_a_model_that_nobody_asks_has_no_process_and_the_next_request_waits_for_one(
    serve_tiny: ServeTiny,
) -> None:
    """Its memory is given back by the end of the process, and it answers as before when it is asked again."""
    async with serve_tiny(idle_unload_seconds=0.2) as model:
        first = text_of(await made(model, greedy("hello", 30)))
        with trio.fail_after(60):
            while model.pid is not None:  # noqa: ASYNC110 - nobody tells of it
                await trio.sleep(0.05)
        assert model.obstacle == ""
        assert text_of(await made(model, greedy("hello", 30))) == first


async def test_a_model_that_cannot_be_loaded_says_why(serve_tiny: ServeTiny) -> None:
    """What the library says is told, and nothing is left."""
    with pytest.raises(ModelFailure, match="cannot be loaded"):
        async with serve_tiny(device="NPU.7"):
            pytest.fail("it was loaded")
