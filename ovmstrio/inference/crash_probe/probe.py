"""Subject and verdict of a crash probe."""

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


@dataclass(frozen=True, slots=True)
class Trial:
    """A model to probe."""

    name: str  # name for messages
    path: Path  # file or folder with all files of the model
    compile: str  # ``module:function`` that returns a ``Compiled`` for ``argument``; blocking
    argument: Any  # plain data
    read: str  # ``module:function`` that reads ``source``, for the search of the crashing layer
    source: Path  # file or folder that OpenVINO reads
    device: str
    settings: Any  # plain data with everything besides the files that affects the result


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a probe."""

    crash: str = ""  # signal that ended the process; empty if the model ran
    layer: str = ""  # first layer that crashes; empty if unknown
    zeros_crash: str = ""  # signal if all inputs are zeros; empty if there was none
    zeros_layer: str = ""  # layer that crashes on zeros
    day: str = ""  # date of the probe, ISO format

    def refusal(self, trial: Trial, remembered: Path | None) -> ConfigError:
        """Return the error of a model that crashed; ``remembered`` is the file of a stored verdict."""
        message, hint = f"OpenVINO crashes with {self.crash} when it runs the model{_at(self.layer)}", ""
        if remembered is not None:
            message += f" (crash probe of {self.day}; not repeated while files, settings and OpenVINO are unchanged)"
            hint = f"to repeat the probe, remove {remembered} or start with --trial_load again"
        return ConfigError([Problem(message, file=str(trial.source), suggestion=hint)])

    def remark(self, trial: Trial) -> Problem | None:
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


def trial_of(source: ModelFile, directory: Path) -> Trial:
    """Return the probe subject of a model file; ``directory`` has all its files, the mapping included."""
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
        settings=spec.model_dump(mode="json", exclude=_IGNORED_SETTINGS),
    )


def compile_plain(argument: Mapping[str, Any]) -> Compiled:
    """Compile a model described by plain data, like :func:`~ovmstrio.inference.compile.compile_model`."""
    spec = ModelSpec.model_validate_json(argument["spec"])
    kept = None if argument["kept"] is None else Path(argument["kept"])
    return compile_model(ModelFile(Path(argument["file"]), spec, TensorMapping(**argument["mapping"]), kept=kept))
