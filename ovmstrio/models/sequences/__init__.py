"""Sequences of stateful models: ids, order of requests, states and expiration."""

from ovmstrio.models.sequences.manager import Sequence, SequenceManager, SequenceManagers
from ovmstrio.models.sequences.requests import SequenceControl, read_control

__all__ = ["Sequence", "SequenceControl", "SequenceManager", "SequenceManagers", "read_control"]
