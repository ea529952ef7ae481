"""Blocking gRPC client of Paddle Serving pipelines, compatible with Paddle's ``PipelineClient``."""

from __future__ import annotations

import io
import ipaddress
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE
from ovmstrio.ops.messages import LOD_SUFFIX, PipelineTensor, add_tensor, from_array
from ovmstrio.util.extras import Extra, missing_extra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PipelineClient", "PredictFuture"]

PROFILE_KEY: Final = "pipeline.profile"

_MAX_MESSAGE_BYTES: Final = 512 * 2**20
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.lb_policy_name", "round_robin"),
)
_REQUEST_FIELDS: Final = frozenset({"logid", "clientip"})
"""Feed keys that are fields of the request."""

_STRINGS: Final = 12
_NPY: Final = 13


class PredictFuture:
    """Running call; ``call_future_`` is the future of ``grpc``."""

    def __init__(self, call: Any) -> None:
        self.call_future_ = call

    def result(self, timeout: float | None = None) -> Any:
        """Wait at most ``timeout`` seconds for the answer; raises ``grpc.RpcError`` or ``grpc.FutureTimeoutError``."""
        return self.call_future_.result(timeout)


class PipelineClient:
    """Client of pipelines; thread-safe once connected."""

    def __init__(self) -> None:
        self._channel: Any = None
        self._inference: Any = None

    def connect(self, endpoints: Sequence[str] | str) -> None:
        """Set the servers (``host:port``), which are used round-robin.

        Raises ``ValueError`` or ``OSError``, or ``ModuleNotFoundError`` without grpcio.
        """
        if missing := missing_extra("grpc", Extra.GRPC):
            raise ModuleNotFoundError(f"PipelineClient needs grpcio: {missing}", name="grpc")
        import grpc  # noqa: PLC0415 - optional

        listed = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not listed:
            raise ValueError("connect needs at least one endpoint, such as '127.0.0.1:9998'")
        self.release()
        target = f"ipv4:{','.join(map(_numeric, listed))}"
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._inference = self._channel.unary_unary(
            METHOD, request_serializer=REQUEST.SerializeToString, response_deserializer=RESPONSE.FromString
        )

    def release(self) -> None:
        """Close the connection, if any."""
        if self._channel is not None:
            self._channel.close()
            self._channel = self._inference = None

    def predict(  # noqa: PLR0917 - what scripts call by position
        self,
        feed_dict: Mapping[str, Any],
        fetch: list[str] | None = None,
        asyn: bool = False,  # noqa: FBT002 - what scripts call by position
        pack_tensor_format: bool = False,  # noqa: FBT002 - as above
        use_tensor_bytes: bool = False,  # noqa: FBT002 - as above
        profile: bool = False,  # noqa: FBT002 - as above
        log_id: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Call the pipeline; return the ``Response`` message, or with ``asyn`` a :class:`PredictFuture`.

        Args:
            feed_dict: values by key: strings, arrays and lists. ``logid`` and ``clientip`` become request fields.
            fetch: ignored, for compatibility.
            asyn: return without waiting.
            pack_tensor_format: send arrays as tensors instead of text.
            use_tensor_bytes: send tensors in numpy's file format.
            profile: request the timeline of the request.
            log_id: log id; default: ``logid`` of the feed, else 0.
            timeout: maximum seconds to wait; default: no limit.

        Raises:
            TypeError: a value has an unsupported type.
            RuntimeError: the client is not connected.
            grpc.RpcError: the call failed.
        """
        if not isinstance(feed_dict, dict):
            raise TypeError("feed must be dict type with format: {name: value}.")
        if fetch is not None and not isinstance(fetch, list):
            raise TypeError("fetch must be list type with format: [name].")
        if self._inference is None:
            raise RuntimeError("the client is not connected: call connect(['host:port']) first")
        request = _request(feed_dict, log_id)
        if pack_tensor_format:
            _add_tensors(request, feed_dict, as_bytes=use_tensor_bytes)
        else:
            _add_texts(request, feed_dict)
        if profile:
            request.key.append(PROFILE_KEY)
            request.value.append("1")
        if asyn:
            return PredictFuture(self._inference.future(request, timeout=timeout))
        return self._inference(request, timeout=timeout)


def _numeric(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = socket.gethostbyname(host)
    return f"{host}:{port}"


def _request(feed: Mapping[str, Any], log_id: int | None) -> Any:
    chosen = feed.get("logid", 0) if log_id is None else log_id
    return REQUEST(logid=int(chosen), clientip=feed.get("clientip") or _own_address())


def _own_address() -> str:
    """Return an address of this machine; empty if unknown, so that the server fills it in."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _add_texts(request: Any, feed: Mapping[str, Any]) -> None:
    for key, value in feed.items():
        if key not in _REQUEST_FIELDS:
            request.key.append(key)
            request.value.append(value if isinstance(value, str) else _array_text(key, value))


def _array_text(key: str, value: Any) -> str:
    if not isinstance(value, np.ndarray | list):
        raise TypeError(f"{key}: only str, list and np.ndarray type is supported: {type(value)}")
    with np.printoptions(threshold=sys.maxsize):
        return repr(np.asarray(value))


def _add_tensors(request: Any, feed: Mapping[str, Any], *, as_bytes: bool) -> None:
    for key, value in feed.items():
        if key in _REQUEST_FIELDS or (key.endswith(LOD_SUFFIX) and key.removesuffix(LOD_SUFFIX) in feed):
            continue
        add_tensor(request, _tensor(key, value, feed.get(key + LOD_SUFFIX), as_bytes=as_bytes))


def _tensor(key: str, value: Any, lod: Any, *, as_bytes: bool) -> PipelineTensor:
    if isinstance(value, str):
        return PipelineTensor(key, _STRINGS, str_data=[value])
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{key}: only str and np.ndarray type is supported: {type(value)}")
    if not as_bytes:
        try:
            return from_array(key, value, lod)
        except ValueError as error:
            raise TypeError(str(error)) from None
    offsets = [] if lod is None else np.asarray(lod).reshape(-1).tolist()
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return PipelineTensor(key, _NPY, list(value.shape), offsets, byte_data=file.getvalue())
