"""Engines of a server of several processes: one process has each of them.

::

    the owner:  ShownEngine ── a process, as alone ──┬─ its own requests
                                                     └─ those of others, which have numbers of their own
    others:     RemoteEngine ──(a link between processes)──> the owner
"""
