"""Where and how exactly a local model runs, in OpenVINO's words for Paddle Serving's settings."""

from __future__ import annotations

import os
from typing import Final

import structlog

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.runtime import devices
from ovmstrio.runtimes.ops.config.op_settings import LocalServiceConf

__all__ = ["device_for", "plugin_config", "workers_on"]

log = structlog.get_logger(__name__)

_CPU: Final = "CPU"
_BY_DEVICES: Final = -1
_ON_CPU: Final = frozenset({0, 3})
_ON_GPU: Final = frozenset({1, 2})
_KINDS: Final = "-1 (as 'devices' says), 0 and 3 (CPU), 1 and 2 (GPU)"
_PRECISIONS: Final = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def device_for(settings: LocalServiceConf, worker: int) -> str:
    """Give the device of a worker: they take turns with the devices; without a GPU here, the CPU takes its place.

    Raises:
        ConfigError: OpenVINO has no device of that kind, or ``devices`` is no list of numbers.
    """
    kind = settings.device_type
    if kind not in {_BY_DEVICES, *_ON_CPU, *_ON_GPU}:
        message = "OpenVINO has no device of this kind"
        raise ConfigError([Problem(message, path="device_type", expected=_KINDS, found=str(kind))])
    numbers = _numbers(settings)
    if kind in _ON_CPU or not (numbers or kind in _ON_GPU):
        return _CPU
    number = numbers[worker % len(numbers)] if numbers else "0"
    there = devices()
    for name in (f"GPU.{number}", *(["GPU"] if number == "0" else [])):
        if name in there:
            return name
    log.warning("no such GPU here, the CPU takes its place", wanted=f"GPU.{number}", devices=there, worker=worker)
    return _CPU


def _numbers(settings: LocalServiceConf) -> tuple[str, ...]:
    numbers = settings.device_ids
    if not all(number.isdecimal() for number in numbers):
        expected, found = "numbers with commas between", repr(settings.devices)
        raise ConfigError([Problem("no list of devices", path="devices", expected=expected, found=found)])
    return numbers


def workers_on(device: str, settings: LocalServiceConf, concurrency: int) -> int:
    """Count the workers of an Op that run on a device."""
    return sum(device_for(settings, worker) == device for worker in range(concurrency))


def plugin_config(settings: LocalServiceConf, device: str, workers: int) -> dict[str, str]:
    """Give OpenVINO's settings for a model that so many workers share.

    Each worker has ``thread_num`` threads, as far as there are processors, and a stream of its own.
    """
    config = {"INFERENCE_PRECISION_HINT": _precision(settings.precision, device)}
    if device != _CPU:
        return config | {"NUM_STREAMS": str(workers)}
    threads = max(1, min(settings.thread_num * workers, len(os.sched_getaffinity(0))))
    return config | {"INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": str(min(workers, threads))}


def _precision(precision: str, device: str) -> str:
    hint = _PRECISIONS.get(precision.lower())
    if hint is None:
        log.warning("precision not supported, fp32 takes its place", precision=precision, device=device)
        return _PRECISIONS["fp32"]
    return hint
