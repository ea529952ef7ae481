"""Handler that classifies a flower with the requested version of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortex_internal.lib.log import logger
from ovmstrio.ext.handlers import HTTPError

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


class Handler:
    """Handler with one instance in each process."""

    def __init__(self, config: dict[str, Any], model_client: Any) -> None:
        self.default = config["version"]
        self.client = model_client
        # Load the latest version now, so that an unloadable model fails at startup.
        self.client.get_model(model_version=self.default)

    def load_model(self, model_path: str) -> dict[str, Any]:
        """Load one version; the server calls it once per version."""
        fitted: dict[str, Any] = json.loads((Path(model_path) / "coefficients.json").read_text(encoding="utf-8"))
        return fitted

    def handle_post(self, payload: Any, query_params: Any) -> dict[str, Any]:
        """Classify the flower of the payload."""
        version = query_params.get("version", self.default)
        try:
            sizes = [float(payload[name]) for name in FEATURES]
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPError(400, f"expected an object of numbers: {', '.join(FEATURES)}") from error
        model = self.client.get_model(model_version=version)
        scores = [
            sum(weight * size for weight, size in zip(weights, sizes, strict=True)) + intercept
            for weights, intercept in zip(model["weights"], model["intercepts"], strict=True)
        ]
        species = model["classes"][scores.index(max(scores))]
        logger.info("classified", extra={"species": species, "version": version})
        return {"species": species, "version": version}
