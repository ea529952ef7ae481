"""Embedding and rerank services, which run on OpenVINO in the server process.

::

    texts ─> TextTokens (tokenizer, an OpenVINO model) ─> token rows ─> RowEncoder (shared batches) ─> output rows
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, InvalidField, Problem
from ovmstrio.core.generation import Embeddings, Task
from ovmstrio.core.request import ServableMetadata
from ovmstrio.inference.compile import ModelFile
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import CrashProbe, probe_model_of
from ovmstrio.inference.network import Network
from ovmstrio.inference.text_models import CompiledTokenizer, compile_embedder, compile_scorer, compile_tokenizer
from ovmstrio.text.embedding_rows import (
    AsyncTokenizer,
    Row,
    RowBuilder,
    RowEncoder,
    TextFolder,
    TokenArray,
    add_special_tokens_to,
    read_text_folder,
    split_by_size,
    token_types,
)
from ovmstrio.util.load_limit import run_load
from ovmstrio.util.truncation import MAX_TOKENIZED_CHARACTERS, has_enough_tokens, max_characters, weight_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.generation import Padding, TokenIds, TokenRow
    from ovmstrio.core.hooks import ServableHooks
    from ovmstrio.inference.text_models import SpecialTokenTemplate
    from ovmstrio.serving.kind import LoadContext

MAX_DOCUMENTS: Final = 500
"""Maximum texts per request, as in OVMS."""


class TextEncoderService:
    """Base of embedding and rerank services."""

    def __init__(self, name: str, task: Task, texts: RowBuilder, rows: RowEncoder) -> None:
        self.tasks: frozenset[Task] = frozenset({task})
        self.metadata = ServableMetadata(name, "OpenVINO", (), ())
        self._texts = texts
        self._rows = rows

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

    def __init__(self, name: str, texts: RowBuilder, rows: RowEncoder) -> None:
        super().__init__(name, Task.EMBEDDINGS, texts, rows)

    async def embed(self, inputs: Sequence[str | TokenIds]) -> Embeddings:
        """Return one vector per input, and the number of tokens including special tokens.

        Raises:
            InvalidRequest: there are no or too many inputs, or one is too long, empty, or has unknown token ids.
            Overloaded: the queue is full.
            ModelFailure: OpenVINO failed.
        """
        if not 1 <= len(inputs) <= MAX_DOCUMENTS:
            raise InvalidField(f"input must have 1 to {MAX_DOCUMENTS} texts", field="input", got=str(len(inputs)))
        rows = await self._texts.rows_of(inputs)
        return Embeddings(await self._rows.encode(rows), sum(len(row.ids) for row in rows))


_ON_LOOP_TOKENS: Final = 2**15
"""Number of tokens that are converted to rows within a millisecond or two."""


class RerankModel(TextEncoderService):
    """An :class:`ovmstrio.core.generation.Reranker`: the model reads each document chunk together with the query.

    Args:
        rows: returns one score per row.
        template: special tokens of a query-document pair.
        most_chunks: maximum chunks of a request's documents together.
    """

    def __init__(
        self, name: str, texts: RowBuilder, rows: RowEncoder, template: SpecialTokenTemplate, most_chunks: int
    ) -> None:
        super().__init__(name, Task.RERANK, texts, rows)
        self._template = template
        self._most_chunks = most_chunks

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        """Return a score from 0 to 1 per document, and the number of tokens read.

        Raises:
            InvalidRequest: there are no or too many documents or chunks, or the query is too long.
            Overloaded: the queue is full.
            ModelFailure: OpenVINO failed.
        """
        if not 1 <= len(documents) <= MAX_DOCUMENTS:
            raise InvalidField(f"documents must be 1 to {MAX_DOCUMENTS}", field="documents", got=str(len(documents)))
        self._check_characters(query, documents)
        query_ids = await self._query(query)
        room = self._document_room(query_ids)
        rows: list[Row] = []
        counts: list[int] = []
        for part in split_by_size(documents):
            read = await self._read([documents[number] for number in part], room, self._most_chunks - len(rows))
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

    def _max_query_tokens(self, longest: int) -> int:
        return (longest - self._template.added) // 2

    def _query_too_long(self, most: int, got: str) -> InvalidField:
        return InvalidField(
            f"the query may have {most} tokens, half of what the model reads at once", field="query", got=got
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
    parts = await _load(spec, partial(compile_embedder, pooling=spec.pooling, normalize=spec.normalize), context)
    hooks = context.meters.servable(spec.name, _VERSION)
    texts = _texts(spec, parts)
    service = EmbeddingModel(spec.name, texts, await _serve_rows(spec, parts, hooks, context))
    hooks.set_load_seconds(perf_counter() - started)
    return service


async def load_rerank_model(spec: TextModelSpec, context: LoadContext) -> RerankModel:
    """Load a rerank model, which the caller must close.

    Raises:
        ConfigError: files are missing or invalid.
        NotReady: the crash probe could not run.
    """
    started = perf_counter()
    parts = await _load(spec, compile_scorer, context)
    pair = parts.tokenizer.special_tokens.pair
    if pair is None:
        message = "the tokenizer has no template for pairs of query and document"
        raise ConfigError([Problem(message, file=str(parts.folder.tokenizer))])
    hooks = context.meters.servable(spec.name, _VERSION)
    texts = _texts(spec, parts)
    rows = await _serve_rows(spec, parts, hooks, context)
    service = RerankModel(spec.name, texts, rows, pair, spec.max_allowed_chunks)
    hooks.set_load_seconds(perf_counter() - started)
    return service


async def _load(
    spec: TextModelSpec, compile_rows: Callable[[ModelFile], Compiled], context: LoadContext
) -> _LoadedParts:
    folder = await run_load(partial(read_text_folder, spec.path))
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
    return _LoadedParts(folder, await run_load(partial(compile_rows, source)), tokenizer)


def _texts(spec: TextModelSpec, parts: _LoadedParts) -> RowBuilder:
    tokenizer = parts.tokenizer
    tokens = AsyncTokenizer(Network(tokenizer.compiled, fills_cores=False), tokenizer.special_tokens, tokenizer.pad_id)
    return RowBuilder(tokens, parts.folder, truncate=spec.truncate)


async def _serve_rows(
    spec: TextModelSpec, parts: _LoadedParts, hooks: ServableHooks, context: LoadContext
) -> RowEncoder:
    network = Network(parts.compiled, hooks)
    rows = RowEncoder(network, parts.tokenizer.pad_id, spec.max_queue, hooks)
    await context.tasks.start(rows.serve)
    return rows


def _properties(config: Mapping[str, Any]) -> dict[str, str]:
    """Return properties as OpenVINO's texts."""
    return {
        name: ("YES" if value else "NO") if isinstance(value, bool) else str(value) for name, value in config.items()
    }
