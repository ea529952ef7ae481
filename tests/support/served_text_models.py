"""Models of text as services, loaded while a block lasts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ServerError
from ovmstrio.core.generation import GenerationRequest, Piece, Prompt, Sampling
from ovmstrio.runtimes.generation.loading import load_task
from ovmstrio.runtimes.generation.text_model import TextModel
from ovmstrio.runtimes.kind import LoadContext, lease_nothing

PROMPTS: Final = [f"number {number} of the men" for number in range(8)]


@asynccontextmanager
async def serve_text_model(**settings: Any) -> AsyncIterator[Any]:
    """Load the model of some settings, whose ``path`` must be there, by its task; what keeps it from that is raised.

    The block may last two minutes.
    """
    with trio.fail_after(120):
        async with serve_without_bound(**settings) as model:
            yield model


@asynccontextmanager
async def serve_without_bound(**settings: Any) -> AsyncIterator[Any]:
    """Load a model as :func:`serve_text_model` does, for as long as the block lasts."""
    spec = TextModelSpec(**{"base_path": settings["path"], **settings})
    failure = None
    async with trio.open_nursery() as tasks:
        try:
            model: Any = await load_task(spec, LoadContext(lease_nothing, tasks))
        except ServerError as error:
            failure = error
        else:
            try:
                yield model
            finally:
                await model.aclose()
    if failure is not None:
        raise failure


def server_of(**defaults: Any) -> Callable[..., AbstractAsyncContextManager[Any]]:
    return lambda **settings: serve_text_model(**{**defaults, **settings})


def greedy(prompt: Prompt, tokens: int) -> GenerationRequest:
    """Return a request for the likeliest text of so many tokens."""
    return GenerationRequest(prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))


async def made(model: TextModel, request: GenerationRequest) -> list[Piece]:
    """Return all pieces of an answer."""
    async with model.generate(request) as generation:
        return [piece async for piece in generation]


def text_of(pieces: list[Piece], index: int = 0) -> str:
    """Join the text of pieces of one choice."""
    return "".join(piece.text for piece in pieces if piece.index == index)
