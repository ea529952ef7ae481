"""OpenVINO GenAI continuous-batching pipeline: creation, KV-cache sizing, warm-up and rebuild."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai as genai

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Grammar, GrammarKind, Sampling
from ovmstrio.inference.engine.lora import read_adapter
from ovmstrio.inference.engine.messages import LANGUAGE_MODEL_FILE
from ovmstrio.inference.engine.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from ovmstrio.core.generation import Image

# ----------------------------------------------------------------------
# Generation settings of a request
# ----------------------------------------------------------------------

NO_TOP_K: Final = 2**64 - 1
"""The library's value for no top-k limit."""


_SAME_NAMES: Final = (
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "length_penalty",
    "ignore_eos",
    "max_ngram_size",
)


_GRAMMARS: Final = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.JSON_OBJECT: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tags_config",
}


_ANY_OBJECT: Final = '{"type": "object"}'


def configure_generation(
    config: Any, sampling: Sampling, *, texts: int = 1, seed: int = 0, grammar: Grammar | None = None
) -> Any:
    """Set sampling parameters on ``config``, the model's defaults, and return it; RuntimeError if a value is invalid.

    The caller sets the length. ``texts`` is the number of sequences returned from beam search.
    """
    for name in _SAME_NAMES:
        value = getattr(sampling, name)
        if value is not None:
            setattr(config, name, value)
    _set_draft(config, sampling)
    if sampling.stop_token_ids:
        config.stop_token_ids = {*config.stop_token_ids, *sampling.stop_token_ids}
    if sampling.best_of > 1:
        config.num_beams = sampling.best_of
        config.num_return_sequences = texts
        config.do_sample = False
    else:
        _set_sampling(config, sampling, seed)
    if grammar is not None:
        set_grammar(config, grammar)
    return config


def has_output_penalty(config: Any) -> bool:
    """Return whether a penalty depends on which tokens of a sequence are generated, and which are its prompt."""
    return bool(config.frequency_penalty or config.presence_penalty)


def takes_best_tokens(config: Any) -> bool:
    """Return whether each generated token is the most likely one."""
    is_changed = has_output_penalty(config) or config.repetition_penalty != 1 or config.min_new_tokens
    return not (config.do_sample or config.num_beams > 1 or is_changed or config.structured_output_config)


def set_grammar(config: Any, grammar: Grammar) -> None:
    """Set the grammar of ``config``."""
    text = _ANY_OBJECT if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
    form = genai.StructuredOutputConfig()
    setattr(form, _GRAMMARS[grammar.kind], text)
    config.structured_output_config = form


def _set_sampling(config: Any, sampling: Sampling, seed: int) -> None:
    temperature = config.temperature if sampling.temperature is None else sampling.temperature
    config.do_sample = temperature > 0
    if not config.do_sample:
        return
    config.temperature = temperature
    config.rng_seed = seed
    if sampling.top_k is not None:
        config.top_k = sampling.top_k if sampling.top_k > 0 else NO_TOP_K


def _set_draft(config: Any, sampling: Sampling) -> None:
    """Set the number of draft tokens: fixed, or while the draft model's confidence is high enough."""
    if sampling.num_assistant_tokens is not None:
        config.num_assistant_tokens, config.assistant_confidence_threshold = sampling.num_assistant_tokens, 0.0
    elif sampling.assistant_confidence_threshold is not None:
        config.num_assistant_tokens = 0
        config.assistant_confidence_threshold = sampling.assistant_confidence_threshold


# ----------------------------------------------------------------------
# Pipeline: creation, KV-cache sizing, warm-up and rebuild
# ----------------------------------------------------------------------

GIB: Final = 2**30
_BLOCK_TOKENS: Final = 32
_GPU_BLOCK_TOKENS: Final = 16
_MEASURED_BLOCKS: Final = 2
_DRAFT: Final = "draft_model"
_EAGLE3: Final = "eagle3_mode"
_DFLASH: Final = "dflash_mode"
_TOKENIZERS: Final = tuple(
    f"openvino_{name}.{suffix}" for name in ("tokenizer", "detokenizer") for suffix in ("xml", "bin")
)
_LOOKUP: Final = "prompt_lookup"
_ADAPTERS: Final = "adapters"
_DRAFT_TOKENS: Final = 5  # default number of draft tokens
_LOOKUP_NGRAM: Final = 3  # default n-gram size of prompt lookup
_WARMING: Final = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "boolean"}')
_WARMING_STEPS: Final = 8
_MODEL_FILE: Final = "openvino_model.xml"
_MEASURED_TEXT: Final = "a b c d e f g h i j k l m n o p q r s t u v w x y z "
_UNCHANGED: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that changes nothing: with a template, the library adds no special tokens to a prompt."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Options of a pipeline."""

    folder: str  # model, tokenizer and generation settings
    device: str = "CPU"
    properties: dict[str, Any] = field(default_factory=dict)  # device properties
    cache_bytes: int = GIB  # size of the KV cache
    batched_tokens: int = 256  # maximum tokens per step
    texts: int = 256  # maximum sequences per step
    splits_prompts: bool = True  # whether a step may process part of a prompt (chunked prefill)
    caches_prefixes: bool = True  # whether the prefix cache is enabled
    draft_folder: str = ""  # draft model for speculative decoding; empty for none
    draft_device: str = ""  # device of the draft model
    draft_is_eagle3: bool = False  # whether the draft model is one of EAGLE-3; else detected
    looks_up: bool = False  # whether prompt lookup proposes tokens
    draft_tokens: int = 0  # number of tokens to propose per step; 0 for the default
    adapter: str = ""  # folder or file of a LoRA adapter; empty for none
    adapter_alpha: float = 1.0  # factor of the adapter's own scale


class ImagePrompt(NamedTuple):
    """Prompt of a model that takes images: text with their marks, and the encoded files."""

    text: str
    images: tuple[Image, ...] = ()
    adds_special_tokens: bool = False


class PromptModel:
    """Model without a batch: the library returns no logits, only the log-probability of each token.

    Raises:
        RuntimeError: the model cannot be loaded, or has unknown inputs.
    """

    def __init__(self, file: Path, device: str, properties: dict[str, Any]) -> None:
        compiled = ov.Core().compile_model(file, device, properties)
        self._inputs = {each.any_name for each in compiled.inputs}
        unknown = self._inputs - {"input_ids", "attention_mask", "position_ids", "beam_idx"}
        if unknown:
            raise RuntimeError(f"prompts cannot be scored: the model has unknown inputs {', '.join(sorted(unknown))}")
        self._request = compiled.create_infer_request()
        self._length = 0

    def begin(self) -> None:
        """Begin a prompt."""
        self._request.reset_state()
        self._length = 0

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Process the next tokens of a prompt; return their logits, shape [tokens, vocabulary]."""
        begin, self._length = self._length, self._length + len(tokens)
        values = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, self._length), np.int64),
            "position_ids": np.arange(begin, self._length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.infer({name: values[name] for name in self._inputs})
        found: npt.NDArray[np.float32] = self._request.get_tensor("logits").data[0].astype(np.float32)
        return found


class Pipeline:
    """Continuous-batching pipeline that can be rebuilt with the same settings.

    A pipeline that takes images computes embeddings of prompts, so it reads texts and no tokens.

    Raises:
        RuntimeError: the model cannot be loaded.
        ValueError: the adapter does not fit the model.
    """

    def __init__(self, options: PipelineOptions, tokenizer: Any = None) -> None:
        self._options = options
        self._adapter = read_adapter(Path(options.adapter), Path(options.folder)) if options.adapter else None
        self.has_eagle3_draft = bool(options.draft_folder) and _is_eagle3(options)
        # The library's tokenizer, which holds the compiled grammars.
        self.tokenizer = load_tokenizer(Path(options.folder)) if tokenizer is None else tokenizer
        self.block_tokens = _GPU_BLOCK_TOKENS if "GPU" in options.device else _BLOCK_TOKENS  # tokens per block
        self.takes_images = (Path(options.folder) / LANGUAGE_MODEL_FILE).is_file()
        self._batch = self._make()
        self.min_tokens = int(self._batch.get_config().min_new_tokens)  # default minimum of generated tokens
        self.chat_template: str = self.tokenizer.chat_template
        if self.takes_images:
            self.tokenizer.set_chat_template(_UNCHANGED)
        self.blocks = self._count_blocks()  # number of KV-cache blocks
        rounded_bytes = -(-options.cache_bytes // GIB) * GIB
        if rounded_bytes != options.cache_bytes or options.draft_folder:
            # The library accepts a size in full gigabytes, or in blocks whose size only it knows. A draft model gets
            # as many blocks only by their number.
            self.blocks = max(1, self.blocks * options.cache_bytes // rounded_bytes)
            self._remake()
        self._warm()

    @property
    def caches_prefixes(self) -> bool:
        """Return whether the prefix cache is enabled."""
        return self._options.caches_prefixes

    @property
    def batched_tokens(self) -> int:
        """Maximum tokens per step."""
        return self._options.batched_tokens

    @property
    def has_adapter(self) -> bool:
        """True if the model has a LoRA adapter."""
        return self._adapter is not None

    @property
    def has_draft(self) -> bool:
        """True if a draft model proposes tokens."""
        return bool(self._options.draft_folder)

    @property
    def proposes(self) -> bool:
        """True if a draft model or prompt lookup proposes tokens."""
        return self.has_draft or self._options.looks_up

    def draft_tokens(self, sampling: Sampling) -> int:
        """Return how many tokens are proposed per step of a sequence; 0 for none or an unknown number."""
        if not self.proposes:
            return 0
        config = self.defaults()
        _set_draft(config, sampling)
        return int(config.num_assistant_tokens or 0)

    def uncached(self, tokens: int) -> Pipeline:
        """Create a second pipeline without prefix cache, with room for a number of tokens."""
        bytes_of_block = -(-self._options.cache_bytes // self.blocks)
        cache_bytes = -(-tokens // self.block_tokens) * bytes_of_block
        options = replace(self._options, caches_prefixes=False, draft_folder="", looks_up=False)
        return Pipeline(replace(options, cache_bytes=cache_bytes), self.tokenizer)

    def prompt_model(self) -> PromptModel | None:
        """Load the model once more for the logits of prompts; None with an adapter, which only the library applies."""
        options = self._options
        file = Path(options.folder) / _MODEL_FILE
        return PromptModel(file, options.device, options.properties) if self._adapter is None else None

    def rebuild(self) -> None:
        """Recreate the pipeline; no handle of the old one may be in use."""
        self._remake()
        self._warm()

    def _remake(self) -> None:
        # Free the old one first: two would need the memory twice.
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
        if options.draft_folder:
            # With a draft model, prompts in several parts lead to wrong tokens in a batch (see :class:`Batch`).
            scheduler.max_num_batched_tokens = max(options.batched_tokens, blocks * self.block_tokens)
            scheduler.dynamic_split_fuse = False
        scheduler.enable_prefix_caching = options.caches_prefixes
        properties = dict(options.properties)
        if options.looks_up:
            properties[_LOOKUP] = True
        of_draft: dict[str, Any] = {}  # empty for those of the model, its adapter included
        if self._adapter is not None:
            # The matrices become constants of the graph: fusing needs uncompressed weights, and rounds them to bf16.
            scale, mode = options.adapter_alpha * self._adapter.scale, genai.AdapterConfig.Mode.MODE_STATIC
            properties[_ADAPTERS] = genai.AdapterConfig(genai.Adapter(self._adapter.file), scale, mode)
            of_draft = {"PERFORMANCE_HINT": "LATENCY", **options.properties}
        if options.draft_is_eagle3:
            of_draft = {**(of_draft or options.properties), _EAGLE3: True}
        if options.draft_folder:
            device = options.draft_device or options.device
            with _with_tokenizer(Path(options.draft_folder), Path(options.folder)) as folder:
                properties[_DRAFT] = genai.draft_model(folder, device, **of_draft)
        return genai.ContinuousBatchingPipeline(options.folder, self.tokenizer, scheduler, options.device, **properties)

    def _count_blocks(self) -> int:
        """Return the number of blocks, from the usage figure of one request: the library reports no total."""
        config = self.defaults()
        config.max_new_tokens = 2
        config.ignore_eos = True
        prompt: list[int] | ImagePrompt = [0] * (self.block_tokens + 1)
        measured = _MEASURED_BLOCKS
        if self.takes_images:
            prompt = ImagePrompt(_MEASURED_TEXT)
            tokens = self.tokenizer.encode(prompt.text, add_special_tokens=False).input_ids.shape[-1]
            measured = -(-tokens // self.block_tokens)
        handle = self.add(0, prompt, config)
        self.step()
        used: float = self._batch.get_metrics().cache_usage
        handle.cancel()
        self._drain()
        return round(100 * measured / used)

    def _warm(self) -> None:
        """Generate a few tokens with a grammar, as the first one in a process takes much longer."""
        config = configure_generation(self.defaults(), Sampling(temperature=0), grammar=_WARMING)
        config.max_new_tokens = _WARMING_STEPS
        # The draft models of EAGLE-3 need two tokens.
        handle = self.add(0, ImagePrompt(_MEASURED_TEXT) if self.takes_images else [0, 0], config)
        self._drain()
        del handle

    def _drain(self) -> None:
        while self.is_busy:
            self.step()

    def defaults(self) -> Any:
        """Return a modifiable copy of the model's generation settings, without minimum length and beam search."""
        config = self._batch.get_config()
        config.min_new_tokens = 0
        config.num_beams = config.num_beam_groups = config.num_return_sequences = 1
        config.diversity_penalty = 0.0
        if self.proposes:
            if self._options.draft_tokens or self.has_eagle3_draft:
                config.assistant_confidence_threshold = 0.0
            if not config.assistant_confidence_threshold:
                proposed = self._options.draft_tokens or config.num_assistant_tokens or _DRAFT_TOKENS
                # The proposals of a sequence must fit into a step.
                config.num_assistant_tokens = max(1, min(proposed, self._options.batched_tokens // 2))
            if self._options.looks_up:
                config.max_ngram_size = config.max_ngram_size or _LOOKUP_NGRAM
        return config

    @property
    def is_busy(self) -> bool:
        """Return whether a step has work, including the removal of cancelled requests."""
        return bool(self._batch.has_non_finished_requests())

    def add(self, number: int, prompt: list[int] | ImagePrompt, config: Any) -> Any:
        """Add a sequence and return its handle, which must be kept until its end.

        Raises:
            InvalidField: an image is damaged.
            RuntimeError: the request is rejected.
        """
        config.validate()
        if not isinstance(prompt, ImagePrompt):
            return self._batch.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config)
        config.apply_chat_template = not prompt.adds_special_tokens
        images = [_pixels_of(image) for image in prompt.images]
        try:
            return self._batch.add_request(number, prompt.text, images, config)
        finally:
            # The library appends the tokens of all prompts to a history, which only this call clears.
            self._batch.finish_chat()

    def step(self) -> None:
        """Run one step: prefill or the next token of each sequence; RuntimeError requires :meth:`rebuild`."""
        self._batch.step()


def _is_eagle3(options: PipelineOptions) -> bool:
    """Return whether a draft model is one of EAGLE-3; ValueError if it can be none of the supported draft models."""
    folder = Path(options.draft_folder)
    model = ov.Core().read_model(folder / "openvino_model.xml")
    if model.has_rt_info(_DFLASH):
        raise ValueError(f"draft model {folder}: DFlash is not supported, use EAGLE-3 or a smaller language model")
    is_eagle3 = options.draft_is_eagle3 or bool(model.has_rt_info(_EAGLE3))
    if not is_eagle3 and not (folder / _TOKENIZERS[0]).is_file():
        raise ValueError(f"draft model {folder}: expected {_TOKENIZERS[0]}, or a model of EAGLE-3")
    return is_eagle3


@contextmanager
def _with_tokenizer(folder: Path, other: Path) -> Iterator[Path]:
    """Yield a folder, or links to its files and to the tokenizer of another model, which grammars need."""
    if (folder / _TOKENIZERS[0]).is_file():
        yield folder
        return
    with TemporaryDirectory(prefix="ovmstrio-draft-") as made:
        tokenizers = (other.absolute() / name for name in _TOKENIZERS)
        for file in (*folder.absolute().iterdir(), *tokenizers):
            (Path(made) / file.name).symlink_to(file)
        yield Path(made)


def _pixels_of(image: Image) -> ov.Tensor:
    from ovmstrio.encoding.image_files import ImageFileError, decoded_upright  # noqa: PLC0415 - needs Pillow

    try:
        return ov.Tensor(np.asarray(decoded_upright(image.source)))  # type: ignore[arg-type]  # loaded
    except ImageFileError as error:
        raise InvalidField(f"the image cannot be read: {error}", field=image.field) from error


_CHECK: Final = re.compile(r"(?s)^Check '(?P<check>.*?)' failed at \S+:\d+:\s*(?P<why>.*)$")
_LOGGED: Final = re.compile(r"(?s)^\[[0-9:]+\] \S+:\d+: (?P<why>.*)$")
_RAISED: Final = re.compile(r"(?s)^Exception from \S+:\d+:\s*(?P<why>.*)$")


def library_error_message(error: BaseException) -> str:
    """Return the message of a library error without source positions."""
    text = str(error).strip()
    for _ in range(3):
        found = _CHECK.match(text) or _LOGGED.match(text) or _RAISED.match(text)
        if found is None:
            break
        text = found["why"].strip() or found.groupdict().get("check") or text
    return text or type(error).__name__
