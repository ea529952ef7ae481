"""Training of a model version: ``python -m ovmstrio.samples.handler_sklearn.train MODELS VERSION [KIND]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "train"]

KINDS = ("regression", "neighbours", "forest")


def _classifier(kind: str) -> Any:
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 - this sample alone needs scikit-learn
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - as above
    from sklearn.neighbors import KNeighborsClassifier  # noqa: PLC0415 - as above

    if kind == "forest":
        return RandomForestClassifier(20, random_state=0)
    return KNeighborsClassifier() if kind == "neighbours" else LogisticRegression(max_iter=10_000)


def train(models: Path, version: int, kind: str = KINDS[0]) -> Path:
    """Train a classifier and write ``<models>/<version>/model.joblib``; the version appears atomically.

    Raises:
        FileExistsError: the version already exists.
    """
    import joblib  # noqa: PLC0415 - as above
    from sklearn.datasets import load_iris  # noqa: PLC0415 - as above

    features, species = load_iris(return_X_y=True)
    unfinished = models.with_name("unfinished")
    unfinished.mkdir(parents=True)
    joblib.dump(_classifier(kind).fit(features, species), unfinished / "model.joblib")
    models.mkdir(exist_ok=True)
    return unfinished.rename(models / str(version))


if __name__ == "__main__":
    print(train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else KINDS[0]))
