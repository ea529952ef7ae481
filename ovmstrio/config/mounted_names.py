"""Names that paths of REST begin with: none may be the beginning of the server's own paths."""

from __future__ import annotations

from typing import Final

from ovmstrio.config.findings import shown
from ovmstrio.config.model_options import check_name
from ovmstrio.core.errors import Problem

__all__ = ["RESERVED", "check_mounted_name"]

RESERVED: Final = ("v1", "v2", "v3", "metrics", "health")
"""What paths of REST begin with that are the server's own."""


def check_mounted_name(name: str) -> list[Problem]:
    """Check the name of a service that is called at ``/{name}``; the path of the problems is the key ``name``."""
    if name in RESERVED:
        message = "the name is the beginning of the server's own paths"
        expected = f"a name other than {', '.join(RESERVED)}"
        return [Problem(message, path="name", expected=expected, found=shown(name))]
    if "/" in name:
        return [Problem("the name cannot be used", path="name", expected="a name without '/'", found=shown(name))]
    return check_name(name)
