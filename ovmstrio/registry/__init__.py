"""What is served: names and versions, their states, and changes of them under load."""

from ovmstrio.registry.instances import Lease
from ovmstrio.registry.registry import Registry
from ovmstrio.registry.states import ApplyResult, Readiness, VersionState, VersionStatus

__all__ = [
    "ApplyResult",
    "Lease",
    "Readiness",
    "Registry",
    "VersionState",
    "VersionStatus",
]
