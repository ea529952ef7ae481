"""From a project to an object of its class ``Handler``, in the threads that the object's methods will run in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Final, Self

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
from ovmstrio.runtimes.handlers.handler_class import (
    GRPC_ARGUMENTS,
    HTTP_ARGUMENTS,
    VERBS,
    HandlerMethod,
    import_folders,
    load_handler_class,
)
from ovmstrio.runtimes.handlers.handler_code import HandlerCode
from ovmstrio.runtimes.handlers.signatures import HandlerContract, check_handler, constructor_parameters
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_in_thread
from ovmstrio.work.user_code.importing import HandlerPackage
from ovmstrio.work.user_code.places import describe, missing_module_fix, place_in

__all__ = ["HandlerBuilder", "Supplies"]

_MODEL_CLIENT: Final = ("model_client", "python_client")
_TENSORFLOW_CLIENT: Final = ("tensorflow_client",)
_PROTO_MODULE: Final = ("proto_module_pb2", "module_proto_pb2")
_BATCHED: Final = "handle_post"


@dataclass(frozen=True, slots=True)
class Supplies:
    """What the server has for a handler.

    Attributes:
        clients: of the models, by the name that a constructor asks for.
        proto_module: the messages of its service.
        modules: what it can import besides the modules in its folders.
        rpc_names: the methods of its service.
    """

    clients: Mapping[str, Any]
    proto_module: ModuleType | None
    modules: Mapping[str, ModuleType]
    rpc_names: tuple[str, ...]

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Give all arguments that a constructor may ask for, under all names that they go by."""
        given: dict[str, Any] = {"config": copy.deepcopy(config)}
        if self.proto_module is not None:
            given |= dict.fromkeys(_PROTO_MODULE, self.proto_module)
        for name, client in self.clients.items():
            given |= dict.fromkeys(_MODEL_CLIENT if name in _MODEL_CLIENT else (name,), client)
        return given


class HandlerBuilder:
    """Makes a project's handler; as a context it holds the modules that were imported for it.

    Args:
        project: whose handler.
        supplies: what the server has for it.
        code: whose code it is.
        threads: where it is made.
        is_alone: whether nothing else is served in this process, so that its modules may have their plain names.
    """

    def __init__(
        self,
        project: ProjectSpec,
        supplies: Supplies,
        code: HandlerCode,
        threads: WorkerThreads,
        *,
        is_alone: bool = False,
    ) -> None:
        self._project = project
        self._supplies = supplies
        self._code = code
        self._threads = threads
        self._package = HandlerPackage(*import_folders(project), is_public=is_alone)

    def __enter__(self) -> Self:
        for name, module in self._supplies.modules.items():
            self._package.provide(name, module)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._package.unload()

    async def load(self) -> type[Any]:
        """Import the file and check the class, without making an object.

        Raises:
            ConfigError: any of these failed; all problems of the class are told at once.

        Cancellation: as a plain method's call.
        """
        made: type[Any] = await self._run("the import", load_handler_class, self._package, self._project.handler_path)
        problems = check_handler(made, self._contract())
        if problems:
            raise ConfigError(problems)
        return made

    async def build(self) -> tuple[Any, dict[str, HandlerMethod]]:
        """Load the class and make the object.

        Raises:
            ConfigError: as :meth:`load`, or the constructor failed.

        Cancellation: as a plain method's call.
        """
        made = await self.load()
        instance = await self._run("the constructor", self._construct, made)
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
        place = place_in(self._project.directory, error)
        reason = describe(error).replace(f"{self._package.name}.", "")
        where, line = (file, None) if place is None else place
        message = f"{step} of the handler failed: {reason}"
        return ConfigError([Problem(message, file=where, line=line, suggestion=missing_module_fix(error))])

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
        """Whether calls are gathered here; those of TensorFlow models are gathered where the models run."""
        return self._project.batching is not None and self._project.type == "python"

    def _construct(self, made: type[Any]) -> Any:
        """Make the object; its models can be loaded as soon as it exists, even while its constructor runs."""
        given = self._supplies.arguments(self._project.config)
        wanted = constructor_parameters(made)
        arguments = {name: value for name, value in given.items() if name in wanted}
        if type(made).__call__ is not type.__call__:
            instance = made(**arguments)
            self._offer(instance)
            return instance
        make_new: Any = made.__new__
        instance = make_new(made, **arguments)
        self._offer(instance)
        # Type.__call__ does the same: what __new__ gives may be of another class.
        if isinstance(instance, made):
            instance.__init__(**arguments)
        return instance

    def _offer(self, instance: Any) -> None:
        """Let the client of the models load them with the object's method."""
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
