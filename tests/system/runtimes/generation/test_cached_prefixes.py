"""What is told of prompts that were found in the cache of prefixes is what the library did, which tells nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.generation import Prompt
from ovmstrio.openvino.engine.cached_prefixes import CachedPrefixes
from ovmstrio.runtimes.generation.load_text_model import load_text_model
from ovmstrio.runtimes.generation.text_model import TextModel
from ovmstrio.runtimes.kind import LoadContext, lease_nothing
from tests.system.runtimes.generation.test_text_metrics import Registered
from tests.system.runtimes.generation.test_text_model import greedy, made

_PROGRAM: Final = """
import json, random, sys
import numpy as np, openvino as ov, openvino_genai as genai
from ovmstrio.openvino.engine.cached_prefixes import CachedPrefixes

folder = sys.argv[1]

def compare(blocks):
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks, scheduler.enable_prefix_caching = blocks, True
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
    prefixes, dice, earlier, told = CachedPrefixes(blocks, 32), random.Random(1), [], []
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
        told.append((prefixes.find(prompt), max(len(prompt) - computed - 1, 0)))
        text = prompt + tokens[-made:]
        prefixes.keep(text[:-1])
        earlier.append(text)
    return told

print(json.dumps([compare(int(blocks)) for blocks in sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def found_and_true(tiny_folder: Path) -> list[list[tuple[int, int]]]:
    """Compare 90 prompts with the library, with room for all of them and with little room."""
    command = [sys.executable, "-c", _PROGRAM, str(tiny_folder), "4000", "40"]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    pairs: list[list[tuple[int, int]]] = json.loads(done.stdout.splitlines()[-1])
    return pairs


def test_what_is_found_is_what_the_library_does_not_compute(found_and_true: list[list[tuple[int, int]]]) -> None:
    """Of 90 prompts that begin alike, or go on where others ended, to the token."""
    pairs = found_and_true[0]
    assert [found for found, _ in pairs] == [true for _, true in pairs]
    assert sum(true > 0 for _, true in pairs) > 60


def test_what_is_given_up_for_lack_of_room_is_told_with_few_mistakes(
    found_and_true: list[list[tuple[int, int]]],
) -> None:
    """Nine of ten are right where no two texts of the usual length fit beside three others."""
    pairs = found_and_true[1]
    assert sum(found == true for found, true in pairs) > 81
    assert 6 < sum(true > 0 for _, true in pairs) < 84


def test_a_text_that_goes_on_lends_its_full_blocks() -> None:
    """And when it has ended, the one that is not full as well, to the first who asks."""
    prefixes = CachedPrefixes(10, 4)
    prefixes.keep([1, 2, 3, 4, 5, 6], is_whole=False)
    assert prefixes.find([1, 2, 3, 4, 5, 6, 7]) == 4
    prefixes.keep([1, 2, 3, 4, 5, 6])
    assert [prefixes.find([1, 2, 3, 4, 5, 6, 7]) for _ in range(2)] == [6, 4]
    assert prefixes.find([1, 2, 3, 4]) == 3
    prefixes.clear()
    assert prefixes.find([1, 2, 3, 4, 5]) == 0


@asynccontextmanager
async def _measured(folder: Path, **settings: Any) -> AsyncIterator[tuple[TextModel, Registered]]:
    meters = Registered()
    spec = TextModelSpec(name="tiny", base_path=folder, path=folder, **{"cache_size": 0.002, **settings})
    with trio.fail_after(120):
        async with trio.open_nursery() as tasks:
            model = await load_text_model(spec, LoadContext(lease_nothing, tasks, meters=meters))
            yield model, meters
            await model.aclose()


async def _found(model: TextModel, prompt: Prompt) -> int:
    async with model.generate(greedy(prompt, 1)) as generation:
        async for _ in generation:
            pass
        return generation.cached_tokens


async def test_usage_tells_what_was_found_and_metrics_sum_it_up(tiny_folder: Path) -> None:
    """A prompt of 100 tokens finds nothing at first, and all but its last token when it comes again."""
    prompt = tuple(range(20, 120))
    async with _measured(tiny_folder) as (model, meters):
        assert [await _found(model, prompt) for _ in range(3)] == [0, 99, 99]
        assert meters.value("cached_prompt_tokens_total") == 198
        assert meters.value("prompt_tokens_total") == 300
    async with _measured(tiny_folder, enable_prefix_caching=False) as (model, _):
        assert [await _found(model, prompt) for _ in range(2)] == [0, 0]


async def test_texts_that_are_suspended_are_counted(tiny_folder: Path) -> None:
    """Of four that fill the cache each, all come to their ends, and three wait for the first; alone nobody does."""
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
