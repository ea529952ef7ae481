"""Where a worker process gets its Op from: it makes the pipeline anew, as the server has made its own."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings

if TYPE_CHECKING:
    from ovmstrio.runtimes.ops.graph import OpGraph
    from ovmstrio.runtimes.ops.predictor.protocol import MakePredictor

__all__ = ["LoadedPipeline", "PipelineSource"]


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline that has been made: its Ops, what holds for them, and what makes their predictors."""

    graph: OpGraph
    settings: PipelineSettings
    make_predictor: MakePredictor | None = None


@dataclass(frozen=True, slots=True)
class PipelineSource:
    """A function that makes a pipeline in any process.

    Attributes:
        loader: the function, as ``module:name``; it takes the argument and gives a :class:`LoadedPipeline`.
        argument: what it is called with, such as the path of a script.
    """

    loader: str
    argument: str = ""

    def load(self) -> LoadedPipeline:
        """Make the pipeline.

        Raises:
            Exception: whatever the function or its module raises.
        """
        module, _, name = self.loader.partition(":")
        loaded: Any = getattr(importlib.import_module(module), name)(self.argument)
        if not isinstance(loaded, LoadedPipeline):
            raise TypeError(f"{self.loader} should return LoadedPipeline, got {type(loaded).__name__}")
        return loaded
