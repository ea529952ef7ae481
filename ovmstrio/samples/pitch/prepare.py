"""Preparation of the sample pitch: copies the model in each of its formats."""

from __future__ import annotations

from ovmstrio.samples.copying import copy

__all__ = ["ENTRIES"]

ENTRIES = {"pitch_onnx": copy("nmp.onnx"), "pitch_tflite": copy("nmp.tflite"), "pitch_tf": copy("nmp")}
