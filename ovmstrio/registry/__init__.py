"""What is served: names and versions, their states, and changes of them under load."""

from ovmstrio.registry.leases import Lease
from ovmstrio.registry.registry import MODEL_MISSING, NOTHING_MISSING, Registry
from ovmstrio.registry.states import ApplyResult, Readiness, VersionState, VersionStatus

__all__ = [
    "MODEL_MISSING",
    "NOTHING_MISSING",
    "ApplyResult",
    "Lease",
    "Readiness",
    "Registry",
    "VersionState",
    "VersionStatus",
]
