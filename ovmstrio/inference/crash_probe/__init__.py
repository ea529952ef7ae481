"""Crash probe: a model never seen to run on this machine first runs in a process that may crash.

::

    load of a model ─> try_model ─> TrialMemory: known? ─> load it, or raise the stored error
                                        └ no ─> TrialPool ─> worker process: compile, run on ones, run on zeros
                                                    └ crashed ─> bisect the model for the layer

Only the worker's program imports OpenVINO, so that a server without models does not.
"""

from __future__ import annotations

from ovmstrio.inference.crash_probe.verdict import ProbeModel, Verdict, probe_model_of
from ovmstrio.inference.crash_probe.verdict_store import VerdictStore, verdicts_folder
from ovmstrio.inference.crash_probe.workers import (
    CrashProbe,
    crash_probe_of_user_code,
    open_crash_probe,
    probe_model_from_thread,
)

__all__ = [
    "CrashProbe",
    "ProbeModel",
    "Verdict",
    "VerdictStore",
    "crash_probe_of_user_code",
    "open_crash_probe",
    "probe_model_from_thread",
    "probe_model_of",
    "verdicts_folder",
]
