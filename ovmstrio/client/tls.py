"""The client's side of TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ClientTls"]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files: the CA to trust in place of the system's, and the client's own certificate with its key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
