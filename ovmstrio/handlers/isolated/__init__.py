"""Handlers in worker processes.

::

    server                                            worker process
    HandlerRoutes ── IsolatedHandler ── a request ──> HostedHandler: a loop with the handler, its threads and models
                  <── an answer, or its pieces ─────
"""
