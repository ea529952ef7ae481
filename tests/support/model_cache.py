"""Cache of files that tests build: tiny models, tokenizers and shared libraries.

Each distinct build runs once per user. Its files stay in a folder that all test processes share, and every test gets
copies, which it may change. A key covers the builder's source, its arguments and the versions of the libraries.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import inspect
import shutil
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

import openvino as ov

from ovmstrio.inference.compile import ModelFile
from ovmstrio.util.cores import CORES
from tests.support.processes import SHARED_CACHE

MODEL_CACHE: Final = SHARED_CACHE / "models"
_LIBRARIES: Final = ("openvino", "openvino-genai", "openvino-tokenizers", "numpy", "gguf")

P = ParamSpec("P")


def cached_folder(
    *sources: str,
) -> Callable[[Callable[Concatenate[Path, P], Path]], Callable[Concatenate[Path, P], Path]]:
    """Return a decorator that runs a builder of a folder once per set of arguments, and copies its files afterwards.

    The arguments after the folder need a ``repr`` that identifies them. ``sources`` are further modules whose source
    decides what the builder writes.
    """

    def decorate(build: Callable[Concatenate[Path, P], Path]) -> Callable[Concatenate[Path, P], Path]:
        @wraps(build)
        def write(folder: Path, /, *args: P.args, **kwargs: P.kwargs) -> Path:
            def run(target: Path) -> None:
                build(target, *args, **kwargs)

            bound = inspect.signature(build).bind(folder, *args, **kwargs)
            bound.apply_defaults()
            arguments = {name: repr(value) for name, value in list(bound.arguments.items())[1:]}
            own = [build.__module__, *sources]
            return copy_cached(build.__name__, run, folder, {**arguments, "sources": _digest_of_modules(*own)})

        return write

    return decorate


def copy_cached(name: str, build: Callable[[Path], object], folder: Path, key: Mapping[str, Any]) -> Path:
    """Copy the files of a cached build into a folder, which may exist; run the build first if the cache lacks it.

    Processes that need the same build at the same time wait for one of them. The key is whatever decides what ``build``
    writes, by values with a ``repr`` that identifies them.
    """
    text = repr([sys.version, _library_versions(), sorted(key.items())])
    cached = MODEL_CACHE / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if not cached.is_dir():
        _build_once(build, cached)
    # New files rather than links: tests change their models, and some of the server's decisions depend on file times.
    shutil.copytree(cached, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return folder


def _build_once(build: Callable[[Path], object], cached: Path) -> None:
    MODEL_CACHE.mkdir(parents=True, exist_ok=True)
    with (MODEL_CACHE / f"{cached.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if cached.is_dir():
            return
        with tempfile.TemporaryDirectory(prefix=".new-", dir=MODEL_CACHE) as scratch:
            made = Path(scratch) / "files"
            made.mkdir()
            build(made)
            made.rename(cached)


@cache
def _library_versions() -> tuple[str, ...]:
    found = []
    for library in _LIBRARIES:
        try:
            found.append(version(library))
        except PackageNotFoundError:
            found.append("")
    return tuple(found)


@cache
def _digest_of_modules(*names: str) -> str:
    digest = hashlib.sha256()
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no source of module {name}")
        digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()


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
