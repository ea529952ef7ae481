"""Handlers in worker processes.

::

    server                                         worker process
    HandlerRoutes ── IsolatedHandler ── request ──> HostedHandler: event loop with the handler, its threads and models
                  <── response or its chunks ──────
"""
