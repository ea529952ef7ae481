"""API-key callers with fixed keys, and peer addresses of connections without a socket."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ovmstrio.auth.authentication import Authentication, CallerDirectory
from ovmstrio.auth.gate import Gate
from ovmstrio.auth.key_file import CallerEntry, key_hash
from ovmstrio.auth.quota import CallerQuota
from ovmstrio.core.callers import Caller, Scopes
from ovmstrio.core.connection import Peer, UnixSocket, socket_address


def entry_of(name: str, *scopes: str, **options: object) -> CallerEntry:
    """Create the entry of a caller whose key is its name, or with other credentials."""
    proof = {} if {"certificate", "subject"} & options.keys() else {"sha256": key_hash(name)}
    return CallerEntry(name, Scopes.parse(scopes), **(proof | options))  # type: ignore[arg-type]


def gate_of(scopes: Mapping[str, str], allowance: CallerQuota | None = None, *, guards_everything: bool = True) -> Gate:
    """Make a gate for callers whose keys are their names: ``gate_of({"shop": "infer:a read"})``."""
    directory = CallerDirectory()
    callers = {key: Caller(key, "key", Scopes.parse(texts.split()), allowance) for key, texts in scopes.items()}
    directory.replace([], callers)
    return Gate(Authentication(directory), guards_everything=guards_everything)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def peer_at(host: str) -> Peer:
    """Return the peer at an address; an empty host stands for a Unix socket."""
    return Peer(socket_address(socket.AF_INET, (host, 5000)) if host else UnixSocket())


LOCAL = peer_at("127.0.0.1")
REMOTE = peer_at("10.0.0.7")
