"""Ops whose hooks do what no hook should."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import numpy as np
import trio

from ovmstrio.ops import Op, PipelineResponse, RequestOp, ResponseOp


class Release:
    """What ends the hooks that would not end by themselves, at the latest when its block is left; one for each test."""

    def __init__(self) -> None:
        self.threads = threading.Event()
        self.tasks = trio.Event()
        self.held = 0

    async def hold(self) -> None:
        self.held += 1
        await self.tasks.wait()

    def __call__(self) -> None:
        self.threads.set()
        self.tasks.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self()


class _Untold(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        raise AttributeError("text")


class _Uncopied:
    """A value that stops whoever copies it."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise SystemExit(6)


def _raise(error: BaseException) -> Any:
    raise error


def _cyclic() -> dict[str, Any]:
    output: dict[str, Any] = {"x": "cyclic"}
    output["self"] = output
    return output


DEEDS: Final[Mapping[str, Callable[[], Any]]] = {
    "raise": lambda: _raise(ValueError("no")),
    "exit": lambda: _raise(SystemExit(3)),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "generator": lambda: _raise(GeneratorExit()),
    "base": lambda: _raise(BaseException("no")),
    "group": lambda: _raise(BaseExceptionGroup("no", [SystemExit(1)])),
    "untold": lambda: _raise(_Untold()),
    "none": lambda: None,
    "number": lambda: 7,
    "pair": lambda: ({"x": "pair"}, 1),
    "five": lambda: (1, 2, 3, 4, 5),
    "code": lambda: ({"x": "code"}, False, object(), object()),
    "object": object,
    "uncopied": lambda: {"x": "uncopied", "y": _Uncopied()},
    "lock": lambda: {"x": "lock", "y": threading.Lock()},
    "cyclic": _cyclic,
    "odd array": lambda: {"x": np.array([object()], object)},
    "odd keys": lambda: {1: "x", None: "y"},
}
"""What a hook may do at once, by the text of the request."""

ASYNC_DEEDS: Final = sorted(set(DEEDS) - {"interrupt"})
"""Those of a hook on the loop, where an interrupt is one of the server."""


class Hostile(Op):
    """Does in one of its hooks, in a thread, what a request's text says; the hook is told by ``where``."""

    where: str = "preprocess"
    release: Release

    def do(self, hook: str, values: Any) -> Any:
        text = str(next(iter(values.values()), "")) if isinstance(values, dict) else ""
        if hook != self.where or self.name not in {"a", "op"}:
            return None
        if text == "wait":
            self.release.threads.wait(60)
        return (DEEDS[text](),) if text in DEEDS else None

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        first = next(iter(input_dicts.values()))
        done = self.do("preprocess", first)
        mine = dict(first)
        first.clear()
        return mine if done is None else done[0]

    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        done = self.do("process", feed_batch[0])
        mine = dict(feed_batch[0])
        feed_batch[0].clear()
        return mine if done is None else done[0]

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        done = self.do("postprocess", fetch_data)
        return fetch_data if done is None else done[0]


class AsyncHostile(Hostile):
    """Does the same on the loop, and ignores its cancellation where it waits."""

    async def _wait(self, hook: str, values: Any) -> None:
        waits = isinstance(values, dict) and values.get("x") == "wait"
        if waits and hook == self.where and self.name in {"a", "op"}:
            with trio.CancelScope(shield=True):
                await self.release.hold()

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        await self._wait("preprocess", next(iter(input_dicts.values())))
        return super().preprocess(input_dicts, data_id, log_id)

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        await self._wait("process", feed_batch[0])
        return super().process(feed_batch, typical_logid)

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        await self._wait("postprocess", fetch_data)
        return super().postprocess(input_dicts, fetch_data, data_id, log_id)


class StubbornRequest(RequestOp):
    """Reads requests, but for some of them for ever."""

    release: Release

    async def unpack_request_package(self, request: Any) -> Any:
        if request.values == ["unpack"]:
            with trio.CancelScope(shield=True):
                await self.release.hold()
        return super().unpack_request_package(request)


class StubbornResponse(ResponseOp):
    """Packs answers, but some of them for ever."""

    release: Release

    async def pack_response_package(self, channeldata: Any) -> PipelineResponse:
        if channeldata.parse().get("x") == "pack":
            with trio.CancelScope(shield=True):
                await self.release.hold()
        packed: PipelineResponse = super().pack_response_package(channeldata)
        return packed
