"""What models of speech have in common: a process that answers in parts, and the turns of who asks it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.request import ServableMetadata
from ovmstrio.runtimes.generation.engine_process import EngineProcess
from ovmstrio.runtimes.generation.idle_unload import sleep_when_idle
from ovmstrio.runtimes.generation.sharing.asking import PARTS, numbers_of
from ovmstrio.runtimes.generation.sharing.choosing_engine import Engine, engine_of
from ovmstrio.runtimes.generation.speech.turn_taking import TurnQueue
from ovmstrio.runtimes.resident import ResidentService
from ovmstrio.work.placement import run_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.engine_sharing import EngineSharing
    from ovmstrio.core.generation import Task

__all__ = ["TurnModel", "check_folder", "open_model"]

_PLATFORM: Final = "openvino_genai"

_QueueT = TypeVar("_QueueT", bound=TurnQueue[Any])
_ModelT = TypeVar("_ModelT", bound="TurnModel[Any]")


class TurnModel(ResidentService, Generic[_QueueT]):
    """One model.

    Args:
        spec: how it is configured.
        process: where it lives.
        queue: what asks it.
    """

    task: ClassVar[Task]

    def __init__(self, spec: TextModelSpec, process: Engine, queue: _QueueT) -> None:
        super().__init__()
        self.spec = spec
        self.process = process
        self.queue = queue
        self._metadata = ServableMetadata(spec.name, _PLATFORM, (), ())

    @property
    def metadata(self) -> ServableMetadata:
        """What it tells of itself: no tensors."""
        return self._metadata

    @property
    def tasks(self) -> frozenset[Task]:
        """What it does."""
        return frozenset({self.task})

    @property
    def obstacle(self) -> str:
        """Why it cannot answer now; empty if it can."""
        return self.process.obstacle

    @property
    def pid(self) -> int | None:
        """The number of its process, None while there is none."""
        return self.process.pid

    @property
    def open_requests(self) -> int:
        """How many requests are being answered, or wait."""
        return self.queue.open


async def check_folder(spec: TextModelSpec, missing: Callable[[Path], str], expected: str) -> None:
    """See that a model has its files, before a process is started for it.

    Args:
        spec: of the model.
        missing: says what is not in a folder; blocking.
        expected: what there should be.

    Raises:
        ConfigError: it has not.

    Cancellation: not while a thread looks.
    """
    absent = await run_load(partial(_absent, spec.path, missing))
    if absent:
        message = "there is no model of speech that could be loaded"
        raise ConfigError([spec.placed(Problem(message, path="path", expected=expected, found=absent))])


def _absent(folder: Path, missing: Callable[[Path], str]) -> str:
    if not folder.is_dir():
        return f"{folder}, which {'is no folder' if folder.exists() else 'does not exist'}"
    without = missing(folder)
    return f"{folder} without {without}" if without else ""


@asynccontextmanager
async def open_model(
    spec: TextModelSpec,
    program: str,
    options: Mapping[str, Any],
    make_queue: Callable[[trio.Nursery, Iterator[int]], _QueueT],
    make_model: Callable[[TextModelSpec, Engine, _QueueT], _ModelT],
    *,
    engines: EngineSharing | None = None,
) -> AsyncIterator[_ModelT]:
    """Have a model loaded while the block lasts.

    Args:
        spec: how it is configured.
        program: the module that its process runs.
        options: what that is told first, besides folder, device and properties.
        make_queue: makes what asks it, with numbers for requests.
        make_model: makes the service.
        engines: those of other processes of the server.

    Raises:
        ModelFailure: it cannot be loaded.

    Ownership: the process.
    """
    told = {"folder": str(spec.path.absolute()), "device": spec.device, "properties": dict(spec.plugin_config)}
    async with trio.open_nursery() as nursery:
        queue = make_queue(nursery, numbers_of(engines))
        told = {**told, **options}
        process = engine_of(engines, spec, told, queue.hear, queue.lose, program=program, asking=PARTS)
        await nursery.start(process.run)
        if spec.idle_unload_seconds and isinstance(process, EngineProcess):
            nursery.start_soon(sleep_when_idle, process, queue, spec)
        try:
            yield make_model(spec, process, queue)
        finally:
            await process.sleep()
            nursery.cancel_scope.cancel()
