"""Subject and verdict of a crash probe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.specs import ModelSpec
from ovmstrio.config.tensor_mapping import TensorMapping
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe.verdict import ProbeModel

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
        compile=f"{__name__}:{compile_from_plain_data.__name__}",
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


def compile_from_plain_data(argument: Mapping[str, Any]) -> Compiled:
    """Compile a model described by plain data, like :func:`~ovmstrio.inference.compile.compile_model`."""
    spec = ModelSpec.model_validate_json(argument["spec"])
    kept = None if argument["kept"] is None else Path(argument["kept"])
    return compile_model(ModelFile(Path(argument["file"]), spec, TensorMapping(**argument["mapping"]), kept=kept))
