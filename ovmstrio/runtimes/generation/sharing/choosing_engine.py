"""Whether a model's engine is this process's own, is shown to others, or is another one's."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ovmstrio.runtimes.generation.engine_process import PROGRAM, EngineProcess
from ovmstrio.runtimes.generation.sharing.asking import TEXTS, Asking
from ovmstrio.runtimes.generation.sharing.remote_engine import RemoteEngine
from ovmstrio.runtimes.generation.sharing.shown_engine import ShownEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.engine_sharing import EngineSharing

__all__ = ["Engine", "engine_of"]

Engine = EngineProcess | RemoteEngine


def engine_of(
    engines: EngineSharing | None,
    spec: TextModelSpec,
    options: Any,
    heard: Callable[[Any], None],
    lost: Callable[[str], None],
    *,
    failed: Callable[[str], None] | None = None,
    program: str = PROGRAM,
    asking: Asking = TEXTS,
) -> Engine:
    """Make the engine of a model, which lives once it is run.

    Args:
        engines: those of other processes of the server; None where there are none.
        spec: of the model; processes that have the same one share its engine.
        options: as the rest, see :class:`EngineProcess`.
        heard: likewise.
        lost: likewise.
        failed: is called in place of ``lost`` where the process is another one's, who counts its ends.
        program: likewise.
        asking: how the program is asked.
    """
    if engines is None:
        return EngineProcess(options, spec.name, heard, lost, program)
    key = f"{spec.name} {sha256(repr(spec.loaded_settings()).encode()).hexdigest()}"
    owner = engines.owner(spec.name)
    if owner is not None:
        return RemoteEngine(engines, owner, key, heard, failed or lost)
    return ShownEngine(engines, key, asking, options=options, name=spec.name, heard=heard, lost=lost, program=program)
