"""A configuration as an application of Ray Serve; the only importer of Ray.

::

    Ray's proxies (HTTP, gRPC) ──> ingress ──handle──> replica of a group ──handle──> replica of another group
                                                          └ a server without listeners, on a trio loop of its own
"""
