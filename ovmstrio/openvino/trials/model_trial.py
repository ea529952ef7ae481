"""Trials of models that are configured: the same file, settings and names as where they are loaded for good."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.specs import ModelSpec
from ovmstrio.openvino.compile import ModelFile, compile_model
from ovmstrio.openvino.compiled import Compiled
from ovmstrio.openvino.trials.trial import Trial

__all__ = ["compile_plain", "trial_of"]

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
        read="ovmstrio.openvino.reading:read_model",
        source=source.file,
        device=spec.target_device,
        settings=spec.model_dump(mode="json", exclude=_OF_NO_MATTER),
    )


def compile_plain(argument: Mapping[str, Any]) -> Compiled:
    """Compile a model of plain data, as :func:`~ovmstrio.openvino.compile.compile_model`.

    Raises:
        ConfigError: it cannot be compiled.
    """
    spec = ModelSpec.model_validate_json(argument["spec"])
    kept = None if argument["kept"] is None else Path(argument["kept"])
    return compile_model(ModelFile(Path(argument["file"]), spec, TensorMapping(**argument["mapping"]), kept=kept))
