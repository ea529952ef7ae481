"""Models of other servers as servables of this one, called over KServe v2.

::

    infer ── RemoteServable ── which address, again?, twice? ── Endpoint ── gRPC on HTTP/2, or REST
                    └── targets: health and circuit of each address
"""
