"""Pipeline API of Paddle Serving: Ops, servers and the client.

The import creates no log folder; a server start does.
"""

from paddle_serving_server.pipeline.analyse import Analyst
from paddle_serving_server.pipeline.local_service_handler import LocalServiceHandler
from paddle_serving_server.pipeline.operator import Op, RequestOp, ResponseOp
from paddle_serving_server.pipeline.pipeline_client import PipelineClient
from paddle_serving_server.pipeline.pipeline_server import PipelineServer

__all__ = ["Analyst", "LocalServiceHandler", "Op", "PipelineClient", "PipelineServer", "RequestOp", "ResponseOp"]
