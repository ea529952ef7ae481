"""Ask for three species: ``python -m ovmstrio_samples.handler_sklearn.client [URL] [VERSION]``."""

from __future__ import annotations

import json
import sys
from urllib.request import Request, urlopen

from ovmstrio_samples.handler_iris.client import FEATURES
from ovmstrio_samples.iris.client import FLOWERS

__all__ = ["classify"]


def classify(url: str, sizes: tuple[float, ...], version: str = "latest") -> tuple[str, str]:
    """Give the species of a flower of these sizes (cm), and what kind of classifier said so."""
    body = json.dumps(dict(zip(FEATURES, sizes, strict=True))).encode()
    request = Request(f"{url}/?version={version}", body, {"Content-Type": "application/json"})  # noqa: S310 - the user's
    with urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
        told = json.load(answer)
    return told["species"], told["by"]


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
    for sizes, species in FLOWERS:
        print(*sizes, "cm:", *classify(url, sizes, *sys.argv[2:3]), f"({species})")
