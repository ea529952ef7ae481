"""Preparation of the sample face_detection: copies the TensorFlow Lite file."""

from __future__ import annotations

from ovmstrio.samples.copying import copy

__all__ = ["ENTRIES"]

ENTRIES = {"face_detection": copy("face_detection_short_range.tflite")}
