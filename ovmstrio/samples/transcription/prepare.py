"""Preparation of the sample transcription: writes Whisper tiny.en and its tokenizer in Optimum's layout."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import openvino as ov

from ovmstrio import Array
from ovmstrio.extras import Extra, install_command
from ovmstrio.samples.speech import ct2_file
from ovmstrio.samples.transcription.networks import build_decoder, build_encoder
from ovmstrio.samples.wheels import WheelUnavailable

__all__ = ["ENTRIES", "write", "write_folder"]

_LONGEST: Final = 448
_RATE: Final = 16_000
_HOP: Final = 160
_FIRST_TIMESTAMP: Final = 50
_MARKS: Final = {
    "decoder_start_token_id": "<|startoftranscript|>",
    "eos_token_id": "<|endoftext|>",
    "pad_token_id": "<|endoftext|>",
    "prev_sot_token_id": "<|startofprev|>",
    "no_timestamps_token_id": "<|notimestamps|>",
}
_TASKS: Final = ("transcribe", "translate")


def write(files: Path, directory: Path) -> None:
    """Write the folder, with FP16 weights.

    Raises:
        WheelUnavailable: OpenVINO Tokenizers is not installed, or it failed.
    """
    if importlib.util.find_spec("openvino_tokenizers") is None:
        raise WheelUnavailable(f"the sample transcription needs OpenVINO Tokenizers: {install_command(Extra.LLM)}")
    config = json.loads((files / "config.json").read_text(encoding="utf-8"))
    suppressed = {"suppress_tokens": config["suppress_ids"], "begin_suppress_tokens": config["suppress_ids_begin"]}
    heads = {"alignment_heads": config["alignment_heads"]}
    write_folder(ct2_file.read(files / "model.bin"), files / "tokenizer.json", directory, {**suppressed, **heads})


def write_folder(
    weights: Mapping[str, Array],
    table: Path,
    directory: Path,
    generation: Mapping[str, Any],
    *,
    is_multilingual: bool = False,
    fp16: bool = True,
) -> None:
    """Write the folder of a Whisper model.

    Args:
        weights: arrays by CTranslate2's names.
        table: the ``tokenizer.json``.
        directory: the folder to fill.
        generation: entries of ``generation_config.json`` in addition to those derived from the tokenizer.
        is_multilingual: whether the model has tokens for languages and tasks.
        fp16: whether to write FP16 weights.

    Raises:
        WheelUnavailable: OpenVINO Tokenizers failed.
    """
    for build, name in ((build_encoder, "encoder"), (build_decoder, "decoder")):
        ov.save_model(build(weights), directory / f"openvino_{name}_model.xml", compress_to_fp16=fp16)
    tokens = {each["content"]: each["id"] for each in json.loads(table.read_text(encoding="utf-8"))["added_tokens"]}
    size, _ = weights["decoder/embeddings/weight"].shape
    places = len(weights["encoder/position_encodings/encodings"])
    settings = {**_generation(tokens, is_multilingual=is_multilingual), **generation}
    _write_json(directory / "generation_config.json", settings)
    _write_json(
        directory / "config.json", {"model_type": "whisper", "max_source_positions": places, "vocab_size": size}
    )
    _write_json(directory / "preprocessor_config.json", _features(weights["encoder/conv1/weight"].shape[1], 2 * places))
    shutil.copyfile(table, directory / "tokenizer.json")
    _write_tokenizer(table, directory)


def _generation(tokens: Mapping[str, int], *, is_multilingual: bool) -> dict[str, Any]:
    """Return the special tokens for start, end, languages and tasks."""
    settings: dict[str, Any] = {name: tokens[mark] for name, mark in _MARKS.items()}
    settings |= {"max_length": _LONGEST, "max_initial_timestamp_index": _FIRST_TIMESTAMP}
    settings["is_multilingual"] = is_multilingual
    if is_multilingual:
        tasks = {name: tokens[f"<|{name}|>"] for name in _TASKS}
        between = range(settings["decoder_start_token_id"] + 1, min(tasks.values()))
        settings["lang_to_id"] = {mark: number for mark, number in tokens.items() if number in between}
        settings["task_to_id"] = tasks
    return settings


def _features(bands: int, frames: int) -> dict[str, int]:
    samples = frames * _HOP
    return {
        "feature_size": bands,
        "sampling_rate": _RATE,
        "hop_length": _HOP,
        "n_fft": 400,
        "chunk_length": samples // _RATE,
        "n_samples": samples,
        "nb_max_frames": frames,
    }


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(table: Path, directory: Path) -> None:
    # Importing openvino_tokenizers changes every ov.Core of the process, so it runs in a subprocess.
    module = "ovmstrio.samples.transcription.byte_tokenizer"
    done = subprocess.run(  # noqa: S603 - our own code, on a verified file
        [sys.executable, "-m", module, str(table), str(directory)],
        capture_output=True,
        text=True,
        check=False,
        process_group=0,  # an interrupt is for the command
    )
    if done.returncode:
        raise WheelUnavailable(f"OpenVINO Tokenizers could not convert tokenizer.json: {done.stderr.strip()[-500:]}")


ENTRIES = {"transcription": write}
