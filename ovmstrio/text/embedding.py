"""Embedding and rerank models, which run on OpenVINO in the server process, with dynamic batching of token rows.

Rows of similar length share an inference, to limit padding.  A request with many rows joins several batches, a few at a
time, so that later requests are not blocked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import (
    ConfigError,
    ContextExceeded,
    ErrorList,
    InvalidField,
    Overloaded,
    Problem,
    QueueTimeExceeded,
    QueueTimeout,
)
from ovmstrio.core.generation import Embeddings, GenerationLimits, Padding, Task, TokenIds
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.service import OPTION, Detection
from ovmstrio.core.tensor import Array
from ovmstrio.inference.compile import ModelFile
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import CrashProbe, probe_model_of
from ovmstrio.inference.network import Network
from ovmstrio.inference.text_models import (
    CompiledTokenizer,
    SpecialTokens,
    SpecialTokenTemplate,
    compile_embedder,
    compile_scorer,
    compile_tokenizer,
)
from ovmstrio.serving.batching import Batcher, BatchOptions
from ovmstrio.util.load_limit import run_load
from ovmstrio.util.regular_files import read_regular_bytes, read_regular_text
from ovmstrio.util.truncation import (
    AT_ONCE,
    MAX_TOKENIZED_CHARACTERS,
    encode_text,
    has_enough_tokens,
    max_characters,
    prefix_lengths,
    weight_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.generation import TokenRow
    from ovmstrio.core.hooks import ServableHooks
    from ovmstrio.serving.kind import LoadContext

# ----------------------------------------------------------------------
# Tokenizer
# ----------------------------------------------------------------------

TokenArray = npt.NDArray[np.int64]
"""Token ids of one text."""

_NO_TOKENS: Final = np.empty(0, np.int64)


class AsyncTokenizer:
    """Tokenizer of a model; runs on OpenVINO's threads, not on the event loop.

    Args:
        network: the compiled ragged tokenizer.
        special_tokens: templates of special tokens.
        pad_id: padding token.
    """

    def __init__(self, network: Network, special_tokens: SpecialTokens, pad_id: int) -> None:
        self.special_tokens = special_tokens
        self.pad_id = pad_id
        self._network = network

    async def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the tokens of each text, without special tokens.

        Raises:
            ModelFailure: OpenVINO failed.
        """
        result: list[TokenArray] = [_NO_TOKENS] * len(texts)
        for part in split_by_size(texts):
            # The tokenizer takes no empty texts.
            numbers = [number for number in part if texts[number]]
            encoded = await self._encode_batch([texts[number] for number in numbers]) if numbers else []
            for number, tokens in zip(numbers, encoded, strict=True):
                result[number] = tokens
        return result

    async def encode_within(self, texts: Sequence[str], limit: int, *, cuts_left: bool = False) -> list[TokenArray]:
        """Return the tokens of each text, or of a prefix if the text clearly has more than ``limit`` tokens.

        The first ``limit`` tokens of the result are those of the text, and the result has at most ``limit`` tokens only
        if the text does.  So the work is bounded by ``limit`` and not by the length of a text.  With ``cuts_left``, the
        same holds for suffixes and last tokens.

        Raises:
            ModelFailure: OpenVINO failed.
        """
        made: list[TokenArray] = [_NO_TOKENS] * len(texts)
        lengths = [prefix_lengths(len(text), limit) for text in texts]
        left = list(range(len(texts)))
        while left:
            sizes = [next(lengths[number]) for number in left]
            cut_texts = [
                texts[number][-size:] if cuts_left and size else texts[number][:size]
                for number, size in zip(left, sizes, strict=True)
            ]
            for number, tokens in zip(left, await self.encode(cut_texts), strict=True):
                made[number] = tokens
            left = [
                number
                for number, size in zip(left, sizes, strict=True)
                if size < len(texts[number]) and not has_enough_tokens(len(made[number]), limit)
            ]
        return made

    async def _encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        is_large = sum(map(len, texts)) > AT_ONCE
        join = partial(_concatenate, texts)
        inputs = await trio.to_thread.run_sync(join) if is_large else join()
        first, last, tokens = await self._network.infer(inputs)
        if not tokens.size:
            # The tokenizer returns one row if all texts are empty after normalization.
            return [_NO_TOKENS] * len(texts)
        wide = tokens[0].astype(np.int64)
        return [wide[begin:end] for begin, end in zip(first.tolist(), last.tolist(), strict=True)]

    def padded(self, rows: Sequence[TokenArray], length: int, side: Padding) -> list[TokenArray]:
        """Pad rows shorter than ``length``."""
        made = []
        for row in rows:
            missing = max(0, length - len(row))
            where = (missing, 0) if side is Padding.LEFT else (0, missing)
            made.append(np.pad(row, where, constant_values=self.pad_id))
        return made


def _concatenate(texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return the begins and ends of texts in their concatenated bytes, and the bytes."""
    # JSON can contain lone surrogates, which are not encodable.
    written = [encode_text(text) for text in texts]
    ends = np.fromiter(accumulate(map(len, written)), np.int32, len(written))
    begins = np.concatenate((np.zeros(1, np.int32), ends[:-1]))
    return begins, ends, np.frombuffer(b"".join(written), np.uint8)


def split_by_size(texts: Sequence[str]) -> Iterator[list[int]]:
    """Divide texts among tokenizer calls, by position."""
    part: list[int] = []
    size = 0
    for number, text in enumerate(texts):
        if part and size + len(text) > AT_ONCE:
            yield part
            part, size = [], 0
        part.append(number)
        size += len(text)
    if part:
        yield part


def add_special_tokens_to(template: SpecialTokenTemplate, *texts: TokenArray) -> TokenArray:
    """Return the tokens of texts with a template's special tokens."""
    parts: list[Any] = [template.marks[0]]
    for text, suffix in zip(texts, template.marks[1:], strict=True):
        parts += [text, suffix]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def token_types(template: SpecialTokenTemplate, *texts: TokenArray) -> TokenArray:
    """Return the token types for :func:`add_special_tokens_to`."""
    parts: list[TokenArray] = [np.array(template.special_token_types[0], np.int64)]
    for text, kind, suffix in zip(texts, template.types, template.special_token_types[1:], strict=True):
        parts += [np.full(len(text), kind, np.int64), np.array(suffix, np.int64)]
    return np.concatenate(parts)


def truncate_tokens(tokens: TokenArray, room: int, *, left: bool) -> TokenArray:
    """Truncate tokens to ``room``, at the left or right end."""
    if len(tokens) <= room:
        return tokens
    return tokens[len(tokens) - room :] if left else tokens[:room]


# ----------------------------------------------------------------------
# Row batching
# ----------------------------------------------------------------------

_BATCH_TOKENS: Final = 1024
"""From about 500 tokens on, joining rows gains nothing on a CPU, and other requests wait longer."""
_MIN_WIDTH: Final = 16


class Row(NamedTuple):
    """Token ids of one model input, and their types (None: all 0)."""

    ids: TokenArray
    types: TokenArray | None = None


class RowEncoder:
    """Runs one model on rows in batches, while :meth:`serve` runs.

    Args:
        network: takes ``input_ids`` and the other usual transformer inputs, INT64 [rows, tokens]; returns one output
            per row.
        pad_id: padding token.
        max_queue: how many requests may wait, in addition to the running ones.
        max_queue_time: longest wait in seconds for the first batch of a request; None for no limit.
        hooks: batch metrics.
    """

    def __init__(
        self,
        network: Network,
        pad_id: int,
        max_queue: int,
        hooks: BatchHooks = NULL_BATCH_HOOKS,
        *,
        max_queue_time: float | None = None,
    ) -> None:
        self._network: Network | None = network
        self._max_queue_time = math.inf if max_queue_time is None else max_queue_time
        self._inputs = [spec.name for spec in network.signature.inputs]
        self._pad_id = pad_id
        # One part more than can run; further ones would only keep other requests from sharing the next batches.
        self._concurrent_parts = network.concurrency + 1
        self._max_requests = max_queue + network.concurrency
        self._open_requests = 0
        # Requests run as soon as the device is free; more requests join while it is busy.
        options = BatchOptions(
            _BATCH_TOKENS, 0.0, max_waiting=max(1, self._max_requests * self._concurrent_parts), eager=True
        )
        self._batcher: Batcher[Sequence[Row], Array] = Batcher(
            self._run, options, concurrency=network.concurrency, retry_singly=True, hooks=hooks
        )

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run batches until the encoder is closed; see :meth:`Batcher.serve`."""
        await self._batcher.serve(task_status=task_status)

    async def aclose(self) -> None:
        """Unload the model; to be called once, when no call is in flight."""
        await self._batcher.aclose()
        self._network = None

    async def encode(self, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        """Return the output of each row, float32 [rows, features]; needs one row at least, and none empty.

        Raises:
            Overloaded: the queue is full.
            QueueTimeExceeded: the request has waited too long.
            ModelFailure: OpenVINO failed.
            NotReady: the server is shutting down.
        """
        if self._open_requests >= self._max_requests:
            raise Overloaded(
                f"{self._open_requests} requests are being answered or wait, as many as may; try again later"
            )
        self._open_requests += 1
        try:
            return await self._encode_parts(rows, list(_parts(rows)))
        finally:
            self._open_requests -= 1

    async def _encode_parts(self, rows: Sequence[Row], parts: Sequence[_Part]) -> npt.NDArray[np.float32]:
        if len(parts) == 1:
            made = await self._submit(rows, parts[0], self._max_queue_time)
            return _reorder(parts, [made])
        results: list[Array] = [np.empty(0)] * len(parts)
        left = iter(range(len(parts)))
        failures: list[Exception] = []

        async def work() -> None:
            for number in left:
                try:
                    within = math.inf if number else self._max_queue_time
                    results[number] = await self._submit(rows, parts[number], within)
                except Exception as error:  # noqa: BLE001 - raised outside the nursery, to avoid an exception group
                    failures.append(error)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(min(self._concurrent_parts, len(parts))):
                nursery.start_soon(work)
        if failures:
            raise failures[0]
        return _reorder(parts, results)

    async def _submit(self, rows: Sequence[Row], part: _Part, within: float) -> Array:
        own = [rows[number] for number in part.numbers]
        try:
            return await self._batcher.submit(own, key=part.width, size=part.width * len(own), start_within=within)
        except QueueTimeout:
            raise QueueTimeExceeded.after(within) from None

    async def _run(self, items: Sequence[Sequence[Row]]) -> list[Array | Exception]:
        network = self._network
        if network is None:
            raise trio.ClosedResourceError
        rows = [row for item in items for row in item]
        shape = len(rows), max(len(row.ids) for row in rows)
        (output,) = await network.infer([self._input(name, rows, shape) for name in self._inputs])
        ends = np.cumsum([len(item) for item in items])
        return list(np.split(output, ends[:-1]))

    def _input(self, name: str, rows: Sequence[Row], shape: tuple[int, int]) -> Array:
        """Return one input of the model, by its usual transformer name."""
        if name == "position_ids":
            return np.ascontiguousarray(np.broadcast_to(np.arange(shape[1], dtype=np.int64), shape))
        made = np.full(shape, self._pad_id if name == "input_ids" else 0, np.int64)
        for into, row in zip(made, rows, strict=True):
            if name == "input_ids":
                into[: len(row.ids)] = row.ids
            elif name == "attention_mask":
                into[: len(row.ids)] = 1
            elif row.types is not None:
                into[: len(row.types)] = row.types
        return made


class _Part(NamedTuple):
    """Row positions of one request that run together, and their width class."""

    numbers: Sequence[int]
    width: int


def _parts(rows: Sequence[Row]) -> Iterator[_Part]:
    """Divide rows into batches of similar lengths, short ones first."""
    numbers: list[int] = []
    width = 0
    for number in sorted(range(len(rows)), key=lambda each: len(rows[each].ids)):
        own = _width_class(len(rows[number].ids))
        if numbers and (own != width or width * (len(numbers) + 1) > _BATCH_TOKENS):
            yield _Part(numbers, width)
            numbers = []
        width = own
        numbers.append(number)
    if numbers:
        yield _Part(numbers, width)


def _width_class(length: int) -> int:
    return max(_MIN_WIDTH, 1 << max(0, length - 1).bit_length())


def _reorder(parts: Sequence[_Part], results: Sequence[Any]) -> npt.NDArray[np.float32]:
    made = np.empty((sum(len(part.numbers) for part in parts), *results[0].shape[1:]), np.float32)
    for part, result in zip(parts, results, strict=True):
        made[list(part.numbers)] = result
    return made


# ----------------------------------------------------------------------
# Rows of request inputs
# ----------------------------------------------------------------------


_ON_LOOP_INPUTS: Final = 128
"""Number of inputs that are converted to rows within a millisecond or two."""


class RowBuilder:
    """Converts request inputs to rows.

    Args:
        tokens: the tokenizer.
        folder: limits of the model.
        truncate: truncate long inputs instead of refusing them.
    """

    def __init__(self, tokens: AsyncTokenizer, folder: TextFolder, *, truncate: bool) -> None:
        self.tokens = tokens
        self._folder = folder
        self.max_length = folder.max_length
        self._vocabulary_size = folder.vocabulary_size
        self._cuts_left = folder.cuts_left
        self._truncate = truncate

    def truncating(self, max_tokens: int) -> RowBuilder:
        """Return a builder that truncates inputs to ``max_tokens``, -1 for as many as the model takes."""
        known = [each for each in (self.max_length, max_tokens if max_tokens > 0 else None) if each is not None]
        folder = replace(self._folder, max_length=min(known, default=None))
        return RowBuilder(self.tokens, folder, truncate=True)

    async def rows_of(self, inputs: Sequence[str | TokenIds]) -> list[Row]:
        """Return a row for each input; token ids are used unchanged.

        Raises:
            InvalidRequest: an input is too long, empty, or has unknown token ids.
            ModelFailure: the tokenizer failed.
        """
        texts = [each for each in inputs if isinstance(each, str)]
        self._check_characters(inputs)
        make = partial(self._make_rows, inputs, await self._encoded(texts))
        return make() if len(inputs) <= _ON_LOOP_INPUTS else await trio.to_thread.run_sync(make)

    def _make_rows(self, inputs: Sequence[str | TokenIds], encoded: Sequence[TokenArray]) -> list[Row]:
        written = iter(encoded)
        rows: list[Row] = []
        errors = ErrorList()
        for number, each in enumerate(inputs):
            field = "input" if len(inputs) == 1 else f"input[{number}]"
            ids = self._with_special_tokens(next(written)) if isinstance(each, str) else self._truncate_ids(each)
            with errors:
                self._check(ids, field)
            rows.append(Row(ids))
        errors.raise_if_any()
        return rows

    async def _encoded(self, texts: Sequence[str]) -> list[TokenArray]:
        """Tokenize texts, long ones only as far as needed."""
        if self.max_length is None:
            return await self.tokens.encode(texts)
        if self._truncate:
            most = max_characters(self.max_length)
            texts = [text[-most:] if self._cuts_left else text[:most] for text in texts]
        return await self.tokens.encode_within(texts, self.max_length, cuts_left=self._cuts_left and self._truncate)

    def _check_characters(self, inputs: Sequence[str | TokenIds]) -> None:
        """Refuse texts that are too long by their number of characters."""
        if self.max_length is None:
            size = sum(weight_of(each) for each in inputs if isinstance(each, str))
            if size > MAX_TOKENIZED_CHARACTERS:
                message = f"input: expected at most {MAX_TOKENIZED_CHARACTERS} bytes in one request"
                raise InvalidField(message, field="input", got=str(size))
        elif not self._truncate:
            most, errors = max_characters(self.max_length), ErrorList()
            for number, each in enumerate(inputs):
                if len(each) > (most if isinstance(each, str) else self.max_length):
                    errors.add(self._too_long(each, "input" if len(inputs) == 1 else f"input[{number}]"))
            errors.raise_if_any()

    def _too_long(self, each: str | TokenIds, field: str) -> ContextExceeded:
        what, length = "", len(each)
        if isinstance(each, str) and self.max_length is not None:
            what, length = "of at least ", length * self.max_length // max_characters(self.max_length)
        return ContextExceeded(f"Input length {what}{length} longer than allowed {self.max_length}", field=field)

    def _with_special_tokens(self, text: TokenArray) -> TokenArray:
        single = self.tokens.special_tokens.single
        if self._truncate and self.max_length is not None:
            text = truncate_tokens(text, max(0, self.max_length - single.added), left=self._cuts_left)
        return add_special_tokens_to(single, text)

    def _truncate_ids(self, ids: TokenIds) -> TokenArray:
        given = np.array(ids, np.int64)
        if self._truncate and self.max_length is not None:
            given = truncate_tokens(given, self.max_length, left=self._cuts_left)
        return given

    def _check(self, ids: TokenArray, field: str) -> None:
        if self.max_length is not None and len(ids) > self.max_length:
            # Only the beginning of a much longer text was tokenized.
            at_least = "of at least " if has_enough_tokens(len(ids), self.max_length) else ""
            message = f"Input length {at_least}{len(ids)} longer than allowed {self.max_length}"
            raise ContextExceeded(message, field=field)
        if not len(ids):
            raise InvalidField(f"{field} has no tokens; send a text that is not empty", field=field)
        known = self._vocabulary_size
        if known is not None and not 0 <= ids.min() <= ids.max() < known:
            unknown = ids[(ids < 0) | (ids >= known)][0]
            raise InvalidField(
                f"{field}: token {unknown} is none of the model's, which are 0 to {known - 1}; send texts, or the "
                "tokens of this model's own tokenizer",
                field=field,
            )

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> list[TokenArray]:
        """Tokenize texts; implements :class:`ovmstrio.core.generation.Tokenizer`.

        Raises:
            InvalidRequest: ``max_length`` is less than the special tokens, or the padded rows are too large.
            ModelFailure: the tokenizer failed.
        """
        single = self.tokens.special_tokens.single
        added = single.added if add_special_tokens else 0
        if max_length is not None and max_length < added:
            message = f"max_length must be {added} or more, for the tokens around a text"
            raise InvalidField(message, field="max_length", got=str(max_length))
        made: list[TokenArray] = []
        if max_length is None:
            encoded = await self.tokens.encode(texts)
        else:
            encoded = await self.tokens.encode_within(texts, max_length, cuts_left=self._cuts_left)
        for text in encoded:
            kept = text if max_length is None else truncate_tokens(text, max_length - added, left=self._cuts_left)
            made.append(add_special_tokens_to(single, kept) if add_special_tokens else kept)
        if padding is None:
            return made
        length = max(map(len, made), default=0) if max_length is None else max_length
        if length * len(made) > MAX_TOKENIZED_CHARACTERS:
            message = f"pad_to_max_length: expected at most {MAX_TOKENIZED_CHARACTERS} tokens with the padding"
            raise InvalidField(message, field="pad_to_max_length", got=str(length * len(made)))
        return self.tokens.padded(made, length, padding)


# ----------------------------------------------------------------------
# Model folder
# ----------------------------------------------------------------------

MODEL: Final = "openvino_model.xml"
TOKENIZER: Final = "openvino_tokenizer.xml"
_CONFIG: Final = "config.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_MODULES: Final = "modules.json"
_POOLING_FOLDER: Final = "1_Pooling"
_LENGTH_FILE: Final = "sentence_bert_config.json"
_PROMPTS_FILE: Final = "config_sentence_transformers.json"
_APPLIED_MODULES: Final = frozenset({"Transformer", "Pooling", "Normalize"})
_DEFAULT: Final = "default"
_POOLING_MODES: Final = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
    **{f"pooling_mode_{mode}": mode for mode in ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")},
    "cls": "CLS",
    "lasttoken": "LAST",
    "mean": "MEAN",
}
"""Modes of sentence-transformers: keys that are true, or values of ``pooling_mode`` in later versions."""
_POOLED: Final = b"sentence_embedding"
_DECODERS: Final = ("Llama", "Mistral", "Qwen2", "Qwen3")
_EXPORT_HINT: Final = (
    "export the model with optimum-intel, which writes it, or convert the tokenizer with openvino_tokenizers"
)
_NO_LIMIT_ABOVE: Final = 2**20
"""Larger limits in the files mean "no limit"."""
_RESERVES_PADDING_POSITIONS: Final = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet"})
"""Architectures that reserve two positions for padding."""


@dataclass(frozen=True, slots=True)
class TextFolder:
    """Files and limits of a model.

    Attributes:
        max_length: maximum tokens of a text, with special tokens; None if unknown.
        positions: number of positions of the model; None if unknown.
        vocabulary_size: None if unknown.
        cuts_left: truncate at the start instead of the end.
        pooling: pooling of token vectors; a mode without support has sentence-transformers' name.
        normalize: whether embeddings have unit length.
        further_modules: modules of sentence-transformers that only a model with pooled output contains.
        prompts: texts before texts to embed, by name.
        default_prompt: name of the prompt that is used by default; empty for none.
        sources: file of each value, by its name in this class.
    """

    model: Path
    tokenizer: Path
    max_length: int | None
    positions: int | None
    vocabulary_size: int | None
    cuts_left: bool
    pooling: str
    normalize: bool
    further_modules: Sequence[str]
    prompts: Mapping[str, str]
    default_prompt: str
    sources: Mapping[str, str]


def read_text_folder(folder: Path) -> TextFolder:
    """Read a model folder written by Optimum or sentence-transformers; blocking.

    Raises:
        ConfigError: files are missing or invalid; all problems are listed.
    """
    problems = [
        Problem(f"{name} is missing", file=str(folder), suggestion=_EXPORT_HINT)
        for name in (MODEL, TOKENIZER)
        if not (folder / name).is_file()
    ]
    config = _read(folder / _CONFIG, problems)
    tokenizer = _read(folder / _TOKENIZER_CONFIG, problems)
    modules = _modules(_read(folder / _MODULES, problems, of=list))
    pooling_file = f"{modules.get('Pooling', _POOLING_FOLDER)}/{_CONFIG}"
    pooling, pooling_source = _pooling(_read(folder / pooling_file, problems), config, pooling_file)
    lengths = _read(folder / _LENGTH_FILE, problems)
    prompts = _read(folder / _PROMPTS_FILE, problems)
    if problems:
        raise ConfigError(problems)
    positions = _positive_int(config.get("max_position_embeddings"))
    if positions is not None and config.get("model_type") in _RESERVES_PADDING_POSITIONS:
        positions = max(1, positions - 2)
    known = [
        (length, file)
        for length, file in (
            (positions, _CONFIG),
            (_positive_int(tokenizer.get("model_max_length")), _TOKENIZER_CONFIG),
            (_positive_int(lengths.get("max_seq_length")), _LENGTH_FILE),
        )
        if length is not None
    ]
    max_length, length_source = min(known, default=(None, _DEFAULT))
    if _POOLED in read_regular_bytes(folder / MODEL, max_bytes=None):
        pooling, pooling_source = _POOLED.decode(), MODEL
    written = prompts.get("prompts")
    return TextFolder(
        folder / MODEL,
        folder / TOKENIZER,
        max_length,
        positions,
        _positive_int(config.get("vocab_size")),
        tokenizer.get("truncation_side") == "left",
        pooling,
        not modules or "Normalize" in modules,
        sorted(modules.keys() - _APPLIED_MODULES),
        {name: each for name, each in written.items() if isinstance(each, str)} if isinstance(written, dict) else {},
        str(prompts.get("default_prompt_name") or ""),
        {
            "max_length": length_source,
            "pooling": pooling_source,
            "normalize": _MODULES if modules else _DEFAULT,
            "default_prompt": _PROMPTS_FILE,
        },
    )


def _read(path: Path, problems: list[Problem], of: type = dict) -> Any:
    """Read an optional JSON file of an object, or of a list."""
    try:
        read = json.loads(read_regular_text(path))
    except FileNotFoundError:
        return of()
    except (OSError, ValueError) as error:
        problems.append(Problem(f"the file cannot be read: {error}", file=str(path)))
        return of()
    if isinstance(read, of):
        return read
    expected = "a JSON object" if of is dict else "a JSON array"
    problems.append(Problem("the file holds something else", file=str(path), expected=expected))
    return of()


def _modules(written: Sequence[Any]) -> dict[str, str]:
    """Return the folders of sentence-transformers' modules by the names of their classes."""
    objects = [each for each in written if isinstance(each, dict)]
    paths = [Path(str(each.get("path", ""))) for each in objects]
    return {
        str(each.get("type", "")).rpartition(".")[2]: str(path)
        for each, path in zip(objects, paths, strict=True)
        if not path.is_absolute() and ".." not in path.parts
    }


def _pooling(pooling: Mapping[str, Any], config: Mapping[str, Any], file: str) -> tuple[str, str]:
    """Return the pooling and its file; by default the last token of decoders, and the first one as in OVMS."""
    mode = pooling.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [key for key in _POOLING_MODES if pooling.get(key) is True]
    if modes:
        return " and ".join(_POOLING_MODES.get(each, each) for each in modes), file
    architectures = config.get("architectures")
    named = [str(each) for each in architectures] if isinstance(architectures, list) else []
    if any(each.endswith("ForCausalLM") or each.startswith(_DECODERS) for each in named):
        return "LAST", _CONFIG
    return "CLS", _DEFAULT


def _positive_int(value: Any) -> int | None:
    is_size = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _NO_LIMIT_ABOVE
    return int(value) if is_size else None


# ----------------------------------------------------------------------
# Services
# ----------------------------------------------------------------------


class TextEncoderService:
    """Base of embedding and rerank services."""

    def __init__(self, spec: TextModelSpec, texts: RowBuilder, rows: RowEncoder) -> None:
        self.tasks: frozenset[Task] = frozenset({spec.task})
        self.metadata = ServableMetadata(spec.name, "OpenVINO", (), ())
        self.limits = GenerationLimits(context_length=texts.max_length)
        self._texts = texts
        self._rows = rows
        self._max_inputs = spec.max_inputs

    def _check_count(self, inputs: Sequence[Any], field: str) -> None:
        if not 1 <= len(inputs) <= self._max_inputs:
            message = f"{field}: expected 1 to {self._max_inputs} items (max_inputs)"
            raise InvalidField(message, field=field, got=str(len(inputs)))

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> Sequence[TokenRow]:
        """Implement :class:`ovmstrio.core.generation.Tokenizer`."""
        return await self._texts.tokenize(
            texts, add_special_tokens=add_special_tokens, max_length=max_length, padding=padding
        )

    async def aclose(self) -> None:
        """Unload the model; to be called once, when no call is in flight."""
        await self._rows.aclose()


class EmbeddingModel(TextEncoderService):
    """An :class:`ovmstrio.core.generation.Embedder`."""

    def __init__(
        self, spec: TextModelSpec, texts: RowBuilder, rows: RowEncoder, prompts: Mapping[str, str], default_prompt: str
    ) -> None:
        super().__init__(spec, texts, rows)
        self._prompts = {**prompts, "": ""}
        self._default_prompt = default_prompt

    async def embed(
        self, inputs: Sequence[str | TokenIds], *, prompt_name: str | None = None, max_tokens: int | None = None
    ) -> Embeddings:
        """Return one vector per input, and the number of tokens including special tokens.

        Args:
            inputs: texts, which the prompt precedes, or tokens.
            prompt_name: prompt of the model's files; empty for none, None for the default one.
            max_tokens: truncates inputs, -1 to what the model takes.

        Raises:
            InvalidRequest: there are no or too many inputs, or one is too long, empty, or has unknown token ids.
            Overloaded: the queue is full.
            ModelFailure: OpenVINO failed.
        """
        self._check_count(inputs, "input")
        name = self._default_prompt if prompt_name is None else prompt_name
        prompt = self._prompts.get(name)
        if prompt is None:
            known = ", ".join(filter(None, self._prompts)) or "no prompt"
            raise InvalidField(f"prompt_name: expected {known}", field="prompt_name", got=name)
        if prompt:
            inputs = [prompt + each if isinstance(each, str) else each for each in inputs]
        texts = self._texts if max_tokens is None else self._texts.truncating(max_tokens)
        rows = await texts.rows_of(inputs)
        return Embeddings(await self._rows.encode(rows), sum(len(row.ids) for row in rows))


_ON_LOOP_TOKENS: Final = 2**15
"""Number of tokens that are converted to rows within a millisecond or two."""


class RerankModel(TextEncoderService):
    """An :class:`ovmstrio.core.generation.Reranker`: the model reads each document chunk together with the query.

    Args:
        rows: returns one score per row.
        template: special tokens of a query-document pair.
    """

    def __init__(
        self, spec: TextModelSpec, texts: RowBuilder, rows: RowEncoder, template: SpecialTokenTemplate
    ) -> None:
        super().__init__(spec, texts, rows)
        self._template = template
        self._most_chunks = spec.max_allowed_chunks

    async def rerank(
        self, query: str, documents: Sequence[str], *, max_tokens: int | None = None
    ) -> tuple[list[float], int]:
        """Return a score from 0 to 1 per document, and the number of tokens read.

        ``max_tokens`` truncates documents, so that query and document together have that many tokens, -1 for as many as
        the model takes.

        Raises:
            InvalidRequest: there are no or too many documents or chunks, or the query is too long.
            Overloaded: the queue is full.
            ModelFailure: OpenVINO failed.
        """
        self._check_count(documents, "documents")
        self._check_characters(query, documents)
        query_ids = await self._query(query)
        room = self._document_room(query_ids)
        if max_tokens is not None:
            room = self._truncated_room(query_ids, room, max_tokens)
        rows: list[Row] = []
        counts: list[int] = []
        for part in split_by_size(documents):
            texts = [documents[number] for number in part]
            if max_tokens is None or room is None:
                read = await self._read(texts, room, self._most_chunks - len(rows))
            else:
                encoded = await self._texts.tokens.encode_within(texts, room)
                read = [truncate_tokens(each, room, left=False) for each in encoded]
            make = partial(self._rows_of, query_ids, read, room)
            is_large = sum(map(len, read)) > _ON_LOOP_TOKENS
            made = await trio.to_thread.run_sync(make) if is_large else make()
            counts += map(len, made)
            rows += chain.from_iterable(made)
        scores = iter((await self._rows.encode(rows)).tolist())
        return [max(next(scores) for _ in range(count)) for count in counts], sum(len(row.ids) for row in rows)

    def _check_characters(self, query: str, documents: Sequence[str]) -> None:
        """Refuse texts that are too long by their number of characters."""
        longest = self._texts.max_length
        if longest is None:
            size = sum(map(weight_of, (query, *documents)))
            if size > MAX_TOKENIZED_CHARACTERS:
                message = f"documents: expected at most {MAX_TOKENIZED_CHARACTERS} bytes with the query"
                raise InvalidField(message, field="documents", got=str(size))
            return
        most = self._max_query_tokens(longest)
        if len(query) > max_characters(most):
            raise self._query_too_long(most, f"at least {len(query) * most // max_characters(most)}")
        if sum(map(len, documents)) > max_characters(longest * self._most_chunks):
            raise self._too_many_chunks(longest)

    async def _query(self, query: str) -> TokenArray:
        longest = self._texts.max_length
        encode = self._texts.tokens.encode_within
        (ids,) = await (
            encode([query], self._max_query_tokens(longest)) if longest else self._texts.tokens.encode([query])
        )
        return ids

    async def _read(self, documents: Sequence[str], room: int | None, chunks: int) -> list[TokenArray]:
        """Tokenize documents, only as far as needed to detect more than ``chunks`` chunks."""
        if room is None:
            read = await self._texts.tokens.encode(documents)
        else:
            read = await self._texts.tokens.encode_within(documents, chunks * room)
        if sum(_count(each, room) for each in read) > chunks:
            raise self._too_many_chunks(room)
        return read

    def _too_many_chunks(self, room: int | None) -> InvalidField:
        return InvalidField(
            f"the documents have more than {self._most_chunks} parts of {room} tokens together, which is as "
            "many as may; send fewer or shorter ones",
            field="documents",
        )

    def _rows_of(self, query: TokenArray, documents: Sequence[TokenArray], room: int | None) -> list[list[Row]]:
        return [[self._row(query, part) for part in _chunks(each, room)] for each in documents]

    def _row(self, query: TokenArray, document: TokenArray) -> Row:
        return Row(add_special_tokens_to(self._template, query, document), token_types(self._template, query, document))

    def _document_room(self, query: TokenArray) -> int | None:
        """Return how many document tokens fit into a row with the query."""
        longest = self._texts.max_length
        if longest is None:
            return None
        most = self._max_query_tokens(longest)
        if len(query) > most:
            at_least = "at least " if has_enough_tokens(len(query), most) else ""
            raise self._query_too_long(most, f"{at_least}{len(query)}")
        return longest - self._template.added - len(query)

    def _truncated_room(self, query: TokenArray, room: int | None, max_tokens: int) -> int | None:
        """Return how many tokens of a document remain if it is truncated."""
        if max_tokens < 0:
            return room
        left = max_tokens - self._template.added - len(query)
        if left < 1:
            field = "truncate_prompt_tokens"
            message = f"{field}: the query and special tokens have {max_tokens - left} tokens already"
            raise InvalidField(message, field=field, got=str(max_tokens))
        return left if room is None else min(left, room)

    def _max_query_tokens(self, longest: int) -> int:
        return (longest - self._template.added) // 2

    def _query_too_long(self, limit: int, got: str) -> InvalidField:
        return InvalidField(
            f"the query may have {limit} tokens, half of what the model reads at once", field="query", got=got
        )


def _count(document: TokenArray, room: int | None) -> int:
    return 1 if room is None else max(1, -(-len(document) // room))


def _chunks(document: TokenArray, room: int | None) -> Iterator[TokenArray]:
    """Split a document into chunks; an empty one has one empty chunk."""
    step = room or max(1, len(document))
    for start in range(0, max(1, len(document)), step):
        yield document[start : start + step]


_VERSION: Final = "1"


@dataclass(frozen=True, slots=True)
class _LoadedParts:
    """Loaded parts of an embedding or rerank model."""

    folder: TextFolder
    compiled: Compiled
    tokenizer: CompiledTokenizer


async def load_embedding_model(spec: TextModelSpec, context: LoadContext) -> EmbeddingModel:
    """Load an embedding model, which the caller must close.

    Raises:
        ConfigError: files are missing or invalid.
        NotReady: the crash probe could not run.
    """
    started = perf_counter()

    def compile_rows(source: ModelFile, folder: TextFolder) -> Compiled:
        return compile_embedder(source, folder.pooling, normalize=folder.normalize)

    parts = await _load(spec, compile_rows, context)
    folder = parts.folder
    context.detect(Detection("pooling", folder.pooling, folder.sources["pooling"]))
    context.detect(Detection("normalize", folder.normalize, folder.sources["normalize"]))
    if folder.prompts:
        context.detect(Detection("default_prompt_name", folder.default_prompt, folder.sources["default_prompt"]))
    hooks = context.meters.servable(spec.name, _VERSION)
    texts = _texts(spec, parts)
    rows = await _serve_rows(spec, parts, hooks, context)
    service = EmbeddingModel(spec, texts, rows, folder.prompts, folder.default_prompt)
    hooks.set_load_seconds(perf_counter() - started)
    return service


async def load_rerank_model(spec: TextModelSpec, context: LoadContext) -> RerankModel:
    """Load a rerank model, which the caller must close.

    Raises:
        ConfigError: files are missing or invalid.
        NotReady: the crash probe could not run.
    """
    started = perf_counter()
    parts = await _load(spec, lambda source, _: compile_scorer(source), context)
    pair = parts.tokenizer.special_tokens.pair
    if pair is None:
        message = "the tokenizer has no template for pairs of query and document"
        raise ConfigError([Problem(message, file=str(parts.folder.tokenizer))])
    hooks = context.meters.servable(spec.name, _VERSION)
    texts = _texts(spec, parts)
    service = RerankModel(spec, texts, await _serve_rows(spec, parts, hooks, context), pair)
    hooks.set_load_seconds(perf_counter() - started)
    return service


async def _load(
    spec: TextModelSpec, compile_rows: Callable[[ModelFile, TextFolder], Compiled], context: LoadContext
) -> _LoadedParts:
    folder = _apply_options(spec, await run_load(partial(read_text_folder, spec.path)))
    context.detect(Detection("max_model_len", folder.max_length, folder.sources["max_length"]))
    model = ModelSpec(
        name=spec.name,
        base_path=spec.path,
        origin=spec.origin,
        target_device=spec.device,
        plugin_config=_properties(spec.plugin_config),
        cache_dir=spec.cache_dir,
    )
    source = ModelFile(folder.model, model)
    if (probe := context.find(CrashProbe)) is not None:
        await probe.try_model(probe_model_of(source, spec.path))
    tokenizer = await run_load(partial(compile_tokenizer, folder.tokenizer, spec.name))
    return _LoadedParts(folder, await run_load(partial(compile_rows, source, folder)), tokenizer)


def _apply_options(spec: TextModelSpec, folder: TextFolder) -> TextFolder:
    """Return what the files say, with the options of the entry in place of it.

    Raises:
        ConfigError: an option contradicts the model, or the vectors would lack a module.
    """
    given = {
        "max_length": spec.max_model_len,
        "pooling": None if folder.pooling == _POOLED.decode() else spec.pooling,
        "normalize": spec.normalize,
        "default_prompt": spec.default_prompt_name,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    folder = replace(folder, **chosen, sources={**folder.sources, **dict.fromkeys(chosen, OPTION)})
    problems = []
    if spec.task is Task.EMBEDDINGS and folder.further_modules and folder.sources["pooling"] not in {OPTION, MODEL}:
        message = f"modules of the model are not supported: {', '.join(folder.further_modules)}"
        hint = "export the model with an output sentence_embedding, or set pooling to serve it without them"
        problems.append(Problem(message, file=str(spec.path / _MODULES), suggestion=hint))
    if folder.max_length is not None and folder.positions is not None and folder.max_length > folder.positions:
        expected = f"at most {folder.positions}, the positions of the model"
        found = str(folder.max_length)
        problems.append(spec.placed(Problem("too long", path="max_model_len", expected=expected, found=found)))
    if folder.default_prompt and folder.default_prompt not in folder.prompts:
        expected = ", ".join(folder.prompts) or "no name, as the model has no prompts"
        prompt = Problem("unknown prompt", path="default_prompt_name", expected=expected, found=folder.default_prompt)
        problems.append(spec.placed(prompt))
    if problems:
        raise ConfigError(problems)
    return folder


def _texts(spec: TextModelSpec, parts: _LoadedParts) -> RowBuilder:
    tokenizer = parts.tokenizer
    tokens = AsyncTokenizer(
        Network(tokenizer.compiled, uses_all_cores=False), tokenizer.special_tokens, tokenizer.pad_id
    )
    return RowBuilder(tokens, parts.folder, truncate=spec.truncate)


async def _serve_rows(
    spec: TextModelSpec, parts: _LoadedParts, hooks: ServableHooks, context: LoadContext
) -> RowEncoder:
    network = Network(parts.compiled, hooks)
    rows = RowEncoder(network, parts.tokenizer.pad_id, spec.max_queue, hooks, max_queue_time=spec.max_queue_time)
    await context.tasks.start(rows.serve)
    return rows


def _properties(config: Mapping[str, Any]) -> dict[str, str]:
    """Return properties as OpenVINO's texts."""
    return {
        name: ("YES" if value else "NO") if isinstance(value, bool) else str(value) for name, value in config.items()
    }
