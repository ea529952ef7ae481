"""Loading of OpenVINO models: crash probe, compilation, labels, and the servable of a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import finalize

import structlog
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.config.tensor_mapping import read_mapping
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.hooks import NULL_HOOKS, ServableHooks
from ovmstrio.core.service import Servable
from ovmstrio.core.worker_peers import SequenceOwners
from ovmstrio.inference.blob_cache import BlobCache, BlobCacheFolder, drop_page_cache
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.compiled import Compiled, warm_buckets
from ovmstrio.inference.crash_probe import CrashProbe, ProbeModel, VerdictStore, probe_model_of, verdicts_folder
from ovmstrio.inference.network import Network
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.models.servable import BatchedServable, ModelServable, NetworkSource, auto_shape_problem, has_auto_shape
from ovmstrio.models.stateful import StatefulServable
from ovmstrio.serving.kind import ignore_warning
from ovmstrio.serving.model_versions import check_regular_files, find_model_file
from ovmstrio.util.load_limit import run_load
from ovmstrio.util.regular_files import read_regular_text

log = structlog.get_logger(__name__)


LABELS_FILE: Final = "labels.txt"


async def load_model(
    spec: ModelSpec,
    version: int,
    directory: Path,
    *,
    hooks: ServableHooks = NULL_HOOKS,
    managers: SequenceManagers | None = None,
    tasks: trio.Nursery | None = None,
    warn: Callable[[Problem], None] = ignore_warning,
    owners: SequenceOwners | None = None,
    probe: CrashProbe | None = None,
    blobs: BlobCache | None = None,
) -> Servable:
    """Load, compile and warm up one version; the caller closes the servable.

    ``hooks`` receives inferences and batches, ``warn`` warnings. ``tasks`` runs batches and keeps compiled files; it
    must outlive the servable. ``managers`` has the sequences that continue after a reload. ``owners`` forwards requests
    to other workers; None for a single worker. ``probe`` runs unknown models first; ``blobs`` has compiled files, and
    requires ``tasks``.

    Raises:
        ConfigError: the model is missing, unreadable or contradicts its settings, or OpenVINO crashes with it.
        NotReady: the crash probe could not run.
    """
    source = await run_load(partial(_find_model, spec, directory))
    cache = None if tasks is None else blobs
    lent = None if cache is None else await run_load(partial(_lend_folder, cache, source, directory))
    cached = source if lent is None else replace(source, kept=lent.place)
    try:
        if probe is not None:
            await _probe(probe, probe_model_of(cached, directory), warn)
        network = await _load_network(cached, hooks, {}, warn)
    except BaseException:
        if lent is not None:
            lent.release()
        raise
    if lent is not None and tasks is not None:
        # The folder exists as long as the model, which may be recompiled from it.
        finalize(network, lent.release)
        tasks.start_soon(_keep, lent, network)
    if spec.stateful:
        return StatefulServable(spec, version, network, managers or SequenceManagers(), owners)
    if spec.batching is not None:
        servable = BatchedServable(spec, spec.batching, version, network, hooks)
        if tasks is None:
            raise ValueError("a batched model requires a nursery: pass tasks")
        await tasks.start(servable.serve)
        return servable
    if not has_auto_shape(spec):
        return ModelServable(spec, version, network)
    refusal = auto_shape_problem(network.signature.inputs)
    if refusal:
        raise ConfigError([Problem(refusal, file=spec.origin, path="shape")])
    follower = NetworkSource(network, partial(_load_network, source, hooks))
    return ModelServable(spec, version, network, follower)


async def _probe(probe: CrashProbe, model: ProbeModel, warn: Callable[[Problem], None]) -> None:
    if (warning := (await probe.try_model(model)).warning(model)) is not None:
        warn(warning)


async def _keep(lent: BlobCacheFolder, _: Network) -> None:
    """Keep the compiled files, which are removed with the model otherwise."""
    await run_load(lent.keep)


async def _load_network(
    source: ModelFile,
    hooks: ServableHooks,
    requested: Mapping[str, tuple[int, ...]],
    warn: Callable[[Problem], None] = ignore_warning,
) -> Network:
    compiled, warnings = await run_load(partial(_compile, replace(source, requested=requested)))
    for warning in warnings:
        log.warning(warning.message, model=source.spec.name, setting=warning.path, suggestion=warning.suggestion)
        warn(warning)
    timing = compiled.timing
    if source.labels:
        compiled = replace(compiled, signature=replace(compiled.signature, labels=source.labels))
    network = Network(compiled, hooks)
    log.debug(
        "model compiled",
        model=source.spec.name,
        nireq=compiled.nireq,
        streams=compiled.streams,
        inline=network.runs_inline,
        median_seconds=None if timing is None else timing.median_seconds,
    )
    return network


def _compile(source: ModelFile) -> tuple[Compiled, list[Problem]]:
    compiled, warnings = warm_buckets(compile_model(source))
    for folder in {source.file.parent, source.spec.cache_dir or source.kept or source.file.parent}:
        drop_page_cache(folder)
    return compiled, warnings


def _labels(directory: Path) -> tuple[str, ...]:
    for folder in (directory, directory.parent) if directory.is_dir() else ():
        path = folder / LABELS_FILE
        try:
            return tuple(read_regular_text(path).splitlines())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError([Problem(f"the labels cannot be read: {error}", file=str(path))]) from None
    return ()


def _find_model(spec: ModelSpec, directory: Path) -> ModelFile:
    check_regular_files(directory)
    problems: list[Problem] = []
    found: list[Any] = []
    for read in (find_model_file, read_mapping):
        try:
            found.append(read(directory))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    file, mapping = found
    return ModelFile(file, spec, mapping, labels=_labels(directory))


def _lend_folder(blobs: BlobCache, source: ModelFile, directory: Path) -> BlobCacheFolder | None:
    """Return a folder for the compiled files; None if they are not kept, or the model is unreadable."""
    if source.spec.cache_dir is not None:
        return None
    try:
        key = VerdictStore(verdicts_folder()).key_of(probe_model_of(source, directory))
        weights = source.file.with_suffix(".bin")
        return blobs.lend(key, weights.stat().st_size if weights.exists() else 0)
    except OSError:
        return None
