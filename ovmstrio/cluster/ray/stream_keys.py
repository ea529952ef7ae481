"""Stream keys, which contain the replica; Ray's controllers import only this."""

from __future__ import annotations

import uuid


def make_key(replica: str) -> str:
    """Return a key for a new stream of a replica."""
    return f"{replica}:{uuid.uuid4().hex}"


def replica_of(key: str) -> str:
    """Return the replica of a stream."""
    return key.rpartition(":")[0]
