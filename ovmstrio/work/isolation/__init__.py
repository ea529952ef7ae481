"""Code of users in processes of their own.

::

    server                                          worker process, under an interpreter of its own if need be
    IsolatedCode: places for processes              bootstrap ── CodeHost: threads, and a loop for what is async
      KeptProcess ── WorkerProcess ── calls ──────>   Hosted: the user's object, one in each process
      RemoteGenerator <── values, by credit ───────   GeneratorHost

What runs in the worker needs no more than :mod:`ovmstrio.work.messages` does.
"""
