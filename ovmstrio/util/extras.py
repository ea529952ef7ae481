"""The package's extras, and the command that installs an extra from the source of the installed package.

A command never contains just the name of this package, because the package is on no index. An index could install a
foreign package of that name (dependency confusion).
"""

from __future__ import annotations

import json
import shlex
import sys
from enum import StrEnum
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGE: Final = "ovmstrio"


class Extra(StrEnum):
    """Optional dependencies of the package, each for one feature."""

    AZ = "az"
    GRPC = "grpc"
    GS = "gs"
    HANDLERS = "handlers"
    HUB = "hub"
    IMAGES = "images"
    JSON = "json"
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


def install_command(extra: Extra, installed: Callable[[str], Distribution] = distribution) -> str:
    """Return the command that installs an extra into this environment.

    The command installs from the folder, file or URL that the package was installed from.  If that source is unknown or
    no longer exists, the command lists the extra's requirements.
    """
    try:
        package = installed(_PACKAGE)
    except PackageNotFoundError:
        # The package is a checkout on the import path.
        return _pip_install(f"{Path(__file__).parents[2]}[{extra}]")
    origin = _origin(package)
    address = str(origin.get("url", ""))
    path = Path(unquote(urlsplit(address).path))
    if address.startswith("file:"):
        if path.exists():
            is_editable = origin.get("dir_info", {}).get("editable", False)
            return _pip_install(*(["-e"] if is_editable else []), f"{path}[{extra}]")
    elif address:
        return _pip_install(f"{_PACKAGE}[{extra}] @ {_pinned_url(address, origin)}")
    return _pip_install(*_requirements_of(package, extra))


def missing_extra(module: str, extra: Extra) -> str:
    """Return an error text with the install command if a module of an extra is missing, or an empty text."""
    return "" if find_spec(module) is not None else f"{module} is not installed: {install_command(extra)}"


def _origin(package: Distribution) -> dict[str, Any]:
    """Return the package's ``direct_url.json`` (PEP 610); empty for a package from an index."""
    try:
        origin = json.loads(package.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return origin if isinstance(origin, dict) else {}


def _pinned_url(address: str, origin: dict[str, Any]) -> str:
    system = origin.get("vcs_info")
    return f"{system['vcs']}+{address}@{system['commit_id']}" if system else address


def _requirements_of(package: Distribution, extra: Extra) -> list[str]:
    parts = (text.partition(";") for text in package.requires or [])
    return [name.strip() for name, _, marker in parts if marker.replace('"', "'").strip() == f"extra == '{extra}'"]


def _pip_install(*arguments: str) -> str:
    if find_spec("pip") is None and which("uv") is not None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *arguments])
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])
