"""The extras of this package, and the command that installs one from where the package itself came from.

A hint never names a package by a name alone that only an index could resolve: this one is on none, so that whoever
registered its name there would be installed in its place.
"""

from __future__ import annotations

import json
import shlex
import sys
from enum import StrEnum
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGE: Final = "ovmstrio"


class Extra(StrEnum):
    """What can be installed beside the server, each for something that it does only then."""

    HANDLERS = "handlers"
    LLM = "llm"
    OTEL = "otel"
    PADDLE = "paddle"
    QUANTIZE = "quantize"
    RAY = "ray"
    S3 = "s3"
    SAMPLES = "samples"
    TOKENS = "tokens"
    TORCH = "torch"
    VISION = "vision"


def way_to_install(extra: Extra, installed: Callable[[str], Distribution] = distribution) -> str:
    """Give the command that installs an extra into this environment.

    It installs from the folder, the file or the address that the package itself was installed from; where that is not
    known any more, it names the packages that the extra consists of.
    """
    try:
        package = installed(_PACKAGE)
    except PackageNotFoundError:
        # A checkout on the path of an environment that has what it needs.
        return _command(f"{Path(__file__).parents[2]}[{extra}]")
    origin = _origin(package)
    address = str(origin.get("url", ""))
    path = Path(unquote(urlsplit(address).path))
    if address.startswith("file:"):
        if path.exists():
            is_editable = origin.get("dir_info", {}).get("editable", False)
            return _command(*(["-e"] if is_editable else []), f"{path}[{extra}]")
    elif address:
        return _command(f"{_PACKAGE}[{extra}] @ {_pinned(address, origin)}")
    return _command(*_packages(package, extra))


def _origin(package: Distribution) -> dict[str, Any]:
    """Read what pip noted of where it took the package from (PEP 610); nothing for one from an index."""
    try:
        origin = json.loads(package.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return origin if isinstance(origin, dict) else {}


def _pinned(address: str, origin: dict[str, Any]) -> str:
    system = origin.get("vcs_info")
    return f"{system['vcs']}+{address}@{system['commit_id']}" if system else address


def _packages(package: Distribution, extra: Extra) -> list[str]:
    """Give the requirements of an extra alone."""
    parts = (text.partition(";") for text in package.requires or [])
    return [name.strip() for name, _, marker in parts if marker.replace('"', "'").strip() == f"extra == '{extra}'"]


def _command(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])
