"""Trials: a model that was never seen to run on this machine runs first in a process that may crash.

::

    who loads a model ─> try_model ─> TrialMemory: seen before? ─> load it, or say why not
                                          └ no ─> TrialPool ─> worker process: compile, run on ones, run on zeros
                                                      └ crashed ─> halves of the model, one by one, for the layer

Nothing here but the worker's program imports OpenVINO, so that a server that has no models does not either.
"""

from __future__ import annotations

from ovmstrio.openvino.trials.memory import TrialMemory, trials_folder
from ovmstrio.openvino.trials.pool import TrialPool
from ovmstrio.openvino.trials.trial import Trial, Verdict
from ovmstrio.openvino.trials.trying import try_model, try_model_from_thread, trying_models

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
