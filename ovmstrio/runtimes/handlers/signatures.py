"""What a Handler class must look like; everything that is wrong is told at once, with file and line."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.handlers.handler_class import GRPC_ARGUMENTS, HTTP_ARGUMENTS, VERBS
from ovmstrio.work.user_code.calls import is_async
from ovmstrio.work.user_code.places import SourceLine, place_of

__all__ = ["HandlerContract", "check_handler", "constructor_parameters"]

LOAD_MODEL: Final = "load_model"
_KINDS: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_REST: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class HandlerContract:
    """What a project asks of its Handler.

    Args:
        file: the handler's, for problems without a better place.
        injected: all names that its constructor may ask for.
        rpc_names: the methods of its gRPC service; None where it is called over HTTP.
        is_batched: whether requests are gathered.
        loads_models: whether it must load the project's models.
        client_names: of which the constructor must take one.
    """

    def __init__(
        self,
        file: str,
        injected: Collection[str],
        *,
        rpc_names: Collection[str] | None = None,
        is_batched: bool = False,
        loads_models: bool = False,
        client_names: Collection[str] = (),
    ) -> None:
        self.file = file
        self.injected = injected
        self.rpc_names = rpc_names
        self.is_batched = is_batched
        self.loads_models = loads_models
        self.client_names = client_names


def check_handler(made: type[Any], contract: HandlerContract) -> list[Problem]:
    """Find everything that is wrong with a Handler class."""
    checks = (_constructor, _load_model, _verbs if contract.rpc_names is None else _rpcs)
    return [problem for check in checks for problem in check(made, contract)]


def constructor_parameters(made: type[Any]) -> dict[str, inspect.Parameter]:
    """Give the parameters of a class's constructor; none where it has no constructor of its own."""
    return {} if made.__init__ is object.__init__ else _parameters_of(made, "__init__")


def _constructor(made: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    parameters = constructor_parameters(made)
    place = _place(made, "__init__", contract)
    yield from _unknown(parameters, contract.injected, "__init__", place)
    if contract.client_names and not set(contract.client_names) & set(parameters):
        name = next(iter(contract.client_names))
        message = f"the constructor does not take {name}, although the project has models"
        yield _problem(message, place, f"write def __init__(self, {name}, ...)")


def _load_model(made: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    if not contract.loads_models:
        return
    place = _place(made, LOAD_MODEL, contract)
    if _method(made, LOAD_MODEL) is None:
        fix = f"define {LOAD_MODEL}(self, model_path) that returns the model"
        yield _problem(f"the Handler has no {LOAD_MODEL}, although the project has models", place, fix)
        return
    method = getattr(made, LOAD_MODEL)
    parameters = _parameters_of(made, LOAD_MODEL)
    required = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in _REST]
    if is_async(method):
        yield _problem(f"{LOAD_MODEL} is async; it is called in a thread", place, "write a plain def")
    if not parameters or len(required) > 1:
        found = f"({', '.join(['self', *parameters])})"
        yield _problem(f"{LOAD_MODEL} must take one argument", place, expected="(self, model_path)", found=found)


def _verbs(made: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    names = [f"handle_{verb}" for verb in VERBS]
    present = [name for name in names if _method(made, name) is not None]
    if not present:
        message = "the Handler has no method for any verb"
        near = [name for name in vars(made) if difflib.get_close_matches(name, names, 1)]
        yield _problem(message, _place(made, "", contract), _did_you_mean(near), expected=" or ".join(names))
    for name in present:
        yield from _unknown(_parameters_of(made, name), HTTP_ARGUMENTS, name, _place(made, name, contract))
    if contract.is_batched:
        yield from _batched(made, contract)


def _batched(made: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    method = _method(made, "handle_post")
    place = _place(made, "handle_post", contract)
    if method is None:
        message = "server_side_batching is for handle_post, which the Handler does not have"
        yield _problem(message, place, "define handle_post, or remove server_side_batching")
    elif inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        message = "handle_post yields, but with server_side_batching it must return a list"
        yield _problem(message, place, "return a list with one result for each payload")


def _rpcs(made: type[Any], contract: HandlerContract) -> Iterator[Problem]:
    for name in contract.rpc_names or ():
        place = _place(made, name, contract)
        if _method(made, name) is None:
            message = f"the Handler does not implement the method {name} of its service"
            yield _problem(message, place, f"define {name}(self, payload, context)")
        else:
            yield from _unknown(_parameters_of(made, name), GRPC_ARGUMENTS, name, place)


def _unknown(
    parameters: Mapping[str, inspect.Parameter], known: Collection[str], method: str, place: SourceLine
) -> Iterator[Problem]:
    """Find parameters that nobody gives a value."""
    for name, parameter in parameters.items():
        if parameter.kind in _REST or (parameter.default is not parameter.empty and name not in known):
            continue
        if parameter.kind not in _KINDS:
            message = f"{method} takes {name} by position only; arguments are given by name"
            yield _problem(message, place, "remove the / from its signature")
        elif name not in known:
            near = _did_you_mean(difflib.get_close_matches(name, known, 1))
            message = f"{method} asks for {name!r}, which the server does not have"
            yield _problem(message, place, near, expected=", ".join(sorted(known)) or "no arguments", found=name)


# The class


def _method(made: type[Any], name: str) -> Callable[..., Any] | None:
    method = getattr(made, name, None)
    return method if callable(method) else None


def _parameters_of(made: type[Any], name: str) -> dict[str, inspect.Parameter]:
    """Give the parameters of a method beside ``self``; those of a callable that hides them are taken as fitting."""
    method = getattr(made, name)
    try:
        parameters = dict(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return {}
    if inspect.isfunction(method) and not isinstance(inspect.getattr_static(made, name), staticmethod) and parameters:
        parameters.pop(next(iter(parameters)))
    return parameters


def _place(made: type[Any], name: str, contract: HandlerContract) -> SourceLine:
    method = _method(made, name)
    place = None if method is None else place_of(method)
    if place is not None:
        return place
    try:
        return SourceLine(inspect.getsourcefile(made) or contract.file, inspect.getsourcelines(made)[1])
    except (OSError, TypeError):
        return SourceLine(contract.file, 0)


def _problem(message: str, place: SourceLine, fix: str = "", *, expected: str = "", found: str = "") -> Problem:
    line = place.line or None
    return Problem(message, file=place.file, line=line, expected=expected, found=found, suggestion=fix)


def _did_you_mean(names: Collection[str]) -> str:
    return "" if not names else f"did you mean {next(iter(names))}?"
