"""A service that several processes serve: one accepts connections, the others answer them.

::

    parent ── listeners ── a connection ──(its descriptor)──> worker process ── the server, as in one process
           └─ board: what the processes know of each other
"""
