"""Compiled models that tests of a process share.

OpenVINO takes 20 milliseconds of CPU time to compile even a model of one operation, and most tests that serve a model
compile the same few of them. Requests and their states belong to each server, so that servers may share a compiled
model.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import openvino as ov

from ovmstrio.openvino.compile import ModelFile
from ovmstrio.work.cores import CORES

Compile = Callable[[ov.Model, ModelFile, Mapping[str, str]], ov.CompiledModel]

_MOST_MODELS: Final = 50
_MOST_BYTES: Final = 100_000

_compiled: Final[OrderedDict[tuple[Any, ...], ov.CompiledModel]] = OrderedDict()
_lock: Final = threading.Lock()


def sharing_compiled_models(compile_: Compile) -> Compile:
    """Return a function that compiles a small model unless an equal one was compiled before.

    Only models of fixed shapes are shared.
    """

    def compile_or_share(model: ov.Model, source: ModelFile, config: Mapping[str, str]) -> ov.CompiledModel:
        # A request of a dynamic model may fail, after which the compiled model gives wrong answers and is replaced.
        if model.is_dynamic() or "CACHE_DIR" in config:
            return compile_(model, source, config)
        content = _content_of(model)
        if len(content) > _MOST_BYTES:
            return compile_(model, source, config)
        cores = (CORES.count, CORES.processes, CORES.is_shared)
        key = (content, source.spec.target_device, tuple(sorted(config.items())), cores)
        with _lock:
            shared = _compiled.get(key)
            if shared is not None:
                _compiled.move_to_end(key)
                return shared
        made = compile_(model, source, config)
        with _lock:
            _compiled[key] = made
            if len(_compiled) > _MOST_MODELS:
                _compiled.popitem(last=False)
        return made

    return compile_or_share


def _content_of(model: ov.Model) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "m.xml"), Path(folder, "m.bin")
        ov.serialize(model, *map(str, files))
        return b"".join(file.read_bytes() for file in files)
