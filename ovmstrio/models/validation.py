"""Validation of requests against a servable's inputs, and conversion to arrays, for all protocols.

The checks, their order and the fixed part of their texts are OVMS's (KServe validation), because clients match on them.
Differences: ``INT64`` and ``UINT64`` have their full range, out-of-range integers are rejected instead of truncated,
undecodable images are the client's fault, and all invalid inputs are listed after the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from math import prod
from typing import Final, TypeVar

import numpy as np
import trio

from ovmstrio.config.documents import did_you_mean
from ovmstrio.core.errors import MAX_ERRORS, ErrorList, InvalidRequest, NotSupported
from ovmstrio.core.request import Buffer, InferInput, InferRequest
from ovmstrio.core.tensor import BYTES, Array, Dim, TensorSpec
from ovmstrio.encoding.raw_contents import wrapped
from ovmstrio.models.request_errors import DUPLICATE_CONTENTS, format_shape, input_mismatch, invalid_request
from ovmstrio.models.tensor_contents import (
    bytes_elements,
    is_string_matrix,
    list_converter,
    native_strings,
    string_matrix,
    to_array,
)
from ovmstrio.util.extras import Extra
from ovmstrio.util.truncation import cut

# ----------------------------------------------------------------------
# Images (JPEG, PNG, ...) sent as BYTES to an input that expects pixels
# ----------------------------------------------------------------------

# Images become BGR, channels last, in the input's element type without scaling, resized bilinearly to a fixed height
# and width of the model. OVMS uses OpenCV: Pillow's JPEG values may differ by a few units, and Pillow smooths when it
# downscales. 16-bit depth is kept for grey images only.

IMAGE_RANK: Final = 4
_DATATYPES: Final = {"FP32", "FP64", "FP16", "INT16", "UINT8", "INT8", "UINT16", "INT32"}
_CHANNELS_LAST: Final = "NHWC"
_BGR_ORDER: Final = {3: (2, 1, 0), 4: (2, 1, 0, 3)}


def decode_batch(given: InferInput, raw: Buffer | None, spec: TensorSpec) -> Array:
    """Decode the images of a request into one array of the input's element type.

    Raises:
        InvalidRequest: the element type, layout, number, channels or sizes do not match, or an image cannot be decoded.
    """
    if spec.datatype.name not in _DATATYPES:
        raise InvalidRequest(
            f"Functionality not implemented - encoded images for {spec.datatype.name}; input name: {spec.name}"
        )
    if not _is_channels_last(spec.layout):
        raise input_mismatch("Unsupported layout for encoded images", "NHWC", spec.layout, spec)
    if len(given.shape) != 1:
        raise input_mismatch("Invalid number of shape dimensions", "(-1)", format_shape(given.shape), spec)
    elements = bytes_elements(given, raw, spec)
    if given.shape[0] != len(elements):
        raise input_mismatch("Invalid input batch size", given.shape[0], f"{len(elements)} images", spec)
    if not elements or not spec.shape[0].accepts(len(elements)):
        raise input_mismatch("Invalid input batch size", spec.shape[0], len(elements), spec)
    images = [_decode(element, spec) for element in elements]
    if len({image.shape for image in images}) > 1:
        sizes = ", ".join(sorted({format_shape(image.shape) for image in images}))
        raise input_mismatch("Binary images resolution mismatch", "one resolution", sizes, spec)
    return np.stack(images)


def _is_channels_last(layout: str) -> bool:
    """Return whether ``layout`` can be NHWC: each letter matches or is unknown."""
    before, dots, after = layout.partition("...")
    unnamed = IMAGE_RANK - len(before) - len(after) if dots or not layout else 0
    letters = before + "?" * unnamed + after
    return len(letters) == IMAGE_RANK and all(
        letter in ("?", wanted) for letter, wanted in zip(letters, _CHANNELS_LAST, strict=True)
    )


def _decode(encoded: bytes, spec: TensorSpec) -> Array:
    try:
        from ovmstrio.encoding.image_files import (  # noqa: PLC0415 - imported when first needed
            ImageFileError,
            decoded,
            resized,
        )
    except ModuleNotFoundError as error:
        if error.name != "PIL":
            raise
        message = f"input {spec.name!r}: encoded images need Pillow, which this server does not have"
        raise NotSupported(f"{message}: install its extra {Extra.IMAGES!s}") from None
    if not encoded:
        raise invalid_request("Bytes contents empty", f"expected an encoded image; input name: {spec.name}")
    _, height, width, channels = spec.shape
    try:
        image = decoded(encoded)
    except ImageFileError as error:
        raise invalid_request("Image parsing failed", f"{error}; input name: {spec.name}") from None
    depth = len(image.getbands())
    if not channels.accepts(depth):
        raise input_mismatch("Invalid number of channels in binary input", channels, depth, spec)
    size = (_nearest(width, image.width), _nearest(height, image.height))
    pixels = np.asarray(resized(image, size))
    if pixels.ndim == 2:  # noqa: PLR2004 - height and width
        pixels = pixels[:, :, np.newaxis]
    if depth in _BGR_ORDER:
        pixels = pixels[:, :, _BGR_ORDER[depth]]
    # The reversed view is not contiguous, which OpenVINO requires.
    return np.ascontiguousarray(pixels, spec.datatype.numpy)


def _nearest(allowed: Dim, size: int) -> int:
    """Return the allowed size nearest to ``size``."""
    size = max(size, allowed.low)
    return size if allowed.high == -1 else min(size, allowed.high)


# Pillow


# ----------------------------------------------------------------------
# Validation
# ----------------------------------------------------------------------

_COUNTS: Final = "raw_input_contents must contain one buffer per input. Expected: {expected}; Actual: {actual}"
_MAX_BYTES: Final = 2**63 - 1
_MAX_EMPTY_ROWS: Final = 2**20
"""Most rows of a tensor without elements: no limit of bytes bounds the work on its rows, such as classification."""


class InputValidator:
    """Validator of one input with precomputed checks."""

    __slots__ = ("_datatype", "_dtype", "_exact_shape", "_last_bytes", "_last_shape", "_listed", "spec")

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self._datatype = spec.datatype.name
        self._dtype = spec.datatype.numpy
        fixed = spec.datatype is not BYTES and all(dim.is_fixed for dim in spec.shape)
        least = tuple(dim.low for dim in spec.shape)
        self._exact_shape = self._last_shape = least if fixed else None
        self._last_bytes = prod(least) * spec.datatype.itemsize
        self._listed = list_converter(spec, least)

    def __call__(self, given: InferInput, raw: Buffer | None) -> Array:
        """Validate one input and return its array; raise InvalidRequest if the input is invalid."""
        shape = given.shape
        if given.datatype == self._datatype:
            if raw is not None:
                # Fast path for the last valid shape.
                if shape == self._last_shape and len(raw) == self._last_bytes:
                    return wrapped(raw, shape, self._dtype)
            elif shape == self._exact_shape:
                array = self._listed(given.contents)
                if array is not None:
                    return array
        return self._validate(given, raw)

    def _validate(self, given: InferInput, raw: Buffer | None) -> Array:
        shape = given.shape
        spec = self.spec
        if any(size < 0 for size in shape):
            is_dynamic = any(not dim.is_fixed for dim in spec.shape)
            allowed = format_shape(spec.shape) + (" with sizes of 0 or more" if is_dynamic else "")
            raise input_mismatch("Invalid input shape", allowed, format_shape(shape), spec)
        if given.datatype == BYTES.name:
            return self._validate_bytes(given, raw)
        if given.datatype != self._datatype:
            raise input_mismatch("Invalid input precision", self._datatype, given.datatype, spec)
        self._check_shape(shape)
        count = prod(shape)
        expected = count * spec.datatype.itemsize
        if not count or expected > _MAX_BYTES:
            self._check_extent(shape)
        if raw is None:
            return to_array(given.contents, shape, count, spec)
        if len(raw) != expected:
            fixed = "Invalid content size of tensor proto"
            raise input_mismatch(fixed, f"{expected} bytes", f"{len(raw)} bytes", spec)
        self._last_shape, self._last_bytes = shape, expected
        return wrapped(raw, shape, self._dtype)

    def _validate_bytes(self, given: InferInput, raw: Buffer | None) -> Array:
        spec = self.spec
        if spec.datatype is BYTES:
            self._check_rank(given.shape)
            if not all(dim.accepts(size) for dim, size in zip(spec.shape, given.shape, strict=True)):
                raise input_mismatch("Invalid input shape", format_shape(spec.shape), format_shape(given.shape), spec)
            if 0 in given.shape:
                self._check_extent(given.shape)
            return native_strings(given, raw, prod(given.shape), spec)
        if is_string_matrix(spec):
            return string_matrix(given, raw, spec)
        if len(spec.shape) == IMAGE_RANK:
            return decode_batch(given, raw, spec)
        raise InvalidRequest(f"Functionality not implemented - BYTES for an input of {spec}; input name: {spec.name}")

    def _check_extent(self, shape: tuple[int, ...]) -> None:
        # NumPy refuses a shape whose other dimensions overflow, even if one of them is 0.
        size = prod(each or 1 for each in shape) * self._dtype.itemsize
        if size > _MAX_BYTES:
            fixed = "Invalid content size of tensor proto"
            raise input_mismatch(fixed, f"at most {_MAX_BYTES} bytes", size, self.spec)
        if 0 in shape and prod(shape[: shape.index(0)]) > _MAX_EMPTY_ROWS:
            allowed = f"at most {_MAX_EMPTY_ROWS} rows without elements"
            raise input_mismatch("Invalid input shape", allowed, format_shape(shape), self.spec)

    def _check_rank(self, shape: tuple[int, ...]) -> None:
        spec = self.spec
        if len(shape) != len(spec.shape):
            raise input_mismatch(
                "Invalid number of shape dimensions", format_shape(spec.shape), format_shape(shape), spec
            )

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        spec = self.spec
        self._check_rank(shape)
        wrong = [axis for axis, (dim, size) in enumerate(zip(spec.shape, shape, strict=True)) if not dim.accepts(size)]
        if spec.batch_axis in wrong:
            axis = spec.batch_axis
            raise input_mismatch("Invalid input batch size", spec.shape[axis], shape[axis], spec)
        if wrong:
            raise input_mismatch("Invalid input shape", format_shape(spec.shape), format_shape(shape), spec)


class Validator:
    """Validator of requests for one set of inputs.

    Attributes:
        takes_strings: an input can take strings or encoded images, so that :func:`validated` may need a thread.
    """

    __slots__ = ("_inputs", "takes_strings")

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self._inputs = [InputValidator(spec) for spec in sorted(inputs, key=lambda spec: spec.name)]
        self.takes_strings = any(
            spec.datatype is BYTES or len(spec.shape) == IMAGE_RANK or is_string_matrix(spec) for spec in inputs
        )

    def __call__(self, request: InferRequest) -> dict[str, Array]:
        """Validate a request; return its arrays by name, sorted by name.

        Arrays are read-only views of aligned raw buffers of the request.

        Raises:
            InvalidRequest: with OVMS's text of the first problem, followed by the other problems.
        """
        inputs, raws = request.inputs, request.raw_inputs
        if len(inputs) != len(self._inputs):
            number = invalid_request(
                "Invalid number of inputs", f"Expected: {len(self._inputs)}; Actual: {len(inputs)}"
            )
            # Report the other problems too, if each input has its buffer.
            others = self._check(inputs, raws)[1] if len(raws) in {0, len(inputs)} else []
            raise ErrorList([number, *others]).error()
        if raws:
            check_content_style(inputs, raws)
        if len(inputs) == 1 and inputs[0].name == self._inputs[0].spec.name:
            return {inputs[0].name: self._inputs[0](inputs[0], raws[0] if raws else None)}
        arrays, errors = self._check(inputs, raws)
        if errors:
            raise ErrorList(errors).error()
        return arrays

    def _check(
        self, inputs: Sequence[InferInput], raws: Sequence[Buffer | None]
    ) -> tuple[dict[str, Array], list[InvalidRequest]]:
        positions = {given.name: position for position, given in reversed(list(enumerate(inputs)))}
        arrays: dict[str, Array] = {}
        errors: list[InvalidRequest] = []
        for check in self._inputs:
            name = check.spec.name
            position = positions.get(name)
            if position is None:
                errors.append(invalid_request("Missing input with specific name", f"Required input: {name}"))
                continue
            try:
                arrays[name] = check(inputs[position], raws[position] if raws else None)
            except InvalidRequest as error:
                errors.append(error)
        known = {check.spec.name for check in self._inputs}
        if errors or len(inputs) != len(known):
            unknown = (name for name in positions if name not in known)
            errors += [_unknown(name, known) for name in islice(unknown, MAX_ERRORS)]
        return arrays, errors


_T = TypeVar("_T")

_LONG_BYTES: Final = 16 * 1024
"""Strings or encoded images of more bytes are read in a worker thread: an image may have a thousand times as many."""
_MANY_STRINGS: Final = 4096
_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("validation")


async def validated(check: Callable[[InferRequest], _T], request: InferRequest) -> _T:
    """Return ``check(request)``, computed in a worker thread if the request has long strings or images.

    Raises:
        InvalidRequest: the request is invalid.

    Cancellation: while waiting for a thread, not while it reads the request.
    """
    if not _has_long_strings(request):
        return check(request)
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(len(os.sched_getaffinity(0)))
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(check, request, limiter=limiter)


def _has_long_strings(request: InferRequest) -> bool:
    raws = request.raw_inputs
    for position, given in enumerate(request.inputs):
        if given.datatype == BYTES.name and _is_long(given, raws[position] if position < len(raws) else None):
            return True
    return False


def _is_long(given: InferInput, raw: Buffer | None) -> bool:
    if raw is not None:
        return len(raw) > _LONG_BYTES
    values = () if given.contents is None else given.contents.values
    return (
        len(values) > _MANY_STRINGS or sum(len(each) for each in values if isinstance(each, bytes | str)) > _LONG_BYTES
    )


def _unknown(name: str, known: Collection[str]) -> InvalidRequest:
    hint = did_you_mean(name, known, otherwise=f"the inputs are: {', '.join(sorted(known)) or 'none'}")
    return invalid_request("Unexpected input", f"{cut(name, 80)}; {hint}")


def check_content_style(inputs: Sequence[InferInput], raws: Sequence[Buffer | None], counts: str = _COUNTS) -> None:
    """Check that each input has either a raw buffer or values.

    Raises:
        InvalidRequest: the counts differ, or an input has both.
    """
    if len(raws) != len(inputs):
        raise invalid_request(DUPLICATE_CONTENTS, counts.format(expected=len(inputs), actual=len(raws)))
    for given, raw in zip(inputs, raws, strict=True):
        if given.contents is not None and raw is not None:
            raise invalid_request(DUPLICATE_CONTENTS, f"input name: {given.name}")
