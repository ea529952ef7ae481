"""What is tried, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.compiled import Compiled

__all__ = ["Trial", "Verdict", "compile_plain", "trial_of"]

# ----------------------------------------------------------------------
# What is tried, and what came of it
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Trials of models that are configured: the same file, settings and names as where they are loaded for good
# ----------------------------------------------------------------------

_OF_NO_MATTER: Final = {
    "name",
    "base_path",
    "version_policy",
    "origin",
    "problems",
    "cache_dir",
    "allow_cache",
    "nireq",
    "idle_sequence_cleanup",
    "max_sequence_number",
    "sequence_migration",
}
"""Settings that change nothing of what OpenVINO runs."""


def trial_of(source: ModelFile, directory: Path) -> Trial:
    """Make the trial of a model that is about to be compiled.

    Its mapping lies in its directory, as all that it is made of.
    """
    spec, names = source.spec, {"inputs": dict(source.mapping.inputs), "outputs": dict(source.mapping.outputs)}
    return Trial(
        name=spec.name,
        path=directory,
        compile=f"{__name__}:{compile_plain.__name__}",
        argument={
            "file": str(source.file),
            "spec": spec.model_dump_json(exclude={"problems"}),
            "mapping": names,
            "kept": None if source.kept is None else str(source.kept),
        },
        read="ovmstrio.inference.reading:read_model",
        source=source.file,
        device=spec.target_device,
        settings=spec.model_dump(mode="json", exclude=_OF_NO_MATTER),
    )


def compile_plain(argument: Mapping[str, Any]) -> Compiled:
    """Compile a model of plain data, as :func:`~ovmstrio.inference.compile.compile_model`.

    Raises:
        ConfigError: it cannot be compiled.
    """
    spec = ModelSpec.model_validate_json(argument["spec"])
    kept = None if argument["kept"] is None else Path(argument["kept"])
    return compile_model(ModelFile(Path(argument["file"]), spec, TensorMapping(**argument["mapping"]), kept=kept))
