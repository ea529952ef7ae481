"""Loaded handlers, and their loading: class checks, construction in the handler's threads, and batching."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.http_messages import AfterResponse, HttpAnswer, HttpRequest
from ovmstrio.handlers.batches import BatchedMethod, BatchItem, QueueTimeouts, batch_options
from ovmstrio.handlers.config.project_spec import ProjectBatching, ProjectSpec
from ovmstrio.handlers.error_reporter import ErrorReporter
from ovmstrio.handlers.handler_calls import DRAIN_SECONDS, Callbacks, HandlerCalls, call_method
from ovmstrio.handlers.handler_class import (
    GRPC_ARGUMENTS,
    HTTP_ARGUMENTS,
    VERBS,
    HandlerMethod,
    import_folders,
    load_handler_class,
    on_sys_path,
)
from ovmstrio.handlers.http_values import http_arguments, to_response
from ovmstrio.isolation.handler_imports import HandlerPackage
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import (
    SourceLine,
    UserCodeRaisedError,
    call_in_thread,
    definition_location,
    describe_error,
    error_location,
    is_async,
    missing_module_hint,
)
from ovmstrio.serving.batching import Batcher

if TYPE_CHECKING:
    from ovmstrio.handlers.grpc.call import RpcCall
    from ovmstrio.handlers.grpc.proto_compiler import Rpc

# ----------------------------------------------------------------------
# Loaded handlers
# ----------------------------------------------------------------------


class LoadedHandler(HandlerCalls):
    """A handler in this process, with its HTTP answers and RPCs."""

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Answer a request; see :class:`HttpHandler`."""
        result = await self.call(name, **await http_arguments(self.methods[name].arguments, request))
        return await to_response(result, self, name)

    async def answer_rpc(self, rpc: Rpc, call: RpcCall) -> None:
        """Answer a call over gRPC; see :class:`RpcHandler`."""
        from ovmstrio.handlers.grpc.call import CallExecution  # noqa: PLC0415 - not imported for HTTP handlers

        await CallExecution(rpc, call, self).run()


class HttpHandler(Protocol):
    """Handler called over HTTP, in this process or in worker processes."""

    @property
    def methods(self) -> Mapping[str, HandlerMethod]:
        """Methods by name."""
        ...

    @property
    def unready_reason(self) -> str:
        """Reason why calls fail now; empty if the handler is ready."""
        ...

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Call a method for a request and return the response; the caller closes a streamed body.

        Raises:
            MalformedPayload: the body does not match its content type.
            UserCodeError: the method raised, which has been logged, or its process exited.
            HTTPError: raised by the method, or converted from Starlette's ``HTTPException``.
            ServerError: raised by the method, or the call cannot run now.
        """
        ...

    def run_after(self, callbacks: Iterable[AfterResponse]) -> None:
        """Run the callbacks of a sent response in the background."""
        ...


# ----------------------------------------------------------------------
# Loading
# ----------------------------------------------------------------------

LOAD_MODEL: Final = "load_model"
_KEYWORD_KINDS: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class HandlerContract:
    """Requirements of a project for its class ``Handler``.

    Attributes:
        file: reported for problems without a better location.
        injected: names of all available constructor arguments.
        rpc_names: methods of the gRPC service; None for HTTP.
        client_names: the constructor must accept one of these.
    """

    file: str
    injected: Collection[str]
    rpc_names: Collection[str] | None = None
    is_batched: bool = False
    loads_models: bool = False
    client_names: Collection[str] = ()


def check_handler(cls: type[Any], contract: HandlerContract) -> list[Problem]:
    """Return all problems of a handler class."""
    checks = (_check_constructor, _check_load_model, _check_verbs if contract.rpc_names is None else _check_rpcs)
    return [problem for check in checks for problem in check(cls, contract)]


def constructor_parameters(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of the constructor; empty without a constructor."""
    return {} if cls.__init__ is object.__init__ else _parameters_of(cls, "__init__")


def _check_constructor(cls: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    parameters = constructor_parameters(cls)
    place = _place(cls, "__init__", contract)
    yield from _check_parameters(parameters, contract.injected, "__init__", place)
    if contract.client_names and not set(contract.client_names) & set(parameters) and not _takes_any_name(parameters):
        name = next(iter(contract.client_names))
        message = f"the constructor does not take {name}, although the project has models"
        yield _problem(message, place, f"write def __init__(self, {name}, ...)")


def _check_load_model(cls: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    if not contract.loads_models:
        return
    place = _place(cls, LOAD_MODEL, contract)
    if _method(cls, LOAD_MODEL) is None:
        fix = f"define {LOAD_MODEL}(self, model_path) that returns the model"
        yield _problem(f"the Handler has no {LOAD_MODEL}, although the project has models", place, fix)
        return
    method = getattr(cls, LOAD_MODEL)
    parameters = _parameters_of(cls, LOAD_MODEL)
    required = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in _VARIADIC]
    if is_async(method):
        yield _problem(f"{LOAD_MODEL} is async; it is called in a thread", place, "write a plain def")
    if not parameters or len(required) > 1:
        found = f"({', '.join(['self', *parameters])})"
        yield _problem(f"{LOAD_MODEL} must take one argument", place, expected="(self, model_path)", found=found)


def _check_verbs(cls: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    names = [f"handle_{verb}" for verb in VERBS]
    present = [name for name in names if _method(cls, name) is not None]
    if not present:
        message = "the Handler has no method for an HTTP verb"
        near = [name for name in vars(cls) if difflib.get_close_matches(name, names, 1)]
        yield _problem(message, _place(cls, "", contract), _did_you_mean(near), expected=" or ".join(names))
    for name in present:
        yield from _check_parameters(_parameters_of(cls, name), HTTP_ARGUMENTS, name, _place(cls, name, contract))
    if contract.is_batched:
        yield from _check_batched(cls, contract)


def _check_batched(cls: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    method = _method(cls, "handle_post")
    place = _place(cls, "handle_post", contract)
    if method is None:
        message = "server_side_batching requires handle_post, which the Handler does not define"
        yield _problem(message, place, "define handle_post, or remove server_side_batching")
    elif inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        message = "handle_post yields, but with server_side_batching it must return a list"
        yield _problem(message, place, "return a list with one result for each payload")


def _check_rpcs(cls: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    for name in contract.rpc_names or ():
        place = _place(cls, name, contract)
        if _method(cls, name) is None:
            message = f"the Handler does not implement the method {name} of its service"
            yield _problem(message, place, f"define {name}(self, payload, context)")
        else:
            yield from _check_parameters(_parameters_of(cls, name), GRPC_ARGUMENTS, name, place)


def _check_parameters(
    parameters: Mapping[str, inspect.Parameter], known: Collection[str], method: str, place: SourceLine
) -> Iterator[Problem]:
    for name, parameter in parameters.items():
        if parameter.kind in _VARIADIC or (parameter.default is not parameter.empty and name not in known):
            continue
        if parameter.kind not in _KEYWORD_KINDS:
            message = f"{method} takes {name} by position only; arguments are passed by name"
            yield _problem(message, place, "remove the / from its signature")
        elif name not in known:
            near = _did_you_mean(difflib.get_close_matches(name, known, 1))
            message = f"{method} asks for {name!r}, which the server does not provide"
            yield _problem(message, place, near, expected=", ".join(sorted(known)) or "no arguments", found=name)


# The class


def _method(cls: type[Any], name: str) -> Callable[..., Any] | None:
    method = getattr(cls, name, None)
    return method if callable(method) else None


def _parameters_of(cls: type[Any], name: str) -> dict[str, inspect.Parameter]:
    method = getattr(cls, name)
    try:
        parameters = dict(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return {}
    if inspect.isfunction(method) and not isinstance(inspect.getattr_static(cls, name), staticmethod) and parameters:
        parameters.pop(next(iter(parameters)))
    return parameters


def _takes_any_name(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _place(cls: type[Any], name: str, contract: HandlerContract) -> SourceLine:
    method = _method(cls, name)
    place = None if method is None else definition_location(method)
    if place is not None:
        return place
    try:
        return SourceLine(inspect.getsourcefile(cls) or contract.file, inspect.getsourcelines(cls)[1])
    except (OSError, TypeError):
        return SourceLine(contract.file, 0)


def _problem(message: str, place: SourceLine, fix: str = "", *, expected: str = "", found: str = "") -> Problem:
    line = place.line or None
    return Problem(message, file=place.file, line=line, expected=expected, found=found, suggestion=fix)


def _did_you_mean(names: Collection[str]) -> str:
    return "" if not names else f"did you mean {next(iter(names))}?"


_MODEL_CLIENT: Final = ("model_client", "python_client")
_TENSORFLOW_CLIENT: Final = ("tensorflow_client",)
_PROTO_MODULE: Final = ("proto_module_pb2", "module_proto_pb2")
_BATCHED: Final = "handle_post"


@dataclass(frozen=True, slots=True)
class HandlerDependencies:
    """Dependencies of a handler.

    Attributes:
        clients: of the models, by constructor argument: ``model_client`` or ``tensorflow_client``.
        proto_module: generated messages of the gRPC service.
        modules: additional importable modules.
        rpc_names: methods of the gRPC service.
    """

    clients: Mapping[str, Any] = field(default_factory=dict)
    proto_module: ModuleType | None = None
    modules: Mapping[str, ModuleType] = field(default_factory=dict)
    rpc_names: tuple[str, ...] = ()

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return all constructor arguments under all their names."""
        given: dict[str, Any] = {"config": copy.deepcopy(config)}
        if self.proto_module is not None:
            given |= dict.fromkeys(_PROTO_MODULE, self.proto_module)
        for name, client in self.clients.items():
            given |= dict.fromkeys(_MODEL_CLIENT if name in _MODEL_CLIENT else (name,), client)
        return given


NO_DEPENDENCIES: Final = HandlerDependencies()


class HandlerBuilder:
    """Builder of a project's handler; a context manager that owns the imported modules.

    Args:
        is_only_service: whether the handler is the only service, so that its modules keep their plain names.
    """

    def __init__(
        self,
        project: ProjectSpec,
        dependencies: HandlerDependencies,
        error_reporter: ErrorReporter,
        threads: WorkerThreads,
        *,
        is_only_service: bool = False,
    ) -> None:
        self._project = project
        self._supplies = dependencies
        self._code = error_reporter
        self._threads = threads
        self._package = HandlerPackage(*import_folders(project), is_public=is_only_service)

    def __enter__(self) -> Self:
        for name, module in self._supplies.modules.items():
            self._package.provide(name, module)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._package.unload()

    async def load(self) -> type[Any]:
        """Import the file and check the class, without creating an instance.

        Raises:
            ConfigError: the import failed, or the class has problems, all of which are listed.
        """
        cls: type[Any] = await self._run("the import", load_handler_class, self._package, self._project.handler_path)
        problems = check_handler(cls, self._contract())
        if problems:
            raise ConfigError(problems)
        return cls

    async def build(self) -> tuple[Any, dict[str, HandlerMethod]]:
        """Load the class and create its instance.

        Raises:
            ConfigError: see :meth:`load`, or the constructor raised.
        """
        cls = await self.load()
        instance = await self._run("the constructor", self._construct, cls)
        return instance, self._methods(instance)

    async def _run(self, step: str, function: Any, *args: Any) -> Any:
        try:
            return await call_in_thread(self._threads, function, *args)
        except UserCodeRaisedError as raised:
            if isinstance(raised.error, ConfigError):
                raise raised.error from None
            raise self._failed(raised.error, step) from raised.error

    def _failed(self, error: BaseException, step: str) -> ConfigError:
        self._code.report(error, step)
        file = str(self._project.handler_path)
        place = error_location(self._project.directory, error)
        reason = describe_error(error).replace(f"{self._package.name}.", "")
        where, line = (file, None) if place is None else place
        message = f"{step} of the handler failed: {reason}"
        return ConfigError([Problem(message, file=where, line=line, suggestion=missing_module_hint(error))])

    # The class

    def _contract(self) -> HandlerContract:
        project = self._project
        is_python = project.type == "python"
        client_names = _MODEL_CLIENT if is_python and project.models else () if is_python else _TENSORFLOW_CLIENT
        return HandlerContract(
            str(project.handler_path),
            {*self._supplies.arguments({}), *client_names},
            rpc_names=None if project.protobuf_path is None else self._supplies.rpc_names,
            is_batched=self._is_batched,
            loads_models=is_python and project.models is not None,
            client_names=client_names,
        )

    @property
    def _is_batched(self) -> bool:
        """True if requests are batched here; TensorFlow projects batch in the models."""
        return self._project.batching is not None and self._project.type == "python"

    def _construct(self, cls: type[Any]) -> Any:
        """Create the instance; its models can be loaded even while its constructor runs."""
        given = self._supplies.arguments(self._project.config)
        parameters = constructor_parameters(cls)
        arguments = {name: value for name, value in given.items() if name in parameters}
        if _takes_any_name(parameters):
            # As in Nucleus: ``**kwargs``, such as those of a subclass, include the clients of models.
            arguments = {**self._supplies.clients, **arguments}
        if type(cls).__call__ is not type.__call__:
            instance = cls(**arguments)
            self._set_load_method(instance)
            return instance
        make_new: Any = cls.__new__
        instance = make_new(cls, **arguments)
        self._set_load_method(instance)
        # As in type.__call__: __new__ may return an instance of another class.
        if isinstance(instance, cls):
            instance.__init__(**arguments)
        return instance

    def _set_load_method(self, instance: Any) -> None:
        load_model = getattr(instance, "load_model", None)
        for client in self._supplies.clients.values():
            take = getattr(client, "set_load_method", None)
            if take is not None and load_model is not None:
                take(load_model)

    def _methods(self, instance: Any) -> dict[str, HandlerMethod]:
        if self._project.protobuf_path is not None:
            return {name: HandlerMethod.of(instance, name, GRPC_ARGUMENTS) for name in self._supplies.rpc_names}
        names = [f"handle_{verb}" for verb in VERBS]
        return {
            name: HandlerMethod.of(instance, name, HTTP_ARGUMENTS, is_batched=self._is_batched and name == _BATCHED)
            for name in names
            if callable(getattr(instance, name, None))
        }


# Running handlers

BatchedT = TypeVar("BatchedT")

log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_handler(
    project: ProjectSpec,
    dependencies: HandlerDependencies = NO_DEPENDENCIES,
    *,
    batch_hooks: BatchHooks = NULL_BATCH_HOOKS,
    is_only_service: bool = False,
    error_reporter: ErrorReporter | None = None,
    batches_requests: bool = True,
    queue_timeout: float = 0,
) -> AsyncIterator[LoadedHandler]:
    """Load a project's handler and run it during the block; raise ConfigError with all problems of its class.

    The constructor runs in the threads of the methods, in the same thread if there is only one. ``is_only_service``
    adds the handler's folders to ``sys.path``, since it is the only service. ``batches_requests`` batches requests here
    if the project configures batching. A call waits ``queue_timeout`` seconds for a thread, forever if 0.

    Callbacks, batches and threads that have not ended ``DRAIN_SECONDS`` after the block are abandoned.
    """
    error_reporter = error_reporter or ErrorReporter(project.name, project.directory)
    threads = WorkerThreads(
        limit=project.threads_per_process, idle_seconds=None, is_strict=True, log_fields=error_reporter.log_fields
    )
    callbacks = Callbacks(error_reporter)
    builder = HandlerBuilder(project, dependencies, error_reporter, threads, is_only_service=is_only_service)
    failure: ConfigError | None = None
    with on_sys_path(import_folders(project)) if is_only_service else nullcontext(), builder:
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(threads.run)
                await nursery.start(callbacks.run)
                instance, methods = await builder.build()
                batcher = await _start_own_batcher(
                    nursery,
                    project if batches_requests else None,
                    methods,
                    threads=threads,
                    code=error_reporter,
                    hooks=batch_hooks,
                )
                patience = QueueTimeouts.of(project, queue_timeout)
                yield LoadedHandler(
                    instance, methods, threads, callbacks, code=error_reporter, batcher=batcher, patience=patience
                )
                await drain_batcher(batcher, nursery.cancel_scope)
            except ConfigError as error:
                # Raised outside the nursery, which would wrap it in a group.
                failure = error
            finally:
                callbacks.close()
                with trio.CancelScope(shield=True):
                    await threads.aclose()
    if failure is not None:
        raise failure


async def _start_own_batcher(
    nursery: trio.Nursery,
    project: ProjectSpec | None,
    methods: Mapping[str, HandlerMethod],
    *,
    threads: WorkerThreads,
    code: ErrorReporter,
    hooks: BatchHooks,
) -> Batcher[BatchItem, Any] | None:
    batched = next((method for method in methods.values() if method.is_batched), None)
    if batched is None or project is None or project.batching is None:
        return None
    run = BatchedMethod(batched, partial(call_method, threads, code), code).run
    return await start_batcher(nursery, project.batching, run, concurrency=project.threads_per_process, hooks=hooks)


async def start_batcher(
    nursery: trio.Nursery,
    batching: ProjectBatching,
    run: Callable[[Sequence[BatchedT]], Awaitable[Sequence[Any]]],
    *,
    concurrency: int,
    hooks: BatchHooks,
) -> Batcher[BatchedT, Any]:
    """Start the batcher of a project in a nursery."""
    batcher: Batcher[BatchedT, Any] = Batcher(
        run, batch_options(batching), concurrency=concurrency, retry_singly=batching.retry_singly, hooks=hooks
    )
    await nursery.start(batcher.serve)
    return batcher


async def drain_batcher(batcher: Batcher[Any, Any] | None, cancel_scope: trio.CancelScope) -> None:
    """Wait for running batches; cancel ``cancel_scope`` after ``DRAIN_SECONDS``."""
    if batcher is None:
        return
    with trio.move_on_after(DRAIN_SECONDS) as scope:
        await batcher.aclose()
    if scope.cancelled_caught:
        log.warning("batch drain timed out", seconds=DRAIN_SECONDS)
        cancel_scope.cancel()
