"""Keys of streams, which say where a stream is; controllers of Ray import this and nothing else of the server's."""

from __future__ import annotations

import uuid

__all__ = ["make_key", "replica_of"]


def make_key(replica: str) -> str:
    """Make a key for a new stream of a replica."""
    return f"{replica}:{uuid.uuid4().hex}"


def replica_of(key: str) -> str:
    """Name the replica that has a stream."""
    return key.rpartition(":")[0]
