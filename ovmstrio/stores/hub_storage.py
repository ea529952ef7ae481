"""The Hugging Face hub as a storage, through huggingface_hub; imported only for addresses that need it.

Files are downloaded into the cache of huggingface_hub, which other programs share, and linked from there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging, tqdm

from ovmstrio.core.errors import StorageFailure
from ovmstrio.stores.address import Address, is_hub_offline
from ovmstrio.stores.http_storage import failure_of
from ovmstrio.stores.storage import LocalStorage, OnProgress, StoredFile, reason_of

_CONNECT_SECONDS: Final = 10.0
_REFUSED: Final = frozenset({401, 403})

# Its warnings contain signed URLs; failures are reported by this server.
logging.set_verbosity_error()

_REASONS: Final = (
    (GatedRepoError, "its owner must grant access; set HF_TOKEN"),
    (RepositoryNotFoundError, "it does not exist, or is private; set HF_TOKEN"),
    (RevisionNotFoundError, "the revision does not exist"),
)


class HubStorage:
    """Repositories of models, at ``hf://org/name@revision/path``.

    ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` have their usual meaning; so has a token that
    ``hf auth login`` saved.
    """

    def __init__(self, stall_seconds: float) -> None:
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self._is_offline = is_hub_offline()
        # The client reads these only when it is imported.
        home, cache = os.environ.get("HF_HOME"), os.environ.get("HF_HUB_CACHE")
        self._cache = cache or (f"{home}/hub" if home else None)
        self._timeout = min(_CONNECT_SECONDS, stall_seconds)

    def list_files(self, location: str) -> list[StoredFile]:
        """List the files of a revision; see :meth:`ModelStorage.list_files`."""
        repository, revision, folder = Address(location).hub
        if self._is_offline:
            found = self._list_cached(location, repository, revision)
        else:
            try:
                info = HfApi(endpoint=self._endpoint).model_info(
                    repository, revision=revision or None, files_metadata=True, timeout=self._timeout
                )
            except Exception as error:  # the client raises many types
                raise _failure(location, error) from error
            commit = info.sha or revision or "main"
            found = [
                StoredFile(
                    each.rfilename,
                    f"{repository}@{commit}/{each.rfilename}",
                    -1 if each.size is None else each.size,
                    (each.lfs.sha256 if each.lfs else each.blob_id) or commit,
                    0.0,
                    f"sha256:{each.lfs.sha256}" if each.lfs else f"git:{each.blob_id}" if each.blob_id else "",
                )
                for each in info.siblings or ()
            ]
        return [_below(file, folder) for file in found if not folder or f"{file.path}/".startswith(f"{folder}/")]

    def _list_cached(self, location: str, repository: str, revision: str) -> list[StoredFile]:
        try:
            folder = Path(
                snapshot_download(repository, revision=revision or None, cache_dir=self._cache, local_files_only=True)
            )
        except LocalEntryNotFoundError as error:
            message = f"{location} was not downloaded before, and HF_HUB_OFFLINE is set"
            raise StorageFailure(message, is_permanent=True) from error
        return [
            StoredFile(
                file.path,
                f"{repository}@{folder.name}/{file.path}",
                file.size,
                Path(file.location).resolve().name,
                0.0,
            )
            for file in LocalStorage().list_files(str(folder))
        ]

    def fetch(self, file: StoredFile, target: Path, on_progress: OnProgress) -> None:
        """Download a file into the cache of huggingface_hub, and link it; see :meth:`ModelStorage.fetch`."""
        repository, commit, path = Address(f"hf://{file.location}").hub

        class Progress(tqdm):  # type: ignore[misc]  # untyped
            """Reports to this download, and prints nothing."""

            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **{**named, "disable": True})

            def update(self, n: float | None = 1) -> None:
                on_progress(int(n or 0))

        try:
            found = hf_hub_download(
                repository,
                path,
                revision=commit,
                endpoint=self._endpoint,
                cache_dir=self._cache,
                etag_timeout=self._timeout,
                local_files_only=self._is_offline,
                tqdm_class=Progress,
            )
        except Exception as error:  # the client raises many types
            raise _failure(f"hf://{repository}/{path}", error) from error
        target.unlink(missing_ok=True)
        target.symlink_to(os.path.realpath(found))

    def close(self) -> None:
        """Do nothing: huggingface_hub keeps its connections."""


def _below(file: StoredFile, folder: str) -> StoredFile:
    relative = file.path[len(folder) :].lstrip("/") if folder else file.path
    return StoredFile(relative, file.location, file.size, file.mark, file.modified, file.checksum)


def _failure(location: str, error: Exception) -> StorageFailure:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    reason = next((text for kind, text in _REASONS if isinstance(cause, kind)), "")
    if reason:
        return StorageFailure(f"{location} cannot be read: {reason}", is_permanent=True)
    if isinstance(cause, HfHubHTTPError) and cause.response is not None:
        status = cause.response.status_code
        if status in _REFUSED:
            return StorageFailure(f"{location} cannot be read: access is denied; set HF_TOKEN", is_permanent=True)
        return failure_of(location, status, cause.response.headers.get("retry-after"))
    return StorageFailure(f"{location} cannot be read: {reason_of(error)}")
