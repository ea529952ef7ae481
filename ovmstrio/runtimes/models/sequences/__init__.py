"""Sequences of a stateful model: who has which id, whose turn it is, what is remembered, and for how long."""

from ovmstrio.runtimes.models.sequences.manager import Sequence, SequenceManager
from ovmstrio.runtimes.models.sequences.managers import SequenceManagers
from ovmstrio.runtimes.models.sequences.sequence_requests import Control, read_control

__all__ = ["Control", "Sequence", "SequenceManager", "SequenceManagers", "read_control"]
