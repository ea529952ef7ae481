"""Served text models: for one block, or shared by the tests of a module in a thread."""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial, wraps
from typing import Any, Final

import trio

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.core.errors import ServerError
from ovmstrio.core.generation import GenerationChunk, GenerationRequest, Prompt, Sampling
from ovmstrio.serving.kind import LoadContext, lease_nothing
from ovmstrio.text.kind import load_task
from ovmstrio.text.text_model import TextModel

PROMPTS: Final = [f"number {number} of the men" for number in range(8)]


@asynccontextmanager
async def serve_text_model(**settings: Any) -> AsyncIterator[Any]:
    """Load the model of some settings, whose ``path`` must be there, by its task; what keeps it from that is raised."""
    with trio.fail_after(120):
        async with serve_without_bound(**settings) as model:
            yield model


@asynccontextmanager
async def serve_without_bound(**settings: Any) -> AsyncIterator[Any]:
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
    return GenerationRequest(prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))


async def made(model: TextModel, request: GenerationRequest) -> list[GenerationChunk]:
    async with model.generate(request) as generation:
        return [piece async for piece in generation]


def text_of(pieces: list[GenerationChunk], index: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.index == index)


HostOf = Callable[..., "ModelHost"]
"""Returns the host of a model with some settings, the same host for the same settings."""

_START_SECONDS: Final = 120


class ModelHost:
    def __init__(self, model: Any, token: trio.lowlevel.TrioToken) -> None:
        self.model: Final = model
        self._token: Final = token

    def run(self, function: Callable[[], Awaitable[None]]) -> None:
        trio.from_thread.run(function, trio_token=self._token)


@contextmanager
def _hosted(serve: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[ModelHost]:
    started: queue.Queue[ModelHost | BaseException] = queue.Queue()
    stop = trio.Event()

    async def main() -> None:
        async with serve() as model:
            started.put(ModelHost(model, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def work() -> None:
        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            started.put(error)

    async def end() -> None:
        stop.set()
        await trio.lowlevel.checkpoint()

    thread = threading.Thread(target=work, name="model host")
    thread.start()
    host = started.get(timeout=_START_SECONDS)
    if isinstance(host, BaseException):
        thread.join()
        raise host
    try:
        yield host
    finally:
        with suppress(trio.RunFinishedError):
            host.run(end)
        thread.join()
    if not started.empty():
        failure = started.get()
        assert isinstance(failure, BaseException)
        raise failure


@contextmanager
def hosts_of(serve: Callable[..., AbstractAsyncContextManager[Any]]) -> Iterator[HostOf]:
    """Return a function that serves a model with settings when it is first called with these, until the block ends."""
    hosts: dict[str, ModelHost] = {}
    with ExitStack() as stack:

        def host_of(**settings: Any) -> ModelHost:
            key = repr(sorted(settings.items()))
            if key not in hosts:
                hosts[key] = stack.enter_context(_hosted(partial(serve, **settings)))
            return hosts[key]

        yield host_of


def on_model_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Decorate a test whose first parameter names the fixture of a host: it gets the model, and runs on its loop."""
    first = next(iter(inspect.signature(test).parameters))

    @wraps(test)
    def run(**fixtures: Any) -> None:
        host: ModelHost = fixtures.pop(first)
        host.run(partial(test, host.model, **fixtures))

    return run


def with_settings(model: TextModel, **settings: Any) -> TextModel:
    """Return a model on the same engine that reads answers by other settings, such as ``tool_parser``."""
    # Another engine for each setting would cost seconds.
    spec = model._spec.model_copy(update=settings)  # noqa: SLF001
    return TextModel(spec, model._process, model._link, model._swap, model._media)  # noqa: SLF001
