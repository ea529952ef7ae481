"""Service kind of OpenVINO models, and their loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Final

import structlog

from ovmstrio.config.model_entries import ModelEntries
from ovmstrio.config.specs import ModelSpec, SpecificVersions
from ovmstrio.config.tensor_mapping import MAPPING_FILE
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.service import NO_INTROSPECTION, Introspection
from ovmstrio.serving.fingerprints import tree_fingerprint
from ovmstrio.serving.kind import CallType, Kind
from ovmstrio.serving.model_versions import scan_versions
from ovmstrio.util.lazy_import import import_aside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.core.service import Service
    from ovmstrio.serving.kind import LoadContext
    from ovmstrio.serving.model_versions import Listing

_KIND_CHANGED: Final = "Model type cannot be changed after it is loaded"


class ModelKind(Kind[ModelSpec]):
    """OpenVINO models with numbered versions."""

    name = ModelSpec.kind
    spec = ModelSpec
    call_types = frozenset({CallType.TENSORS})
    loads_with: ClassVar[str] = "ovmstrio.models.loading"
    runs_user_code = False
    fills_cores = True
    has_versions = True
    section: ClassVar[str] = ModelEntries.section
    occupied = "Model has a name that is taken"

    def read(self, file: ConfigFile) -> list[ModelSpec]:
        """Return the models of a configuration file, including models of its graphs."""
        return list(file.models.known.values())

    def list_versions(self, spec: ModelSpec) -> Listing:
        """List the version directories."""
        if spec.errors:
            raise ConfigError(spec.errors)
        return scan_versions(spec.base_path)

    def fingerprint(self, spec: ModelSpec, directory: Path) -> str:
        """Return the fingerprint of a version's files."""
        del spec
        return tree_fingerprint(directory)

    def check_change(self, spec: ModelSpec, served: Sequence[ServableSpec]) -> None:
        """Reject the replacement of a stateful model by a stateless one and vice versa."""
        models = [each for each in (spec, *served) if isinstance(each, ModelSpec)]
        if len({each.stateful for each in models}) > 1:
            suggestion = "rename it, or remove the model from the configuration first"
            raise ConfigError([Problem(_KIND_CHANGED, file=spec.origin, path="stateful", suggestion=suggestion)])

    def examine(self, spec: ModelSpec) -> Sequence[Problem]:
        """Return a warning for each configured version that does not exist."""
        if not isinstance(spec.version_policy, SpecificVersions):
            return ()
        try:
            listed = scan_versions(spec.base_path).versions
        except ConfigError:
            return ()
        found = ", ".join(map(str, listed)) or "none"
        return [
            Problem(
                f"version {version} does not exist",
                path="model_version_policy",
                expected=str(spec.base_path / str(version)),
                found=found,
                severity="warning",
            )
            for version in sorted(set(spec.version_policy.versions) - set(listed))
        ]

    def place(self, spec: ModelSpec, problem: Problem, directory: Path | None) -> Problem:
        """Locate a problem at the setting that causes it, or at the model's files."""
        if problem in spec.problems or problem.file == spec.origin:
            return spec.placed(problem)
        if directory is None:
            in_settings = replace(problem, file="", path="base_path", found=problem.found or str(spec.base_path))
            return problem if spec.place is None else spec.placed(in_settings)
        if problem.path and Path(problem.file).name != MAPPING_FILE:
            return spec.placed(replace(problem, file=""))
        return problem if problem.file else replace(problem, file=str(directory))

    async def load(self, spec: ModelSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Read, compile and warm up a version."""
        from ovmstrio.inference.crash_probe import CrashProbe  # noqa: PLC0415 - imported when first needed
        from ovmstrio.models.sequences import SequenceManagers  # noqa: PLC0415 - imported when first needed

        if (probe := context.find(CrashProbe)) is not None:
            await probe.prepare()
        # Imported in a thread, and only if there are models: importing OpenVINO takes long.
        await import_aside(self.loads_with)
        from ovmstrio.inference.blob_cache import BlobCache  # noqa: PLC0415 - imported when first needed
        from ovmstrio.models.loading import load_model  # noqa: PLC0415 - imported when first needed

        started = perf_counter()
        hooks = context.meters.servable(spec.name, str(version))
        managers = context.shared(SequenceManagers)
        servable = await load_model(
            spec,
            version,
            directory,
            hooks=hooks,
            managers=managers,
            tasks=context.tasks,
            warn=context.warn,
            owners=context.sequence_owners,
            probe=probe,
            blobs=context.find(BlobCache),
        )
        hooks.set_load_seconds(perf_counter() - started)
        return servable

    def look_inside(self, spec: ModelSpec, service: Service) -> Introspection:
        """Return device and compilation settings."""
        from ovmstrio.models.servable import BatchedServable, ModelServable  # noqa: PLC0415 - imported when first needed
        from ovmstrio.models.stateful import StatefulServable  # noqa: PLC0415 - imported when first needed

        if not isinstance(service, ModelServable | BatchedServable | StatefulServable):
            return NO_INTROSPECTION
        batching = {} if spec.batching is None else {"batches": f"up to {spec.batching.max_batch_size}"}
        return Introspection(facts={"device": spec.target_device, **service.facts, **batching})


# Loading

log = structlog.get_logger(__name__)
