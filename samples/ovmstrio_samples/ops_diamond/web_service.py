"""Estimates how wide a flower's petals are with two models side by side, and tells how far they are apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from paddle_serving_server.web_service import Op, WebService


class ReadOp(Op):
    """Makes an array of text like ``5.1,3.5,1.4``; has no model."""

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Make one row of the sizes of a flower."""
        ((_, request),) = input_dicts.items()
        sizes = [float(size) for size in request["x"].split(",")]
        return {"x": np.array([sizes], np.float32)}, False, None, ""


class EstimateOp(Op):
    """Runs a model on what it gets; the rows of several requests are inferred together."""


class JoinOp(Op):
    """Gets what both models say; an Op with several inputs has to say what it makes of them."""

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Give the mean, and how far the two are apart."""
        first, second = (float(input_dicts[name]["width"][0, 0]) for name in ("all_sizes", "petal_only"))
        return {"width": f"{(first + second) / 2:.4f}", "apart": f"{abs(first - second):.4f}"}, False, None, ""


class DiamondService(WebService):
    """The pipeline."""

    def get_pipeline_response(self, read_op: Op) -> Op:
        """Let two Ops work on the same input at once."""
        read = ReadOp(name="read", input_ops=[read_op])
        models = [EstimateOp(name=name, input_ops=[read]) for name in ("all_sizes", "petal_only")]
        return JoinOp(name="join", input_ops=models)


diamond_service = DiamondService(name="diamond")
diamond_service.prepare_pipeline_config("config.yml")
diamond_service.run_service()
