"""What is tried, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["Trial", "Verdict"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A model that is to be compiled.

    Attributes:
        name: what messages call it.
        path: the file, or the folder of all files, that it is made of.
        compile: ``module:function`` of the server's that makes a ``Compiled`` of ``argument``; blocking.
        argument: plain data.
        read: ``module:function`` of the server's that makes a model of ``source``, to look for the layer that crashes.
        source: the file or folder that OpenVINO reads.
        device: for which device.
        settings: plain data, all that makes a difference besides the files.
    """

    name: str
    path: Path
    compile: str
    argument: Any
    read: str
    source: Path
    device: str
    settings: Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is remembered of a trial.

    Attributes:
        crash: the signal that ended the process, empty if the model ran.
        layer: the first layer whose run crashes, empty if that cannot be told.
        zeros_crash: the signal that ends the process when all inputs are zeros, empty if none does.
        zeros_layer: as ``layer``, for that.
        day: when that was, in ISO's form.
    """

    crash: str = ""
    layer: str = ""
    zeros_crash: str = ""
    zeros_layer: str = ""
    day: str = ""

    def refusal(self, trial: Trial, remembered: Path | None) -> ConfigError:
        """Make the error of a model that crashed; ``remembered`` is where that was found noted down."""
        what = f"OpenVINO crashes with {self.crash} when it runs the model{_at(self.layer)}"
        shown = "as a trial in a process of its own has shown"
        way_out = ""
        if remembered is not None:
            shown += f" on {self.day}; it is not tried again as long as files, settings and OpenVINO are the same"
            way_out = f"to have it tried again, remove {remembered} or start with --trial_load again"
        return ConfigError([Problem(f"{what}, {shown}", file=str(trial.source), suggestion=way_out)])

    def remark(self, trial: Trial) -> Problem | None:
        """Warn of a model that runs, but not on zeros."""
        if not self.zeros_crash:
            return None
        message = (
            f"OpenVINO crashes with {self.zeros_crash} when all inputs of the model are zeros{_at(self.zeros_layer)}"
        )
        way_out = "a request with such inputs would end the server: have the model guard its inputs"
        return Problem(message, file=str(trial.source), suggestion=way_out, severity="warning")


def _at(layer: str) -> str:
    return f", in its layer {layer}" if layer else ""
