"""Sequences of a stateful model: who has which id, whose turn it is, what is remembered, and for how long."""

from ovmstrio.models.sequences.manager import Sequence, SequenceManager, SequenceManagers
from ovmstrio.models.sequences.requests import Control, read_control

__all__ = ["Control", "Sequence", "SequenceManager", "SequenceManagers", "read_control"]
