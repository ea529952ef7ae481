from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from prometheus_client import CollectorRegistry

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.core.callers import ALL_SCOPES, Caller, current_caller
from ovmstrio.core.generation import Prompt, Sampling
from ovmstrio.core.hooks import Collectors, Meters
from ovmstrio.inference.engine.batch import PrefixCacheModel
from ovmstrio.serving.kind import LoadContext, lease_nothing
from ovmstrio.text import load_text_model as loading
from ovmstrio.text.load_text_model import load_text_model
from ovmstrio.text.text_model import TextModel
from ovmstrio.util.container_limits import free_memory
from tests.support.served_text_models import greedy, made
from tests.support.tiny_llm import write_tiny_folder

_CONFIDENT: Final = Sampling(max_tokens=41, temperature=0, ignore_eos=True, assistant_confidence_threshold=0.9)
_PROGRAM: Final = """
import json, random, sys
import numpy as np, openvino as ov, openvino_genai as genai
from ovmstrio.inference.engine.batch import PrefixCacheModel

folder = sys.argv[1]

def compare(blocks):
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks, scheduler.enable_prefix_caching = blocks, True
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
    prefixes, dice, earlier, estimates = PrefixCacheModel(blocks, 32), random.Random(1), [], []
    some = lambda most: [dice.randrange(3, 260) for _ in range(dice.randrange(most))]
    begins = [some(2) + [dice.randrange(3, 260) for _ in range(300)] for _ in range(4)]
    for number in range(90):
        if earlier and dice.random() < 0.3:
            prompt = (dice.choice(earlier) + some(40))[:600]
        else:
            prompt = dice.choice(begins)[: dice.randrange(1, 300)] + some(80)
        config = pipeline.get_config()
        config.max_new_tokens = made = dice.randrange(1, 80)
        config.ignore_eos, config.do_sample, config.echo, config.logprobs = True, False, True, 1
        handle = pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config)
        tokens, scores = [], []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
                    scores += output.generated_log_probs
        # Of an echoed prompt the library gives the probabilities that it has computed, but for the first of them.
        computed = len(scores) - made
        estimates.append((prefixes.find(prompt)[0], max(len(prompt) - computed - 1, 0)))
        text = prompt + tokens[-made:]
        prefixes.keep(text[:-1])
        earlier.append(text)
    return estimates

print(json.dumps([compare(int(blocks)) for blocks in sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def found_and_true(tiny_folder: Path) -> list[list[tuple[int, int]]]:
    command = [sys.executable, "-c", _PROGRAM, str(tiny_folder), "4000", "40"]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    pairs: list[list[tuple[int, int]]] = json.loads(done.stdout.splitlines()[-1])
    return pairs


def test_cached_prefixes_are_those_that_openvino_does_not_compute(found_and_true: list[list[tuple[int, int]]]) -> None:
    pairs = found_and_true[0]
    assert [found for found, _ in pairs] == [true for _, true in pairs]
    assert sum(true > 0 for _, true in pairs) > 60


def test_evicted_prefixes_are_known_with_few_mistakes(found_and_true: list[list[tuple[int, int]]]) -> None:
    pairs = found_and_true[1]
    assert sum(found == true for found, true in pairs) > 81
    assert 6 < sum(true > 0 for _, true in pairs) < 84


def test_unfinished_text_lends_its_full_blocks() -> None:
    prefixes = PrefixCacheModel(10, 4)
    prefixes.keep([1, 2, 3, 4, 5, 6], is_whole=False)
    assert prefixes.find([1, 2, 3, 4, 5, 6, 7]) == (4, 4)
    prefixes.keep([1, 2, 3, 4, 5, 6])
    assert [prefixes.find([1, 2, 3, 4, 5, 6, 7]) for _ in range(2)] == [(6, 6), (4, 4)]
    assert prefixes.find([1, 2, 3, 4]) == (3, 3)
    prefixes.clear()
    assert prefixes.find([1, 2, 3, 4, 5]) == (0, 0)


def test_cached_tokens_are_told_apart_by_salt() -> None:
    prefixes = PrefixCacheModel(10, 4)
    prefixes.keep([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "a")
    prefixes.keep([1, 2, 3, 4, 0, 0, 0, 0], "b")
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert prefixes.find(prompt, "b") == (10, 4)
    assert prefixes.find(prompt, "a") == (8, 8)
    assert prefixes.find(prompt) == (8, 0)
    for number in range(100):
        prefixes.keep([1, 2, 3, 4], f"salt {number}")
    assert prefixes.find(prompt, "a") == (8, 0)
    assert prefixes.find(prompt, "salt 99") == (8, 4)


@asynccontextmanager
async def _measured(folder: Path, **settings: Any) -> AsyncIterator[tuple[TextModel, _Registered]]:
    meters = _Registered()
    spec = TextModelSpec(name="tiny", base_path=folder, path=folder, **{"cache_size": 0.002, **settings})
    with trio.fail_after(120):
        async with trio.open_nursery() as tasks:
            model = await load_text_model(spec, LoadContext(lease_nothing, tasks, meters=meters))
            yield model, meters
            await model.aclose()
    assert list(meters.registry.collect()) == []


async def _found(model: TextModel, prompt: Prompt) -> int:
    async with model.generate(greedy(prompt, 1)) as generation:
        async for _ in generation:
            pass
        return generation.cached_tokens


async def test_usage_and_metrics_report_cached_tokens(tiny_folder: Path) -> None:
    prompt = tuple(range(20, 120))
    async with _measured(tiny_folder) as (model, meters):
        assert [await _found(model, prompt) for _ in range(3)] == [0, 99, 99]
        assert meters.value("cached_prompt_tokens_total") == 198
        assert meters.value("prompt_tokens_total") == 300
    async with _measured(tiny_folder, enable_prefix_caching=False) as (model, _):
        assert [await _found(model, prompt) for _ in range(2)] == [0, 0]


async def test_proposed_and_accepted_tokens_are_counted(tiny_folder: Path, tmp_path: Path) -> None:
    precise = {"INFERENCE_PRECISION_HINT": "f32"}
    async with _measured(tiny_folder, draft_path=tiny_folder, plugin_config=precise) as (model, meters):
        # One token of the prompt, six steps of five proposals, and one of the last three.
        await made(model, greedy("hello", 41))
        assert meters.value("draft_tokens_total") == meters.value("accepted_draft_tokens_total") == 33
        assert meters.value("draft_acceptance_rate") == 1
        # The library does not tell how many tokens a draft model proposes while it is confident.
        await made(model, replace(greedy("hello", 41), sampling=_CONFIDENT))
        assert meters.value("draft_tokens_total") == 33
    other = write_tiny_folder(tmp_path, seed=1)
    async with _measured(tiny_folder, draft_path=other, plugin_config=precise) as (model, meters):
        pieces = await made(model, greedy("hello", 41))
        accepted = meters.value("accepted_draft_tokens_total")
        assert sum(piece.tokens for piece in pieces) == 41
        assert 0 <= accepted < meters.value("draft_tokens_total") / 2
        assert meters.value("draft_acceptance_rate") == accepted / meters.value("draft_tokens_total")


async def test_usage_tells_nothing_about_prompts_of_other_callers(tiny_folder: Path) -> None:
    prompt = tuple(range(20, 120))

    async def find(name: str | None, salt: str = "") -> int:
        caller = None if name is None else Caller(name, "key", ALL_SCOPES)
        token = current_caller.set(caller)
        try:
            async with model.generate(replace(greedy(prompt, 1), cache_salt=salt)) as generation:
                async for _ in generation:
                    pass
                return generation.cached_tokens
        finally:
            current_caller.reset(token)

    async with _measured(tiny_folder) as (model, meters):
        assert [await find("ann"), await find("ann")] == [0, 99]
        assert [await find("bob"), await find("bob")] == [0, 99]
        assert [await find("bob", "s"), await find("bob", "s"), await find("ann", "s")] == [0, 99, 0]
        assert [await find(None), await find(None), await find(None, "s"), await find(None, "s")] == [0, 99, 0, 99]
        # The library shares all blocks: the metric counts what it saved.
        assert meters.value("cached_prompt_tokens_total") == 99 * 10


async def test_preempted_texts_end_and_are_counted(tiny_folder: Path) -> None:
    async with _measured(tiny_folder, cache_size=0.0003, kv_overcommit=4.0) as (model, meters):
        most = model.limits.context_length
        assert most is not None
        asked = greedy("hello", most * 3 // 4)
        await made(model, asked)
        assert meters.value("preemptions_total") == 0
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(made, model, asked)
        assert meters.value("requests_finished_total", finish_reason="length") == 5
        assert meters.value("preemptions_total") >= 3


class _Registered(Meters):
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    @contextmanager
    def collecting(self, collectors: Collectors, name: str) -> Iterator[None]:
        assert name == ""
        for collector in collectors:
            self.registry.register(collector)
        yield
        for collector in collectors:
            self.registry.unregister(collector)

    def value(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"ovmstrio_llm_{name}", {"model_name": "tiny", **labels})
        assert value is not None, name
        return value


async def test_requests_tokens_and_times_are_counted(tiny_folder: Path) -> None:
    async with _measured(tiny_folder) as (model, meters):
        await made(model, greedy("hello", 20))
        assert meters.value("requests_running") == 0
        async with model.generate(greedy("hello", 1500)) as generation:
            await anext(aiter(generation))
        for reason in ("length", "cancelled"):
            assert meters.value("requests_finished_total", finish_reason=reason) == 1
        made_tokens = meters.value("generation_tokens_total")
        assert made_tokens - meters.value("cancelled_tokens_total") == 20
        assert meters.value("step_seconds_count") >= made_tokens
        for name, value in (
            ("prompt_tokens_total", 10),
            ("time_to_first_token_seconds_count", 2),
            ("queue_time_seconds_count", 2),
            ("kv_cache_bytes", round(0.002 * 2**30)),
            ("engine_restarts_total", 0),
        ):
            assert meters.value(name) == value


async def test_cache_without_a_configured_size_is_a_quarter_of_the_memory_left_to_the_container(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text("0::/pod\n")
    pod = tmp_path / "groups" / "pod"
    pod.mkdir(parents=True)
    for name, text in (("max", 700 * 2**20), ("current", 200 * 2**20), ("stat", f"inactive_file {12 * 2**20}")):
        (pod / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(loading, "free_memory", partial(free_memory, tmp_path / "groups", tmp_path / "own"))
    async with _measured(tiny_folder, cache_size=0) as (_, meters):
        assert meters.value("kv_cache_bytes") == 128 * 2**20


@pytest.fixture(scope="module")
def found(tiny_folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.batch_cases", str(tiny_folder)]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize(
    "case",
    [
        "that_begin_alike",
        "behind_a_long_prompt",
        "of_a_prompt_given_up",
        "that_go_on_from_beams",
        "that_begin_like_beams",
        "in_chunks",
        "that_are_equal",
    ],
)
def test_texts_of_a_batch_are_those_made_alone(found: dict[str, Any], case: str) -> None:
    assert found[case] == 0


def test_only_new_texts_of_a_common_prefix_wait_for_each_other(found: dict[str, Any]) -> None:
    assert found["that_start_together"] == [4, 1, 4]


def test_equal_prompts_start_together_once_their_beginning_is_cached(found: dict[str, Any]) -> None:
    assert found["equal_starts"] == [1, 3, 3]


def test_short_prompts_overtake_a_long_one(found: dict[str, Any]) -> None:
    assert found["overtaken"] == [0, 1, 1, 1, 4, 0]


def test_cancelled_text_leaves_the_batch_in_the_midst_of_its_prompt(found: dict[str, Any]) -> None:
    running, steps, tokens = found["given_up"]
    assert (running, tokens) == (0, 0)
    assert steps <= 2
