"""Samples that every installation can serve without a download."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio.samples.catalog import BY_NAME, Sample
from ovmstrio.samples.entries import write_config, write_entries
from ovmstrio.samples.file_type.prepare import installed_files
from ovmstrio.samples.iris.flowers import FLOWERS

__all__ = ["FLOWER", "embedded_samples", "prepare_repository", "sources"]

FLOWER: Final = "flower.npy"
"""File next to ``config.json`` with one flower, as input for the model iris."""
_HERE: Final = Path(__file__).parent


def sources(sample: Sample) -> Path | None:
    """Return the folder with the installed files of ``sample``, or None if they are not installed."""
    return installed_files() if sample.name == "file_type" else _HERE / sample.name


def embedded_samples() -> list[Sample]:
    """List the samples that need no download and no compilation."""
    here = [sample for sample in BY_NAME.values() if sample.wheel is None and not sample.compiled]
    return [sample for sample in here if sources(sample) is not None]


def _fingerprint(samples: list[Sample]) -> str:
    """Return a hash of everything that the repository is made of; an equal hash allows its reuse."""
    digest = hashlib.sha256(version("openvino").encode() + Path(__file__).read_bytes())
    for sample in samples:
        digest.update(sample.name.encode())
        own = [path for path in (_HERE / sample.name).iterdir() if path.suffix in {".py", ".json", ".pbtxt"}]
        for path in sorted(own):
            digest.update(path.read_bytes())
    if BY_NAME["file_type"] in samples:
        digest.update(version("magika").encode())
    return digest.hexdigest()[:16]


def _write(samples: list[Sample], repository: Path) -> None:
    for sample in samples:
        write_entries(sample, sources(sample) or _HERE, repository)
    np.save(repository / FLOWER, np.array([FLOWERS[0][0]], np.float32))
    write_config(samples, repository / "config.json")


def prepare_repository(cache_dir: Path) -> Path:
    """Write a model repository of the embedded samples below ``cache_dir`` and return the path of its ``config.json``.

    An existing repository is reused.  The repository appears atomically, never half-written.
    """
    samples = embedded_samples()
    target = cache_dir / f"samples-{_fingerprint(samples)}"
    if not (target / "config.json").is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".samples-", dir=cache_dir))
        try:
            _write(samples, scratch / "made")
            (scratch / "made").rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # otherwise another process wrote the same repository first
                raise
        finally:
            shutil.rmtree(scratch)
    return target / "config.json"
