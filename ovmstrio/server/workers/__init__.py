"""A service that several processes serve: one accepts connections, the others answer them.

::

    parent ── listeners ── a connection ──(its descriptor)──> worker process ── the server, as in one process
           └─ board: what the processes know of each other
"""

from ovmstrio.server.workers.choosing import choose_workers
from ovmstrio.server.workers.parent import serve_with_workers

__all__ = ["choose_workers", "serve_with_workers"]
