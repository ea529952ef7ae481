"""Handler that classifies a flower with a scikit-learn classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joblib

from ovmstrio.ext.handlers import HTTPError

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")
SPECIES = ("setosa", "versicolor", "virginica")


class Handler:
    """Handler whose model versions the server loads from the folder and reloads after changes."""

    def __init__(self, model_client: Any) -> None:
        self.client = model_client

    def load_model(self, model_path: str) -> Any:
        """Load one version; the server calls it once per version and again when its files change."""
        return joblib.load(Path(model_path) / "model.joblib")

    def handle_post(self, payload: Any, query_params: Any) -> dict[str, Any]:
        """Classify the flower of the payload."""
        try:
            sizes = [float(payload[name]) for name in FEATURES]
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPError(400, f"expected an object of numbers: {', '.join(FEATURES)}") from error
        model = self.client.get_model(model_version=query_params.get("version"))
        (label,) = model.predict([sizes])
        return {"species": SPECIES[label], "by": type(model).__name__}
