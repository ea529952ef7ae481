"""Paddle Serving pipelines: Ops joined to a graph, each with workers, channels and batches of its own.

::

    request ──> RequestOp ──> Op ──┬──> Op ──┬──> Op ──> ResponseOp ──> response
                                   └──> Op ──┘
"""
