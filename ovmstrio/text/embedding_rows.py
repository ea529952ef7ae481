"""Rows of tokens become rows of numbers, in batches that the requests of all clients share.

Rows of about one length share an inference, so that little of it is padding.  A request of many rows takes part in as
many batches as it needs, a few at a time, and leaves room for those that come later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from ovmstrio.core.errors import ConfigError, ContextExceeded, Gathered, InvalidField, Overloaded, Problem
from ovmstrio.core.generation import Padding, TokenIds
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.tensor import Array
from ovmstrio.inference.network import Network
from ovmstrio.inference.tokenizers import SpecialTokens, Template
from ovmstrio.serving.batching import Batcher, BatchOptions
from ovmstrio.util.regular_files import read_regular_text
from ovmstrio.util.truncation import (
    AT_ONCE,
    MAX_TOKENIZED_CHARACTERS,
    encode_text,
    has_enough_tokens,
    max_characters,
    prefix_lengths,
    weight_of,
)

__all__ = [
    "Ids",
    "Row",
    "RowEncoder",
    "RowTexts",
    "TextFolder",
    "TextTokens",
    "cut",
    "parts_of",
    "read_text_folder",
    "surround",
    "types_of",
]

# ----------------------------------------------------------------------
# The tokenizer of a model: texts become tokens on OpenVINO's threads, never on the event loop
# ----------------------------------------------------------------------

Ids = npt.NDArray[np.int64]
"""Numbers of tokens, of one text."""

_NOTHING: Final = np.empty(0, np.int64)


class TextTokens:
    """Tokenizes, with what belongs around texts.

    Args:
        network: the ragged tokenizer, compiled.
        special_tokens: what stands around texts.
        pad_id: what texts are filled up with.
    """

    def __init__(self, network: Network, special_tokens: SpecialTokens, pad_id: int) -> None:
        self.special_tokens = special_tokens
        self.pad_id = pad_id
        self._network = network

    async def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of each text, without those around it.

        Raises:
            ModelFailure: OpenVINO failed.

        Cancellation: at any checkpoint; what is not tokenized by then is not.
        """
        made: list[Ids] = [_NOTHING] * len(texts)
        for part in parts_of(texts):
            # The tokenizer takes no empty texts.
            numbers = [number for number in part if texts[number]]
            encoded = await self._encode_at_once([texts[number] for number in numbers]) if numbers else []
            for number, tokens in zip(numbers, encoded, strict=True):
                made[number] = tokens
        return made

    async def encode_within(self, texts: Sequence[str], most: int, *, cuts_left: bool = False) -> list[Ids]:
        """Return the tokens of each text, or of its beginning if that has clearly more than ``most`` tokens.

        A text has at most ``most`` tokens if its row has. In a longer row the first ``most`` tokens are those of the
        text. So the work is bounded by ``most``, and not by the length of a text.

        Args:
            texts: each by itself.
            most: how many tokens of each are needed.
            cuts_left: whether the last tokens of a text are needed instead, and its end is tokenized.

        Raises:
            ModelFailure: OpenVINO failed.

        Cancellation: as for :meth:`encode`.
        """
        made: list[Ids] = [_NOTHING] * len(texts)
        lengths = [prefix_lengths(len(text), most) for text in texts]
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
                if size < len(texts[number]) and not has_enough_tokens(len(made[number]), most)
            ]
        return made

    async def _encode_at_once(self, texts: Sequence[str]) -> list[Ids]:
        is_large = sum(map(len, texts)) > AT_ONCE
        join = partial(_joined, texts)
        inputs = await trio.to_thread.run_sync(join) if is_large else join()
        first, last, tokens = await self._network.infer(inputs)
        if not tokens.size:
            # Of texts that are all empty once they are normalized the tokenizer returns one row.
            return [_NOTHING] * len(texts)
        wide = tokens[0].astype(np.int64)
        return [wide[begin:end] for begin, end in zip(first.tolist(), last.tolist(), strict=True)]

    def padded(self, rows: Sequence[Ids], length: int, side: Padding) -> list[Ids]:
        """Pad what is shorter than ``length``."""
        made = []
        for row in rows:
            missing = max(0, length - len(row))
            where = (missing, 0) if side is Padding.LEFT else (0, missing)
            made.append(np.pad(row, where, constant_values=self.pad_id))
        return made


def _joined(texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return where texts begin and end in their bytes, and the bytes."""
    # Half of a surrogate pair, which JSON can carry, is no letter.
    written = [encode_text(text) for text in texts]
    ends = np.fromiter(accumulate(map(len, written)), np.int32, len(written))
    begins = np.concatenate((np.zeros(1, np.int32), ends[:-1]))
    return begins, ends, np.frombuffer(b"".join(written), np.uint8)


def parts_of(texts: Sequence[str]) -> Iterator[list[int]]:
    """Divide texts among inferences, by their positions."""
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


def surround(template: Template, *texts: Ids) -> Ids:
    """Put the tokens of a template around those of texts."""
    parts: list[Any] = [template.marks[0]]
    for text, behind in zip(texts, template.marks[1:], strict=True):
        parts += [text, behind]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def types_of(template: Template, *texts: Ids) -> Ids:
    """Return the types of the tokens that :func:`surround` returns."""
    parts: list[Ids] = [np.array(template.mark_types[0], np.int64)]
    for text, kind, behind in zip(texts, template.types, template.mark_types[1:], strict=True):
        parts += [np.full(len(text), kind, np.int64), np.array(behind, np.int64)]
    return np.concatenate(parts)


def cut(tokens: Ids, room: int, *, left: bool) -> Ids:
    """Take as many tokens as there is room for, off the begin or off the end."""
    if len(tokens) <= room:
        return tokens
    return tokens[len(tokens) - room :] if left else tokens[:room]


# ----------------------------------------------------------------------
# Rows of tokens become rows of numbers, in batches that the requests of all clients share
# ----------------------------------------------------------------------

_TOKENS_AT_ONCE: Final = 1024
"""From some 500 tokens on a processor gains nothing more by joining rows, and others wait longer."""
_LEAST_WIDTH: Final = 16


class Row(NamedTuple):
    """The tokens of one input of the model, and their types, None where all are of type 0."""

    ids: Ids
    types: Ids | None = None


class RowEncoder:
    """Runs one model on rows, while :meth:`serve` does.

    Args:
        network: takes ``input_ids`` and what else transformers have, INT64 [rows, tokens]; gives an output a row.
        pad_id: the token that stands behind shorter rows.
        max_queue: how many requests may be answered or wait at once, beyond those that run.
        hooks: are told of batches.
    """

    def __init__(
        self,
        network: Network,
        pad_id: int,
        max_queue: int,
        hooks: BatchHooks = NULL_BATCH_HOOKS,
    ) -> None:
        self._network: Network | None = network
        self._inputs = [spec.name for spec in network.signature.inputs]
        self._pad_id = pad_id
        # The next batch of a request waits while one runs; more would only keep others from sharing what follows.
        self._at_once = network.side_by_side + 1
        self._room = max_queue + network.side_by_side
        self._requests = 0
        # What has come runs as soon as the device is free; meanwhile more comes to share it.
        options = BatchOptions(_TOKENS_AT_ONCE, 0.0, max_waiting=max(1, self._room * self._at_once), eager=True)
        self._batcher: Batcher[Sequence[Row], Array] = Batcher(
            self._run, options, concurrency=network.side_by_side, retry_singly=True, hooks=hooks
        )

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the batches until the encoder is closed.

        Cancellation: see :meth:`Batcher.serve`.
        """
        await self._batcher.serve(task_status=task_status)

    async def aclose(self) -> None:
        """Unload the model.  Called once, when no call is in flight.

        Cancellation: while batches run whose callers have gone.
        """
        await self._batcher.aclose()
        self._network = None

    async def encode(self, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        """Give the model's output for each row, of which there is one at least and none is empty: f32 [rows, numbers].

        Raises:
            Overloaded: too many requests wait.
            ModelFailure: OpenVINO failed.
            NotReady: the server stops.

        Cancellation: at any checkpoint; what waits is taken away, what runs for nobody else is stopped.
        """
        if self._requests >= self._room:
            raise Overloaded(f"{self._requests} requests are being answered or wait, as many as may; try again later")
        self._requests += 1
        try:
            return await self._encode_parts(rows, list(_parts(rows)))
        finally:
            self._requests -= 1

    async def _encode_parts(self, rows: Sequence[Row], parts: Sequence[_Part]) -> npt.NDArray[np.float32]:
        if len(parts) == 1:
            made = await self._submit(rows, parts[0])
            return _in_order(parts, [made])
        results: list[Array] = [np.empty(0)] * len(parts)
        left = iter(range(len(parts)))
        failures: list[Exception] = []

        async def work() -> None:
            for number in left:
                try:
                    results[number] = await self._submit(rows, parts[number])
                except Exception as error:  # noqa: BLE001 - raised below, alone and not in a group
                    failures.append(error)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(min(self._at_once, len(parts))):
                nursery.start_soon(work)
        if failures:
            raise failures[0]
        return _in_order(parts, results)

    async def _submit(self, rows: Sequence[Row], part: _Part) -> Array:
        own = [rows[number] for number in part.numbers]
        return await self._batcher.submit(own, key=part.width, size=part.width * len(own))

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
        """Make one input of the model, by the name that all transformers have for it."""
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
    """Rows of one request that are run together, by their positions, and the width that their like are counted with."""

    numbers: Sequence[int]
    width: int


def _parts(rows: Sequence[Row]) -> Iterator[_Part]:
    """Divide rows into batches of about equal lengths, short ones first."""
    numbers: list[int] = []
    width = 0
    for number in sorted(range(len(rows)), key=lambda each: len(rows[each].ids)):
        own = _width(len(rows[number].ids))
        if numbers and (own != width or width * (len(numbers) + 1) > _TOKENS_AT_ONCE):
            yield _Part(numbers, width)
            numbers = []
        width = own
        numbers.append(number)
    if numbers:
        yield _Part(numbers, width)


def _width(length: int) -> int:
    """Give the next power of two."""
    return max(_LEAST_WIDTH, 1 << max(0, length - 1).bit_length())


def _in_order(parts: Sequence[_Part], results: Sequence[Any]) -> npt.NDArray[np.float32]:
    """Put the rows of parts where those of the request are."""
    made = np.empty((sum(len(part.numbers) for part in parts), *results[0].shape[1:]), np.float32)
    for part, result in zip(parts, results, strict=True):
        made[list(part.numbers)] = result
    return made


# ----------------------------------------------------------------------
# Texts and tokens of requests as rows that a model takes: with what belongs around them, and not too long
# ----------------------------------------------------------------------


class RowTexts:
    """Makes rows of what clients send.

    Args:
        tokens: the model's tokenizer.
        folder: what is known of the model.
        truncate: whether what is too long is cut, rather than refused.
    """

    def __init__(self, tokens: TextTokens, folder: TextFolder, *, truncate: bool) -> None:
        self.tokens = tokens
        self.max_length = folder.max_length
        self._vocabulary_size = folder.vocabulary_size
        self._cuts_left = folder.cuts_left
        self._truncate = truncate

    async def rows_of(self, inputs: Sequence[str | TokenIds]) -> list[Row]:
        """Make a row of each input; numbers of tokens are taken as they are.

        Raises:
            InvalidRequest: inputs are too long, empty, or have tokens that the model does not know.
            ModelFailure: the tokenizer failed.

        Cancellation: at any checkpoint.
        """
        texts = [each for each in inputs if isinstance(each, str)]
        self._check_characters(inputs)
        written = iter(await self._encoded(texts))
        rows: list[Row] = []
        wrong = Gathered()
        for number, each in enumerate(inputs):
            field = "input" if len(inputs) == 1 else f"input[{number}]"
            ids = self._text(next(written)) if isinstance(each, str) else self._given(each)
            with wrong:
                self._check(ids, field)
            rows.append(Row(ids))
        wrong.tell()
        return rows

    async def _encoded(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of texts, of long ones at least as many as the model takes."""
        if self.max_length is None:
            return await self.tokens.encode(texts)
        if self._truncate:
            most = max_characters(self.max_length)
            texts = [text[-most:] if self._cuts_left else text[:most] for text in texts]
        return await self.tokens.encode_within(texts, self.max_length, cuts_left=self._cuts_left and self._truncate)

    def _check_characters(self, inputs: Sequence[str | TokenIds]) -> None:
        """Refuse texts that are too long by their characters alone.

        Raises:
            ContextExceeded: a text cannot fit the model.
            InvalidField: the model has no limit, and the texts together have more characters than one request may.
        """
        if self.max_length is None:
            size = sum(weight_of(each) for each in inputs if isinstance(each, str))
            if size > MAX_TOKENIZED_CHARACTERS:
                message = f"input: expected at most {MAX_TOKENIZED_CHARACTERS} bytes in one request"
                raise InvalidField(message, field="input", got=str(size))
        elif not self._truncate:
            most, wrong = max_characters(self.max_length), Gathered()
            for number, each in enumerate(inputs):
                if len(each) > (most if isinstance(each, str) else self.max_length):
                    wrong.add(self._too_long(each, "input" if len(inputs) == 1 else f"input[{number}]"))
            wrong.tell()

    def _too_long(self, each: str | TokenIds, field: str) -> ContextExceeded:
        what, length = "", len(each)
        if isinstance(each, str) and self.max_length is not None:
            what, length = "of at least ", length * self.max_length // max_characters(self.max_length)
        return ContextExceeded(f"Input length {what}{length} longer than allowed {self.max_length}", field=field)

    def _text(self, text: Ids) -> Ids:
        single = self.tokens.special_tokens.single
        if self._truncate and self.max_length is not None:
            text = cut(text, max(0, self.max_length - single.added), left=self._cuts_left)
        return surround(single, text)

    def _given(self, ids: TokenIds) -> Ids:
        given = np.array(ids, np.int64)
        if self._truncate and self.max_length is not None:
            given = cut(given, self.max_length, left=self._cuts_left)
        return given

    def _check(self, ids: Ids, field: str) -> None:
        """Refuse a row that the model cannot take.

        Raises:
            ContextExceeded: it is too long.
            InvalidField: it is empty, or has tokens that the model does not know.
        """
        if self.max_length is not None and len(ids) > self.max_length:
            # Of a text that is much longer only the beginning was tokenized.
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
    ) -> list[Ids]:
        """Do as :class:`ovmstrio.core.generation.Tokenizer`.

        Raises:
            InvalidRequest: not even the marks around a text fit into ``max_length``, or the padded rows are too large.
            ModelFailure: the tokenizer failed.

        Cancellation: at any checkpoint.
        """
        single = self.tokens.special_tokens.single
        added = single.added if add_special_tokens else 0
        if max_length is not None and max_length < added:
            message = f"max_length must be {added} or more, for the tokens around a text"
            raise InvalidField(message, field="max_length", got=str(max_length))
        made: list[Ids] = []
        if max_length is None:
            encoded = await self.tokens.encode(texts)
        else:
            encoded = await self.tokens.encode_within(texts, max_length, cuts_left=self._cuts_left)
        for text in encoded:
            kept = text if max_length is None else cut(text, max_length - added, left=self._cuts_left)
            made.append(surround(single, kept) if add_special_tokens else kept)
        if padding is None:
            return made
        length = max(map(len, made), default=0) if max_length is None else max_length
        if length * len(made) > MAX_TOKENIZED_CHARACTERS:
            message = f"pad_to_max_length: expected at most {MAX_TOKENIZED_CHARACTERS} tokens with the padding"
            raise InvalidField(message, field="pad_to_max_length", got=str(length * len(made)))
        return self.tokens.padded(made, length, padding)


# ----------------------------------------------------------------------
# What a folder of Optimum's says of its model: how long texts may be, and which tokens there are
# ----------------------------------------------------------------------

MODEL: Final = "openvino_model.xml"
TOKENIZER: Final = "openvino_tokenizer.xml"
_CONFIG: Final = "config.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_WAY_OUT: Final = (
    "export the model with optimum-intel, which writes it, or convert the tokenizer with openvino_tokenizers"
)
_LONGEST: Final = 2**20
"""Above any model's length stands a number for none."""
_COUNTED_FROM_PADDING: Final = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet"})
"""Architectures that have positions for padding, two of them, which no text may use."""


@dataclass(frozen=True, slots=True)
class TextFolder:
    """The files of a model, and what they say.

    Attributes:
        max_length: how many tokens a text may have, those around it included; None where nobody says.
        vocabulary_size: below which number all tokens are; None where nobody says.
        cuts_left: whether what is too long loses its begin, rather than its end.
    """

    model: Path
    tokenizer: Path
    max_length: int | None
    vocabulary_size: int | None
    cuts_left: bool


def read_text_folder(folder: Path) -> TextFolder:
    """Read it; blocking.

    Raises:
        ConfigError: a file is missing, or is no JSON; all that is wrong is told.
    """
    problems = [
        Problem(f"{name} is missing", file=str(folder), suggestion=_WAY_OUT)
        for name in (MODEL, TOKENIZER)
        if not (folder / name).is_file()
    ]
    config = _read(folder / _CONFIG, problems)
    tokenizer = _read(folder / _TOKENIZER_CONFIG, problems)
    if problems:
        raise ConfigError(problems)
    return TextFolder(
        folder / MODEL,
        folder / TOKENIZER,
        _max_length(config, tokenizer),
        _size(config.get("vocab_size")),
        tokenizer.get("truncation_side") == "left",
    )


def _read(path: Path, problems: list[Problem]) -> Mapping[str, Any]:
    """Read a file of JSON that need not be there."""
    try:
        read = json.loads(read_regular_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(Problem(f"the file cannot be read: {error}", file=str(path)))
        return {}
    if isinstance(read, dict):
        return read
    problems.append(Problem("the file holds something else", file=str(path), expected="a JSON object"))
    return {}


def _max_length(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int | None:
    positions = _size(config.get("max_position_embeddings"))
    if positions is not None and config.get("model_type") in _COUNTED_FROM_PADDING:
        positions = max(1, positions - 2)
    known = [each for each in (positions, _size(tokenizer.get("model_max_length"))) if each is not None]
    return min(known, default=None)


def _size(value: Any) -> int | None:
    is_size = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LONGEST
    return int(value) if is_size else None
