"""Choice of the storage of a location by its scheme."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.stores.address import scheme_of
from ovmstrio.stores.storage import STALL_SECONDS, LocalStorage, ModelStorage, redact
from ovmstrio.util.extras import Extra, install_command

OpenStorage = Callable[[str], ModelStorage]
"""Opens the storage of a location."""

_PACKAGES: Final = {
    "s3": ("s3fs", Extra.S3),
    "s3a": ("s3fs", Extra.S3),
    "gs": ("gcsfs", Extra.GS),
    "gcs": ("gcsfs", Extra.GS),
    "az": ("adlfs", Extra.AZ),
    "abfs": ("adlfs", Extra.AZ),
    "hf": ("huggingface_hub", Extra.HUB),
}


def open_storage(location: str, stall_seconds: float = STALL_SECONDS) -> ModelStorage:
    """Open the storage of a location; reads fail after ``stall_seconds`` without data.

    Raises:
        ConfigError: the package for such URLs is not installed.
    """
    scheme = scheme_of(location)
    if scheme in {"", "file"}:
        return LocalStorage()
    package, extra = _PACKAGES.get(scheme, ("", None))
    # Each storage imports a client, which only its users need.
    try:
        if package:
            importlib.import_module(package)
        if scheme in {"http", "https"}:
            from ovmstrio.stores.http_storage import HttpStorage  # noqa: PLC0415 - as said

            return HttpStorage(stall_seconds)
        if scheme == "hf":
            from ovmstrio.stores.hub_storage import HubStorage  # noqa: PLC0415 - as said

            return HubStorage(stall_seconds)
        from ovmstrio.stores.fsspec_storage import FsspecStorage  # noqa: PLC0415 - as said

        return FsspecStorage(scheme, stall_seconds)
    except (ImportError, ValueError) as error:
        hint = install_command(extra) if extra is not None else f"pip install {package or 'its fsspec package'}"
        message = f"URLs that begin with {scheme}:// cannot be read: {error}"
        raise ConfigError([Problem(message, found=redact(location), suggestion=hint)]) from error
