"""Client of the sample handler_sklearn: ``python -m ovmstrio.samples.handler_sklearn.client [--version VERSION]``."""

from __future__ import annotations

from ovmstrio.samples.command_line import arguments, call_json, failures_of_http_end_the_program
from ovmstrio.samples.handler_iris.client import FEATURES
from ovmstrio.samples.iris.flowers import FLOWERS

__all__ = ["classify"]


def classify(url: str, sizes: tuple[float, ...], version: str = "latest") -> tuple[str, str]:
    """Return the species of a flower with these sizes (cm), and the kind of classifier."""
    answer = call_json(f"{url}/?version={version}", dict(zip(FEATURES, sizes, strict=True)))
    return answer["species"], answer["by"]


if __name__ == "__main__":
    given = ("--version", {"default": "latest", "help": "version of the model (default: %(default)s)"})
    options = arguments("Classify three flowers.", given, url="http://localhost:8080")
    with failures_of_http_end_the_program():
        for sizes, species in FLOWERS:
            print(*sizes, "cm:", *classify(options.url, sizes, options.version), f"({species})")
