"""Crash probe: a model never seen to run on this machine first runs in a process that may crash.

::

    load of a model ─> CrashProbe ─> VerdictStore: known? ─> load it, or raise the stored error
                                        └ no ─> ProbeWorkerPool ─> worker: compile, run on ones, run on zeros
                                                    └ crashed ─> bisect the model for the layer

Only the worker's program imports OpenVINO, so that a server without models does not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakValueDictionary

import structlog
import trio
from platformdirs import user_cache_path

from ovmstrio.core.errors import ConfigError, NotReady, Problem
from ovmstrio.isolation.worker_process import WorkerExited, WorkerProcess, signal_name
from ovmstrio.util.load_limit import run_load
from ovmstrio.util.regular_files import open_regular, read_regular_text

if TYPE_CHECKING:
    from ovmstrio.inference.compile import ModelFile

log = structlog.get_logger(__name__)

# ----------------------------------------------------------------------
# Models and verdicts
# ----------------------------------------------------------------------

PROGRAM: Final = "ovmstrio.inference.crash_probe_program"


@dataclass(frozen=True, slots=True)
class ProbeModel:
    """A model to probe."""

    name: str  # name for messages
    path: Path  # file or folder with all files of the model
    compile: str  # ``module:function`` that returns a ``Compiled`` for ``argument``; blocking
    argument: Any  # plain data
    read: str  # ``module:function`` that reads ``source``, for the search of the crashing layer
    source: Path  # file or folder that OpenVINO reads
    device: str
    settings: Any  # plain data with everything besides the files that affects the result


# Settings that do not affect what OpenVINO runs.
_IGNORED_SETTINGS: Final = {
    "name",
    "base_path",
    "version_policy",
    "origin",
    "problems",
    "cache_dir",
    "allow_cache",
    "nireq",
    "idle_sequence_cleanup",
    "max_sequence_number",
    "sequence_migration",
}


def probe_model_of(source: ModelFile, directory: Path) -> ProbeModel:
    """Return the probe subject of a model file; ``directory`` has all its files, the mapping included."""
    spec, names = source.spec, {"inputs": dict(source.mapping.inputs), "outputs": dict(source.mapping.outputs)}
    return ProbeModel(
        name=spec.name,
        path=directory,
        compile=f"{PROGRAM}:compile_from_plain_data",
        argument={
            "file": str(source.file),
            "spec": spec.model_dump_json(exclude={"problems"}),
            "mapping": names,
            "kept": None if source.kept is None else str(source.kept),
        },
        read="ovmstrio.inference.model_readers:read_model",
        source=source.file,
        device=spec.target_device,
        settings=spec.model_dump(mode="json", exclude=_IGNORED_SETTINGS),
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a probe."""

    crash: str = ""  # signal that ended the process; empty if the model ran
    layer: str = ""  # first layer that crashes; empty if unknown
    zeros_crash: str = ""  # signal if all inputs are zeros; empty if there was none
    zeros_layer: str = ""  # layer that crashes on zeros
    day: str = ""  # date of the probe, ISO format

    def refusal(self, trial: ProbeModel, remembered: Path | None) -> ConfigError:
        """Return the error of a model that crashed; ``remembered`` is the file of a stored verdict."""
        message, hint = f"OpenVINO crashes with {self.crash} when it runs the model{_at(self.layer)}", ""
        if remembered is not None:
            message += f" (crash probe of {self.day}; not repeated while files, settings and OpenVINO are unchanged)"
            hint = f"to repeat the probe, remove {remembered} or start with --crash-probe retry"
        return ConfigError([Problem(message, file=str(trial.source), suggestion=hint)])

    def warning(self, trial: ProbeModel) -> Problem | None:
        """Return a warning if the model crashes on zeros."""
        if not self.zeros_crash:
            return None
        message = (
            f"OpenVINO crashes with {self.zeros_crash} when all inputs of the model are zeros{_at(self.zeros_layer)}"
        )
        hint = "a request with such inputs would end the server: check the inputs inside the model"
        return Problem(message, file=str(trial.source), suggestion=hint, severity="warning")


def _at(layer: str) -> str:
    return f" in layer {layer}" if layer else ""


# ----------------------------------------------------------------------
# Store of verdicts, in a folder shared by servers; files are written atomically
# ----------------------------------------------------------------------

_PROCEDURE: Final = 1  # increased when the probe checks more, to invalidate old verdicts
_MAX_FILES: Final = 4_000
_FLAGS: Final = re.compile(r"^(?:flags|Features|model name)\s*:.*$", re.MULTILINE)


def verdicts_folder(cache: Path | None = None) -> Path:
    """Return the folder of verdicts: in ``cache`` or the user's cache folder."""
    return (cache or user_cache_path("ovmstrio")) / "trials"


class VerdictStore:
    """Verdicts by model, settings and machine; kept in memory without a writable ``folder``. Blocks for disk access."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._in_memory: dict[str, Verdict] = {}

    def key_of(self, trial: ProbeModel) -> str:
        """Return a hash of the model's files, settings, OpenVINO version, device and processor.

        Files of known path, size, time and inode are not read.

        Raises:
            OSError: a file cannot be read.
        """
        content = self._content_of(trial.path)
        facts = [_PROCEDURE, content, trial.compile, trial.settings, trial.device, _openvino_version(), _processor()]
        return _digest(json.dumps(facts, sort_keys=True, default=str))

    def recall(self, key: str) -> Verdict | None:
        """Return the stored verdict, or None."""
        if self._folder is None:
            return self._in_memory.get(key)
        # Read the file each time: removing it requests another probe, also from a running server.
        try:
            return Verdict(**json.loads(self._read("verdicts", key)))
        except (ValueError, TypeError):
            return None

    def is_empty(self) -> bool:
        """Return whether no verdict is stored, as before the first load on a machine or in a container."""
        if self._folder is None:
            return not self._in_memory
        try:
            with os.scandir(self._folder / "verdicts") as found:
                return next(found, None) is None
        except OSError:
            return True

    def remember(self, key: str, verdict: Verdict) -> None:
        """Store a verdict."""
        self._in_memory[key] = verdict
        self._write("verdicts", key, json.dumps(asdict(verdict)))

    def forget(self, key: str) -> None:
        """Remove a verdict."""
        self._in_memory.pop(key, None)
        if (path := self.path_of(key)) is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def path_of(self, key: str) -> Path | None:
        """Return the file of a verdict."""
        return None if self._folder is None else self._folder / "verdicts" / key

    def _content_of(self, path: Path) -> str:
        files = list(_files(path))
        mark = _digest(json.dumps(files))
        known = self._read("contents", mark)
        if known:
            return known
        content = hashlib.blake2b(digest_size=32)
        for name, size, _, _ in files:
            with open_regular(name) as opened:
                digest = hashlib.file_digest(opened, "blake2b")
            content.update(f"{Path(name).name} {size} {digest.hexdigest()}\n".encode(errors="surrogateescape"))
        self._write("contents", mark, content.hexdigest())
        return content.hexdigest()

    def _read(self, kind: str, name: str) -> str:
        if self._folder is None:
            return ""
        try:
            return read_regular_text(self._folder / kind / name)
        except (OSError, UnicodeDecodeError):
            return ""

    def _write(self, kind: str, name: str, text: str) -> None:
        if self._folder is None:
            return
        folder = self._folder / kind
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_oldest(folder)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as made:
                made.write(text)
            Path(made.name).replace(folder / name)
        except OSError as error:
            self._folder = None
            log.warning("crash probe verdicts not stored", folder=str(folder), reason=str(error))


def _files(path: Path) -> Iterator[tuple[str, int, int, int]]:
    found = [path, *path.parent.glob(f"{escape(path.stem)}.*")] if path.is_file() else path.rglob("*")
    for file in sorted(set(found)):
        if file.is_file():
            stat = file.stat()
            yield str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _remove_oldest(folder: Path) -> None:
    with os.scandir(folder) as found:
        entries = list(found)
    if len(entries) >= _MAX_FILES:
        entries.sort(key=lambda entry: entry.stat().st_mtime_ns)
        for entry in entries[: _MAX_FILES // 2]:
            Path(entry).unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=20).hexdigest()


@cache
def _openvino_version() -> str:
    try:
        return version("openvino")
    except PackageNotFoundError:
        return ""


@cache
def _processor() -> Any:
    """Return the processor model and flags, which select OpenVINO's code."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    return sorted(set(_FLAGS.findall(text)))


# ----------------------------------------------------------------------
# Worker processes
# ----------------------------------------------------------------------

# Signals that a process causes itself; others, such as the OOM killer's, come from outside.
_CRASHES: Final = frozenset({"SIGFPE", "SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGTRAP", "SIGSYS"})
# How long a process is kept for the next model: it takes a second to start, and has much memory.
_IDLE_SECONDS: Final = 3.0
_UNUSED_SECONDS: Final = 30.0  # the same before the first model, which needs OpenVINO in the server
_CLOSE_SECONDS: Final = 2.0
# How long a model waits for a running process before another one is started, as a multiple of the time of a start.
_WAITED_STARTS: Final = 1.0


class ProbeCrashed(Exception):
    """The probing process ended with the signal ``name`` during the operation ``operation``."""

    def __init__(self, name: str, operation: str) -> None:
        super().__init__(name)
        self.name = name
        self.operation = operation


class ProbeWorker:
    """Worker process; ``is_used`` is True after its first request."""

    def __init__(self) -> None:
        self.worker = WorkerProcess(PROGRAM)
        self.is_used = False
        self._taken = trio.Event()

    def put_back(self) -> trio.Event:
        """Mark the worker idle; return the event that is set when it is taken again."""
        self._taken = trio.Event()
        return self._taken

    async def take(self, nursery: trio.Nursery) -> None:
        """Take the worker, starting it at first use; raise NotReady if it cannot be started."""
        self._taken.set()
        if self.worker.pid is not None:
            return
        try:
            await self.worker.start(nursery, None)
        except (OSError, WorkerExited) as error:
            raise NotReady(f"crash probe worker not started: {error}") from error

    async def do(self, trial: ProbeModel, operations: Sequence[str]) -> None:
        """Run several operations on a model; raise ConfigError if it cannot be compiled. See :meth:`ask`."""
        for operation in operations:
            problems = await self.ask(trial, operation)
            if problems:
                raise ConfigError([Problem(**problem) for problem in problems])

    async def ask(self, trial: ProbeModel, operation: str, **details: Any) -> Any:
        """Run one operation on a model and return its answer.

        Raises:
            ProbeCrashed: the process ended with a signal that it caused.
            NotReady: the process ended for another reason.
        """
        request = {
            **asdict(trial),
            "path": str(trial.path),
            "source": str(trial.source),
            **details,
            "operation": operation,
        }
        self.is_used = True
        try:
            return await self.worker.call(request)
        except WorkerExited as error:
            await self.worker.ended.wait()
            status = self.worker.status or 0
            if status < 0 and signal_name(-status) in _CRASHES:
                raise ProbeCrashed(signal_name(-status), operation) from error
            raise NotReady(f"crash probe of model {trial.name!r} failed: the worker process {error.why}") from error


class ProbeWorkerPool:
    """Pool of worker processes, which starts another one if the running ones are busy for longer than a start takes.

    A start costs more than the probes of several small models.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._idle: list[ProbeWorker] = []
        self._lent = 0
        self._changed = trio.lowlevel.ParkingLot()  # waits for the start, the return or the end of a lent worker
        self._started = math.inf  # when the last start ended
        self._start_seconds = 0.0  # how long it took

    @asynccontextmanager
    async def lend(self, *, is_new: bool = False) -> AsyncIterator[ProbeWorker]:
        """Provide a worker, an unused one if ``is_new``, and keep it for the next model unless it has ended."""
        process = ProbeWorker() if is_new else await self._find()
        self._lent += 1
        try:
            await self._take(process)
            try:
                yield process
            except ConfigError:
                self._keep(process)
                raise
            except BaseException:
                process.worker.kill()
                raise
            self._keep(process)
        finally:
            self._lent -= 1
            self._changed.unpark_all()

    def prepare(self) -> None:
        """Start a worker in the background; it ends if it stays idle."""
        self._nursery.start_soon(self._prepare)

    async def _prepare(self) -> None:
        with suppress(NotReady):  # the first model to be probed has the error
            async with self.lend():
                pass

    async def _find(self) -> ProbeWorker:
        """Return an idle worker, which may take a while, or a new one."""
        begin = trio.current_time()
        while True:
            sound = [process for process in self._idle if not process.worker.is_retired]
            if sound:
                self._idle.remove(sound[-1])
                return sound[-1]
            if not self._lent:
                return ProbeWorker()
            with trio.move_on_at(max(begin, self._started) + _WAITED_STARTS * self._start_seconds) as waiting:
                await self._changed.park()
            if waiting.cancelled_caught:
                return ProbeWorker()

    async def _take(self, process: ProbeWorker) -> None:
        is_start, begin = process.worker.pid is None, trio.current_time()
        await process.take(self._nursery)
        if is_start:
            self._started = trio.current_time()
            self._start_seconds = self._started - begin
            self._changed.unpark_all()

    def _keep(self, process: ProbeWorker) -> None:
        self._idle.append(process)
        self._nursery.start_soon(self._dismiss_when_idle, process, process.put_back())

    async def _dismiss_when_idle(self, process: ProbeWorker, taken: trio.Event) -> None:
        with trio.move_on_after(_IDLE_SECONDS if process.is_used else _UNUSED_SECONDS):
            await taken.wait()
        if not taken.is_set():
            self._idle.remove(process)
            await process.worker.close(_CLOSE_SECONDS)


# ----------------------------------------------------------------------
# Probe
# ----------------------------------------------------------------------

LAYER_SEARCH_SECONDS: Final = 30.0
"""Timeout of the search for the layer that crashes."""


class CrashProbe:
    """Probes models that are not known to run.

    Args:
        nursery: hosts the processes.
        tries_again: whether to probe known crashing models once more.
        layer_seconds: timeout of the search for the layer that crashes; after it no layer is reported.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        memory: VerdictStore,
        *,
        tries_again: bool = False,
        layer_seconds: float = LAYER_SEARCH_SECONDS,
    ) -> None:
        self.token = trio.lowlevel.current_trio_token()  # token of the event loop, for threads
        self._memory = memory
        self._retries = tries_again
        self._layer_seconds = layer_seconds
        self._limiter = trio.CapacityLimiter(len(os.sched_getaffinity(0)))
        self._workers = ProbeWorkerPool(nursery)
        self._is_prepared = False
        self._seen: set[str] = set()
        self._locks: WeakValueDictionary[str, trio.Lock] = WeakValueDictionary()

    async def prepare(self) -> None:
        """Start a process in the background if no model can be known, because no verdict is stored.

        The process starts while the server imports OpenVINO.
        """
        if self._is_prepared:
            return
        self._is_prepared = True
        if await run_load(self._memory.is_empty):
            self._workers.prepare()

    async def try_model(self, trial: ProbeModel) -> Verdict:
        """Return the verdict on a model, from this or an earlier probe.

        Raises:
            ConfigError: the model crashes OpenVINO, or cannot be compiled.
            NotReady: the probe failed.
        """
        try:
            key = await run_load(lambda: self._memory.key_of(trial))
        except OSError as error:
            raise ConfigError([Problem(f"cannot be read: {error.strerror}", file=str(error.filename))]) from error
        lock = self._locks.setdefault(key, trio.Lock())
        async with lock:
            verdict = await run_load(lambda: self._memory.recall(key))
            if verdict is not None and verdict.crash and self._retries and key not in self._seen:
                verdict = None
            remembered = verdict is not None
            if verdict is None:
                verdict = await self._probe(trial)
                new = verdict
                await run_load(lambda: self._memory.remember(key, new))
            self._seen.add(key)
        if verdict.crash:
            raise verdict.refusal(trial, self._memory.path_of(key) if remembered else None)
        if (warning := verdict.warning(trial)) is not None:
            log.warning("model crashes on zeros", model=trial.name, reason=str(warning))
        return verdict

    async def _probe(self, trial: ProbeModel) -> Verdict:
        """Run a model on ones, then on zeros; a crash on zeros is reported only."""
        log.info("crash probe started", model=trial.name, path=str(trial.source))
        verdict = Verdict(day=datetime.now(UTC).date().isoformat())
        async with self._limiter:
            crashed = await self._crash_of(trial, "load", "zeros", "forget")
            if crashed is None:
                return verdict
            # Heap corruption shows only when memory is freed.
            on_ones = crashed if crashed.operation == "load" else await self._crash_of(trial, "load", "forget")
            if on_ones is not None:
                return replace(verdict, crash=on_ones.name, layer=await self._layer(trial, 1))
            return replace(verdict, zeros_crash=crashed.name, zeros_layer=await self._layer(trial, 0))

    async def _crash_of(self, trial: ProbeModel, *operations: str) -> ProbeCrashed | None:
        for is_new in (False, True):
            try:
                async with self._workers.lend(is_new=is_new) as process:
                    may_be_corrupted = process.is_used
                    await process.do(trial, operations)
            except ProbeCrashed as crash:
                # An earlier model may have corrupted a used process, so repeat in a new one.
                if not may_be_corrupted:
                    return crash
            else:
                return None
        return None

    async def _layer(self, trial: ProbeModel, value: int) -> str:
        """Return the layer that crashes on inputs of a value: the last one of the shortest prefix that crashes."""
        with trio.move_on_after(self._layer_seconds):
            try:
                async with self._workers.lend() as process:
                    layers = await process.ask(trial, "layers")
                sound, crashing = 0, len(layers)
                if not layers or not await self._crashes(trial, crashing, value):
                    return ""
                while crashing - sound > 1:
                    middle = (sound + crashing) // 2
                    if await self._crashes(trial, middle, value):
                        crashing = middle
                    else:
                        sound = middle
                return str(layers[crashing - 1])
            except (ProbeCrashed, NotReady):
                return ""
        return ""

    async def _crashes(self, trial: ProbeModel, count: int, value: int) -> bool:
        try:
            async with self._workers.lend() as process:
                await process.ask(trial, "part", count=count, value=value)
        except ProbeCrashed:
            return True
        return False


ProbeMode = Literal["auto", "off", "retry"]
"""Probe of unknown models: on, off, or on with one more attempt for models that crashed before."""

# Only user code, which loads models in threads that reach the server through their context.
_of_user_code: Final[ContextVar[CrashProbe | None]] = ContextVar("crash probe of user code", default=None)


@contextmanager
def open_crash_probe(
    nursery: trio.Nursery, mode: ProbeMode, folder: Path | None, *, layer_seconds: float = LAYER_SEARCH_SECONDS
) -> Iterator[CrashProbe | None]:
    """Provide a crash probe, also to user code of tasks that start in the block; None if the mode is ``off``.

    ``folder`` stores verdicts, ``nursery`` hosts workers.
    """
    if mode == "off":
        yield None
        return
    probe = CrashProbe(nursery, VerdictStore(folder), tries_again=mode == "retry", layer_seconds=layer_seconds)
    before = _of_user_code.set(probe)
    try:
        yield probe
    finally:
        _of_user_code.reset(before)


def crash_probe_of_user_code() -> CrashProbe | None:
    """Return the crash probe for models that user code loads; None if there is none."""
    return _of_user_code.get()


def probe_model_from_thread(trial: ProbeModel) -> None:
    """Probe a model that user code loads in a worker thread; loads on the event loop are not probed.

    Raises:
        ConfigError: the model crashes OpenVINO, or cannot be compiled.
        NotReady: the probe failed.
    """
    probe = _of_user_code.get()
    if probe is not None and not trio.lowlevel.in_trio_run():
        trio.from_thread.run(probe.try_model, trial, trio_token=probe.token)
