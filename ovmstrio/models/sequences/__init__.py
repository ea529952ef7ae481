"""Sequences of stateful models: ids, order of requests, states and expiration."""

from ovmstrio.models.sequences.manager import Sequence, SequenceManager, SequenceManagers
from ovmstrio.models.sequences.requests import Control, read_control

__all__ = ["Control", "Sequence", "SequenceManager", "SequenceManagers", "read_control"]
