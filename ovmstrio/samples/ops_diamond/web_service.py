"""Service that estimates the width of a flower's petals with two models in parallel."""

from __future__ import annotations

from typing import Any

import numpy as np

from paddle_serving_server.web_service import Op, WebService


class ReadOp(Op):
    """Op without a model that parses text like ``5.1,3.5,1.4`` to an array."""

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Parse the sizes of a flower to one row."""
        ((_, request),) = input_dicts.items()
        sizes = [float(size) for size in request["x"].split(",")]
        return {"x": np.array([sizes], np.float32)}, False, None, ""


class EstimateOp(Op):
    """Op that runs a model; the rows of several requests are one batch."""


class JoinOp(Op):
    """Op that combines the outputs of both models."""

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Return the mean and the difference of both estimates."""
        first, second = (float(input_dicts[name]["width"][0, 0]) for name in ("all_sizes", "petal_only"))
        return {"width": f"{(first + second) / 2:.4f}", "apart": f"{abs(first - second):.4f}"}, False, None, ""


class DiamondService(WebService):
    """Pipeline of the sample."""

    def get_pipeline_response(self, read_op: Op) -> Op:
        """Run two Ops on the same input at once."""
        read = ReadOp(name="read", input_ops=[read_op])
        models = [EstimateOp(name=name, input_ops=[read]) for name in ("all_sizes", "petal_only")]
        return JoinOp(name="join", input_ops=models)


diamond_service = DiamondService(name="diamond")
diamond_service.prepare_pipeline_config("config.yml")
diamond_service.run_service()
