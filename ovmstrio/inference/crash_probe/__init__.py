"""Trials: a model that was never seen to run on this machine runs first in a process that may crash.

::

    who loads a model ─> try_model ─> TrialMemory: seen before? ─> load it, or say why not
                                          └ no ─> TrialPool ─> worker process: compile, run on ones, run on zeros
                                                      └ crashed ─> halves of the model, one by one, for the layer

Nothing here but the worker's program imports OpenVINO, so that a server that has no models does not either.
"""

from __future__ import annotations

from ovmstrio.inference.crash_probe.probe import Trial, Verdict
from ovmstrio.inference.crash_probe.results import TrialMemory, trials_folder
from ovmstrio.inference.crash_probe.workers import TrialPool, try_model, try_model_from_thread, trying_models

__all__ = [
    "Trial",
    "TrialMemory",
    "TrialPool",
    "Verdict",
    "trials_folder",
    "try_model",
    "try_model_from_thread",
    "trying_models",
]
