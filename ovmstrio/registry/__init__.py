"""What is served: names and versions, their states, and changes of them under load."""

from ovmstrio.registry.instances import Lease
from ovmstrio.registry.model_control import ModelControl
from ovmstrio.registry.registry import Registry, parse_version
from ovmstrio.registry.states import ApplyResult, Readiness, VersionState, VersionStatus

__all__ = [
    "ApplyResult",
    "Lease",
    "ModelControl",
    "Readiness",
    "Registry",
    "VersionState",
    "VersionStatus",
    "parse_version",
]
