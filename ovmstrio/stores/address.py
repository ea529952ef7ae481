"""Addresses of remote files and folders, such as ``s3://bucket/models/one``, and their place in the download cache.

::

    <cache>/<name>-<hash of the address>/current/         the folder of an address
                                        /current/<file>   the file of an address
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from platformdirs import user_cache_path

CACHE_VARIABLE: Final = "OVMSTRIO_DOWNLOADS"
"""Environment variable of the cache folder."""

_SCHEMES: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "hf": "hf",
    "http": "http",
    "https": "http",
}
# A `Path` of an address has lost one of the two slashes.
_ADDRESS: Final = re.compile(r"([A-Za-z0-9]+):/{1,2}([^/].*)", re.DOTALL)
_SLUG: Final = re.compile(r"[^A-Za-z0-9._-]+")
_SLUG_LENGTH: Final = 60
_FILE_SUFFIXES: Final = frozenset(
    {".gguf", ".json", ".onnx", ".pb", ".pbtxt", ".pdiparams", ".pdmodel", ".tflite", ".xml"}
)
ARCHIVE_SUFFIXES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
_HUB: Final = re.compile(
    r"(?P<repo>[^/@]+(?:/[^/@]+)?)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.+))?"
)
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, repr=False)
class Address:
    """Address of a remote file or folder.

    Attributes:
        text: the complete address, which may hold a password or a signature; ``str()`` leaves them out.
    """

    text: str

    def __str__(self) -> str:
        url = urlsplit(self.text)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2] if self.family == 'http' else url.netloc}{url.path}"

    __repr__ = __str__

    @property
    def scheme(self) -> str:
        """Lower-case scheme."""
        return scheme_of(self.text)

    @property
    def family(self) -> str:
        """Kind of store: ``s3``, ``gs``, ``az``, ``hf`` or ``http``."""
        return _SCHEMES[self.scheme]

    @property
    def file_name(self) -> str:
        """Name of the file if the address is that of a file; empty for a folder and for an archive."""
        # An escaped slash separates folders, too, so that no file leads out of the cache's folder.
        last = posixpath.basename(unquote(urlsplit(self.text).path).rstrip("/")).lstrip(".")
        if self.archive_suffix:
            return ""
        is_repository = self.family == "hf" and not self.hub_path
        is_file = not is_repository and Path(last).suffix.lower() in _FILE_SUFFIXES
        return last or "model" if self.family == "http" else last if is_file else ""

    @property
    def archive_suffix(self) -> str:
        """Suffix of an archive, whose files form the folder; empty for any other address."""
        path = urlsplit(self.text).path.lower()
        return next((suffix for suffix in ARCHIVE_SUFFIXES if path.endswith(suffix)), "")

    @cached_property
    def hub(self) -> tuple[str, str, str]:
        """Repository, revision and path of a hub address; the last two may be empty."""
        found = _HUB.fullmatch(self.text.partition("://")[2].strip("/"))
        return ("", "", "") if found is None else (found["repo"], found["revision"] or "", found["path"] or "")

    @property
    def hub_path(self) -> str:
        """Path in the repository of a hub address."""
        return self.hub[2]

    @property
    def is_immutable(self) -> bool:
        """True if the files can never change: a commit of a hub."""
        return self.family == "hf" and _COMMIT.fullmatch(self.hub[1]) is not None

    @property
    def folder(self) -> Path:
        """Place in the download cache."""
        name = _SLUG.sub("-", str(self).replace("://", "-"))[-_SLUG_LENGTH:].strip("-.")
        return cache_root() / f"{name}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    @property
    def path(self) -> Path:
        """Local path of the file or folder once it is downloaded."""
        return self.folder / "current" / self.file_name

    @property
    def index(self) -> Path:
        """File that lists the downloaded files, with their marks."""
        return self.folder / "current" / ".." / "index.json"

    def sibling(self, relative: str) -> Address:
        """Return the address of a path relative to the folder of this file."""
        scheme, _, rest = self.text.partition("://")
        place = rest.partition("?")[0]
        return Address(f"{scheme}://{posixpath.normpath(posixpath.join(posixpath.dirname(place), relative))}")


def find_address(text: str | Path) -> Address | None:
    """Return the address that a setting names, also as a ``Path``; None for a local path and for an invalid URL."""
    found = _ADDRESS.fullmatch(str(text))
    if found is None or found[1].lower() not in _SCHEMES:
        return None
    address = Address(f"{found[1].lower()}://{found[2]}")
    try:
        urlsplit(address.text.encode().decode())
    except ValueError:
        return None
    return address


def local_path(text: str | Path) -> Path:
    """Return the path of a local folder, given as a path, a ``file://`` URL, or the address of a remote one."""
    address = find_address(text)
    if address is not None:
        return address.path
    return Path(unquote(urlsplit(str(text)).path)) if scheme_of(str(text)) == "file" else Path(text)


def scheme_of(location: str) -> str:
    """Return the lower-case scheme of a URL; empty for a path."""
    scheme, mark, _ = location.partition("://")
    return scheme.lower() if mark else ""


def is_hub_offline() -> bool:
    """Return whether the user wants no requests to the hub."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in _OFFLINE)


def cache_root() -> Path:
    """Return the folder of the download cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_path("ovmstrio") / "downloads").absolute()
