"""A model compiled once more, for more or fewer calls at once, or because it has other neighbours on the cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ovmstrio.openvino.compiled import Compiled

__all__ = ["CALLS_AT_ONCE", "Again"]

CALLS_AT_ONCE: Final = "PERFORMANCE_HINT_NUM_REQUESTS"


@dataclass(frozen=True, slots=True)
class Again:
    """Compiles a model for so many calls at once; what it gives can be compiled anew in the same way.

    Attributes:
        build: compiles the model with settings, and runs it, so that no request waits for what a first run makes.
        config: its settings, for all cores.
        on_loop: those of one thread, if the event loop infers on a model of its own.
        may_share_out: whether the server may choose how many inferences share the cores out.
        is_for_loop: whether it is nothing but the one of one thread, for 0 calls at once.
    """

    build: Callable[[Mapping[str, str]], Compiled]
    config: Mapping[str, str]
    on_loop: Mapping[str, str] | None = None
    may_share_out: bool = False
    is_for_loop: bool = False

    def __call__(self, at_once: int) -> Compiled:
        """Compile it, and run it.  Blocks for as long as that takes.

        Raises:
            ConfigError: the device cannot compile it.
        """
        if self.on_loop is None:
            return self.of(self._for_all_cores(at_once))
        loop = self.build(self.on_loop)
        return self.of(self._for_all_cores(at_once).with_loop(loop) if at_once else loop)

    def of(self, compiled: Compiled) -> Compiled:
        """Give a model that is compiled anew in this way."""
        return replace(
            compiled, chosen_anew=self, may_share_out=self.may_share_out, is_for_loop=self.is_for_loop
        )  # fmt: skip

    def _for_all_cores(self, at_once: int) -> Compiled:
        side_by_side = {"PERFORMANCE_HINT": "THROUGHPUT", CALLS_AT_ONCE: str(at_once)} if at_once > 1 else {}
        return self.build({**self.config, **side_by_side})
