"""The library's batch: made, measured, warmed, and made again when it is broken."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino_genai as genai

from ovmstrio.core.generation import Grammar, GrammarKind, Sampling
from ovmstrio.inference.engine.sequences import configure

__all__ = ["GIB", "Pipeline", "PipelineOptions", "reason_of"]

# ----------------------------------------------------------------------
# The library's batch: made, measured, warmed, and made again when it is broken
# ----------------------------------------------------------------------

GIB: Final = 2**30
_BLOCK_TOKENS: Final = 32
_GPU_BLOCK_TOKENS: Final = 16
_MEASURED_BLOCKS: Final = 2
_DRAFT: Final = "draft_model"
_LOOKUP: Final = "prompt_lookup"
_PROPOSED: Final = 5
"""How many tokens are proposed at a time, unless the model or the request says otherwise."""
_LOOKED_UP: Final = 3
"""How many tokens are looked for in the prompt, likewise."""
_TOKENIZER: Final = {"INFERENCE_NUM_THREADS": 1}
"""What it does takes less time than handing it to other threads."""
_WARMING: Final = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "boolean"}')
_WARMING_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What is loaded, and how.

    Attributes:
        folder: the model, its tokenizer and its settings.
        device: where it runs.
        properties: of the device.
        cache_bytes: for keys and values.
        batched_tokens: how many tokens a step takes at most.
        texts: how many texts a step makes at most.
        splits_prompts: whether a step takes parts of prompts.
        caches_prefixes: whether what prompts have in common is computed once.
        draft_folder: of a second model, which proposes tokens; empty for none.
        draft_device: where that runs.
        looks_up: whether the prompt proposes tokens.
    """

    folder: str
    device: str = "CPU"
    properties: dict[str, Any] = field(default_factory=dict)
    cache_bytes: int = GIB
    batched_tokens: int = 256
    texts: int = 256
    splits_prompts: bool = True
    caches_prefixes: bool = True
    draft_folder: str = ""
    draft_device: str = ""
    looks_up: bool = False


class Pipeline:
    """One batch of the library's, and after :meth:`rebuild` another one with the same settings.

    Args:
        options: what is loaded.

    Attributes:
        tokenizer: the model's.
        blocks: how many blocks the cache of keys and values has.
        block_tokens: how many tokens a block has.

    Raises:
        RuntimeError: it cannot be loaded.
    """

    def __init__(self, options: PipelineOptions) -> None:
        self._options = options
        self.tokenizer: Any = None
        self.block_tokens = _GPU_BLOCK_TOKENS if "GPU" in options.device else _BLOCK_TOKENS
        self._batch = self._make()
        self.tokenizer = self._batch.get_tokenizer()
        self.blocks = self._count_blocks()
        whole = -(-options.cache_bytes // GIB) * GIB
        if whole != options.cache_bytes:
            # The library takes whole gigabytes, or blocks, whose size only it knows.
            self.blocks = max(1, self.blocks * options.cache_bytes // whole)
            self._remake()
        self._warm()

    @property
    def caches_prefixes(self) -> bool:
        """Whether what prompts have in common is computed once."""
        return self._options.caches_prefixes

    @property
    def batched_tokens(self) -> int:
        """How many tokens a step takes at most."""
        return self._options.batched_tokens

    def uncached(self, tokens: int) -> Pipeline:
        """Make another batch of the same model that computes all of each prompt, with room for so many tokens.

        Raises:
            RuntimeError: it cannot be loaded.
        """
        bytes_of_block = -(-self._options.cache_bytes // self.blocks)
        cache_bytes = -(-tokens // self.block_tokens) * bytes_of_block
        alone = replace(self._options, caches_prefixes=False, draft_folder="", looks_up=False)
        return Pipeline(replace(alone, cache_bytes=cache_bytes))

    def rebuild(self) -> None:
        """Make the batch again; no handle of the old one may be in use.

        Raises:
            RuntimeError: it cannot be loaded.
        """
        self._remake()
        self._warm()

    def _remake(self) -> None:
        # Two would need the memory twice.
        self._batch = None
        self._batch = self._make(self.blocks)

    def _make(self, blocks: int = 0) -> Any:
        options = self._options
        scheduler = genai.SchedulerConfig()
        if blocks:
            scheduler.num_kv_blocks = blocks
        else:
            scheduler.cache_size = -(-options.cache_bytes // GIB)
        scheduler.max_num_batched_tokens = options.batched_tokens
        scheduler.max_num_seqs = options.texts
        scheduler.dynamic_split_fuse = options.splits_prompts
        scheduler.enable_prefix_caching = options.caches_prefixes
        properties = dict(options.properties)
        if options.looks_up:
            properties[_LOOKUP] = True
        if options.draft_folder:
            properties[_DRAFT] = genai.draft_model(options.draft_folder, options.draft_device or options.device)
        if self.tokenizer is None:
            return genai.ContinuousBatchingPipeline(options.folder, scheduler, options.device, properties, _TOKENIZER)
        # With it goes what has been compiled of forms.
        return genai.ContinuousBatchingPipeline(options.folder, self.tokenizer, scheduler, options.device, **properties)

    def _count_blocks(self) -> int:
        """Tell how many blocks there are, of which the library only gives the part that is used."""
        config = self.defaults()
        config.max_new_tokens = 2
        config.ignore_eos = True
        handle = self.add(0, [0] * (self.block_tokens + 1), config)
        self.step()
        used: float = self._batch.get_metrics().cache_usage
        handle.cancel()
        self._drain()
        return round(100 * _MEASURED_BLOCKS / used)

    def _warm(self) -> None:
        """Make a few tokens in a form: the first one of a process takes much longer than all others."""
        config = configure(self.defaults(), Sampling(temperature=0), grammar=_WARMING)
        config.max_new_tokens = _WARMING_STEPS
        handle = self.add(0, [0], config)
        self._drain()
        del handle

    def _drain(self) -> None:
        while self.is_busy:
            self.step()

    def defaults(self) -> Any:
        """Give a configuration with the settings of the model's folder, which is the caller's to change."""
        config = self._batch.get_config()
        if self._options.draft_folder or self._options.looks_up:
            if not config.assistant_confidence_threshold:
                config.num_assistant_tokens = config.num_assistant_tokens or _PROPOSED
            if self._options.looks_up:
                config.max_ngram_size = config.max_ngram_size or _LOOKED_UP
        return config

    @property
    def is_busy(self) -> bool:
        """Whether there is something to be done by a step, be it to forget what was cancelled."""
        return bool(self._batch.has_non_finished_requests())

    def add(self, number: int, tokens: list[int], config: Any) -> Any:
        """Add a text to the batch from the next step on, and give its handle, which must be kept until its end.

        Raises:
            RuntimeError: the library does not take the configuration.
        """
        config.validate()
        return self._batch.add_request(number, ov.Tensor(np.array([tokens], np.int64)), config)

    def step(self) -> None:
        """Make the next token of each text, or read a part of their prompts.

        Raises:
            RuntimeError: the batch is broken, and has to be rebuilt.
        """
        self._batch.step()


# ----------------------------------------------------------------------
# What the library raises, in words for callers: without the places in its sources, and without its makers' folders
# ----------------------------------------------------------------------

_CHECK: Final = re.compile(r"(?s)^Check '(?P<check>.*?)' failed at \S+:\d+:\s*(?P<why>.*)$")
_LOGGED: Final = re.compile(r"(?s)^\[[0-9:]+\] \S+:\d+: (?P<why>.*)$")
_RAISED: Final = re.compile(r"(?s)^Exception from \S+:\d+:\s*(?P<why>.*)$")


def reason_of(error: BaseException) -> str:
    """Give the reason in an error of the library's."""
    text = str(error).strip()
    for _ in range(3):
        found = _CHECK.match(text) or _LOGGED.match(text) or _RAISED.match(text)
        if found is None:
            break
        text = found["why"].strip() or found.groupdict().get("check") or text
    return text or type(error).__name__
