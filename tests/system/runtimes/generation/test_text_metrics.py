"""Figures of a model that makes text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import trio
from prometheus_client import CollectorRegistry

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.hooks import Collectors, Meters
from ovmstrio.runtimes.generation.load_text_model import load_text_model
from ovmstrio.runtimes.kind import LoadContext, lease_nothing
from tests.system.runtimes.generation.test_text_model import greedy, made


class Registered(Meters):
    """Shows families in a registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def collecting(self, collectors: Collectors, name: str) -> AbstractContextManager[None]:
        """Show what collectors give."""
        assert name == ""
        return self._collecting(collectors)

    @contextmanager
    def _collecting(self, collectors: Collectors) -> Iterator[None]:
        for collector in collectors:
            self.registry.register(collector)
        yield
        for collector in collectors:
            self.registry.unregister(collector)

    def value(self, name: str, **labels: str) -> float:
        """Give a value of the model's."""
        value = self.registry.get_sample_value(f"ovmstrio_llm_{name}", {"model_name": "tiny", **labels})
        assert value is not None, name
        return value


async def test_tokens_ends_and_times_are_counted_under_the_models_name(tiny_folder: Path) -> None:
    """Every request is counted once by why it ended, and every token once."""
    meters = Registered()
    spec = TextModelSpec(name="tiny", base_path=tiny_folder, path=tiny_folder, cache_size=0.002)
    with trio.fail_after(120):
        async with trio.open_nursery() as tasks:
            model = await load_text_model(spec, LoadContext(lease_nothing, tasks, meters=meters))
            await made(model, greedy("hello", 20))
            assert meters.value("requests_running") == 0
            async with model.generate(greedy("hello", 1500)) as generation:
                await anext(aiter(generation))
            assert meters.value("requests_finished_total", finish_reason="length") == 1
            assert meters.value("requests_finished_total", finish_reason="cancelled") == 1
            assert meters.value("prompt_tokens_total") == 10
            made_tokens = meters.value("generation_tokens_total")
            assert made_tokens - meters.value("cancelled_tokens_total") == 20
            assert meters.value("time_to_first_token_seconds_count") == 2
            assert meters.value("queue_time_seconds_count") == 2
            assert meters.value("step_seconds_count") >= made_tokens
            assert meters.value("kv_cache_bytes") == round(0.002 * 2**30)
            assert meters.value("engine_restarts_total") == 0
            await model.aclose()
    assert list(meters.registry.collect()) == []
