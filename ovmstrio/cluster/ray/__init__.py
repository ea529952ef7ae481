"""Ray Serve applications; the only importer of Ray.

::

    Ray proxies (HTTP, gRPC) ──> ingress ──handle──> replica of a group ──handle──> replica of another group
                                  └ a server without listeners, on its own trio loop
"""
