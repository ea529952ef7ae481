"""What a configuration says of a model that makes text, vectors or scores of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.generation import Task

__all__ = ["PROMPT_LOOKUP", "TextModelSpec"]

PROMPT_LOOKUP: Final = "prompt_lookup"
"""What the library calls it in its properties."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Speed = Annotated[float, Field(gt=0, le=100)]


class TextModelSpec(ServableSpec):
    """One such model, which has the one version 1.

    Attributes:
        path: a folder as openvino-genai reads it, or a ``.gguf`` file; absolute.
        task: what it does.
        device: where it runs.
        plugin_config: properties of the device, and what the pipeline takes beside them, such as ``prompt_lookup``.
        cache_dir: where what is made of files once is kept; None for the server's own place.
        max_num_batched_tokens: how many tokens a step takes at most, which bounds its length.
        cache_size: how many GB (2**30 bytes) the cache of keys and values has; 0 for a quarter of the free memory.
        max_num_seqs: how many texts are made in one step at most.
        dynamic_split_fuse: whether a step takes parts of prompts and single tokens together.
        enable_prefix_caching: whether what prompts have in common is computed once.
        best_of_limit: how many beams, and texts, one request may ask for.
        max_tokens_limit: how many tokens an answer may have; None for as many as the context holds.
        tool_parser: what finds calls of tools in the text; empty for what its template tells, ``none`` for nothing.
        reasoning_parser: what finds reasoning in the text; likewise.
        enable_tool_guided_generation: whether calls of tools are made to fit their parameters' schemas.
        chat_template_mode: what renders chat templates, Jinja or the library's own (``MINJA``).
        pooling: which vectors of a text become its embedding.
        normalize: whether embeddings have the length 1.
        truncate: whether an input that is too long is cut, rather than refused.
        max_allowed_chunks: how many pieces of documents one call of a reranker may have.
        voices: files of speaker embeddings, by the names of those who speak so.
        speed_min: how slow a request may have a text spoken, 1 for as the voice does.
        speed_max: how fast.
        enable_word_timestamps: whether times of words are told of speech, which takes longer.
        max_queue: how many requests wait for room at most.
        kv_overcommit: how much of the cache is promised to requests, 1 for what there is.
        draft_path: a second, smaller model of the same vocabulary, as ``path``, that proposes tokens for the first to
            check; None for none.
        draft_device: where that runs; empty for where the first does.
        reload: whether a new version is loaded beside the old one (``swap``), or after that has given its memory back
            (``retire_first``); ``auto`` decides by the memory that is free.
        idle_unload_seconds: after how long without a request its memory is given back; 0 for never.
    """

    kind: ClassVar[str] = "text model"
    queues_itself: ClassVar[bool] = True

    path: Path
    task: Task = Task.TEXT_GENERATION
    device: str = "CPU"
    plugin_config: dict[str, Any] = Field(default_factory=dict)
    cache_dir: Path | None = None
    max_num_batched_tokens: Count = 256
    cache_size: Annotated[float, Field(ge=0, le=2**20)] = 0
    max_num_seqs: Count = 256
    dynamic_split_fuse: bool = True
    enable_prefix_caching: bool = True
    best_of_limit: Count = 20
    max_tokens_limit: Count | None = None
    tool_parser: str = ""
    reasoning_parser: str = ""
    enable_tool_guided_generation: bool = False
    chat_template_mode: Literal["JINJA", "MINJA"] = "JINJA"
    pooling: Literal["CLS", "LAST", "MEAN"] = "CLS"
    normalize: bool = True
    truncate: bool = False
    max_allowed_chunks: Count = 10_000
    enable_word_timestamps: bool = False
    voices: dict[str, Path] = Field(default_factory=dict)
    speed_min: Speed = 0.25
    speed_max: Speed = 4.0
    max_queue: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    kv_overcommit: Annotated[float, Field(gt=0, le=100)] = 1.0
    draft_path: Path | None = None
    draft_device: str = ""
    reload: Literal["auto", "swap", "retire_first"] = "auto"
    idle_unload_seconds: Annotated[float, Field(ge=0)] = 0

    def loaded_settings(self) -> dict[str, Any]:
        """Give the settings of what is loaded, the room for those that wait among them: whoever makes texts has it."""
        return {**super().loaded_settings(), "max_queue": self.max_queue}

    @property
    def looks_up(self) -> bool:
        """Whether the prompt proposes tokens for what comes, by which the library calls it."""
        return str(self.plugin_config.get(PROMPT_LOOKUP, "")).lower() in {"true", "1"}
