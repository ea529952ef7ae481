"""Models and results of crash probes, without OpenVINO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from ovmstrio.inference.compile import ModelFile

PROGRAM: Final = "ovmstrio.inference.crash_probe.program"


@dataclass(frozen=True, slots=True)
class ProbeModel:
    """A model to probe."""

    name: str  # name for messages
    path: Path  # file or folder with all files of the model
    compile: str  # ``module:function`` that returns a ``Compiled`` for ``argument``; blocking
    argument: Any  # plain data
    read: str  # ``module:function`` that reads ``source``, for the search of the crashing layer
    source: Path  # file or folder that OpenVINO reads
    device: str
    settings: Any  # plain data with everything besides the files that affects the result


# Settings that do not affect what OpenVINO runs.
_IGNORED_SETTINGS: Final = {
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



def probe_model_of(source: ModelFile, directory: Path) -> ProbeModel:
    """Return the probe subject of a model file; ``directory`` has all its files, the mapping included."""
    spec, names = source.spec, {"inputs": dict(source.mapping.inputs), "outputs": dict(source.mapping.outputs)}
    return ProbeModel(
        name=spec.name,
        path=directory,
        compile=f"{PROGRAM}:compile_from_plain_data",
        argument={
            "file": str(source.file),
            "spec": spec.model_dump_json(exclude={"problems"}),
            "mapping": names,
            "kept": None if source.kept is None else str(source.kept),
        },
        read="ovmstrio.inference.model_readers:read_model",
        source=source.file,
        device=spec.target_device,
        settings=spec.model_dump(mode="json", exclude=_IGNORED_SETTINGS),
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a probe."""

    crash: str = ""  # signal that ended the process; empty if the model ran
    layer: str = ""  # first layer that crashes; empty if unknown
    zeros_crash: str = ""  # signal if all inputs are zeros; empty if there was none
    zeros_layer: str = ""  # layer that crashes on zeros
    day: str = ""  # date of the probe, ISO format

    def refusal(self, trial: ProbeModel, remembered: Path | None) -> ConfigError:
        """Return the error of a model that crashed; ``remembered`` is the file of a stored verdict."""
        message, hint = f"OpenVINO crashes with {self.crash} when it runs the model{_at(self.layer)}", ""
        if remembered is not None:
            message += f" (crash probe of {self.day}; not repeated while files, settings and OpenVINO are unchanged)"
            hint = f"to repeat the probe, remove {remembered} or start with --trial_load again"
        return ConfigError([Problem(message, file=str(trial.source), suggestion=hint)])

    def remark(self, trial: ProbeModel) -> Problem | None:
        """Return a warning if the model crashes on zeros."""
        if not self.zeros_crash:
            return None
        message = (
            f"OpenVINO crashes with {self.zeros_crash} when all inputs of the model are zeros{_at(self.zeros_layer)}"
        )
        hint = "a request with such inputs would end the server: check the inputs inside the model"
        return Problem(message, file=str(trial.source), suggestion=hint, severity="warning")


def _at(layer: str) -> str:
    return f" in layer {layer}" if layer else ""
