"""What ``/info`` tells of SavedModels that are all here: their signatures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.handlers.models.copies import Copy
from ovmstrio.runtimes.handlers.models.saved_model import SavedModel, choose_signature, read_saved_model
from ovmstrio.runtimes.handlers.models.shelf import Shelf

__all__ = ["SavedModelInfo"]


class SavedModelInfo:
    """Describes SavedModels; reads the file of each of their copies once.

    Args:
        key_for: tells which signature is wanted of a model in a folder, if one is.
    """

    def __init__(self, key_for: Callable[[Path], str | None]) -> None:
        self._key_for = key_for
        self._known: dict[Copy, dict[str, Any]] = {}

    def __call__(self, shelf: Shelf) -> dict[str, dict[str, Any]]:
        """Describe all that there are, by name and version, the highest version of a model first."""
        catalog, copies = shelf.catalog, shelf.copies()
        self._known = {copy: self._known.get(copy) or self._describe(copy) for copy in copies.values()}
        ordered = [key for name in sorted({key.name for key in copies}) for key in shelf.versions(name)]
        return {
            f"{key.name}-{key.version}": self._known[copies[key]] | {"timestamp": catalog[key].timestamp}
            for key in ordered
            if key in catalog and key in copies
        }

    def _describe(self, copy: Copy) -> dict[str, Any]:
        described: dict[str, Any] = {"disk_path": str(copy.folder)}
        try:
            saved = read_saved_model(copy.folder)
            key = choose_signature(saved.signatures, self._key_for(copy.folder))
        except ConfigError as error:
            return described | {"problem": str(error)}
        signatures = {name: signature.described() for name, signature in saved.signatures.items()}
        inputs = _input_signatures(saved, key)
        return described | {
            "signature_def": signatures,
            "signature_key": key,
            "input_signatures": inputs,
            "input_signature": inputs,
        }


def _input_signatures(saved: SavedModel, key: str) -> dict[str, Any]:
    return {
        name: {"shape": "unknown" if info.shape is None else list(info.shape), "type": info.type_name}
        for name, info in saved.signatures[key].inputs.items()
    }
