"""Sequences of a stateful model: who has which id, whose turn it is, what is remembered, and for how long."""

from ovmstrio.models.sequences.manager import SequenceManager
from ovmstrio.models.sequences.managers import SequenceManagers
from ovmstrio.models.sequences.requests import Control, read_control
from ovmstrio.models.sequences.sequence import Sequence

__all__ = ["Control", "Sequence", "SequenceManager", "SequenceManagers", "read_control"]
