from __future__ import annotations

import pytest
from grpclib.const import Status

from ovmstrio.core import errors
from ovmstrio.wire.statuses import STATUS_OF, map_error, status_of


def _subclasses(cls: type[errors.ServerError]) -> set[type[errors.ServerError]]:
    return {cls}.union(*(_subclasses(child) for child in cls.__subclasses__()))


def test_every_error_class_has_statuses() -> None:
    defined = {cls for cls in _subclasses(errors.ServerError) if cls.__module__ == errors.__name__}
    assert defined == set(STATUS_OF)


@pytest.mark.parametrize(("cls", "row"), STATUS_OF.items())
def test_statuses_are_failures(cls: type[errors.ServerError], row: tuple[Status, int]) -> None:
    grpc, http = row
    assert grpc is not Status.OK
    assert 400 <= http < 600 or (cls, http) == (errors.NothingToGather, 204)


@pytest.mark.parametrize(
    ("error", "grpc", "http"),
    [
        (errors.InvalidRequest("why"), Status.INVALID_ARGUMENT, 400),
        (errors.NotFound("why"), Status.NOT_FOUND, 404),
        (errors.VersionLoading("why"), Status.UNAVAILABLE, 404),
        (errors.Overloaded("why"), Status.RESOURCE_EXHAUSTED, 429),
        (errors.MalformedPayload("why"), Status.INVALID_ARGUMENT, 400),
        (errors.UserCodeError("why"), Status.INTERNAL, 500),
        (errors.TooManyRequests("why"), Status.UNAVAILABLE, 503),
        (errors.QueueTimeout(1.5), Status.UNAVAILABLE, 503),
        (errors.ServiceLoading("why"), Status.UNAVAILABLE, 503),
        (errors.StorageFailure("why"), Status.UNAVAILABLE, 503),
    ],
)
def test_errors_are_mapped_to_their_statuses_with_their_text(
    error: errors.ServerError, grpc: Status, http: int
) -> None:
    mapped = map_error(error)
    assert mapped is not None
    assert (mapped.status, mapped.message, status_of(error)) == (grpc, str(error), (grpc, http))


def test_unexpected_errors_are_not_mapped() -> None:
    assert map_error(ValueError("secret")) is None


def test_a_derived_error_has_the_statuses_of_its_base() -> None:
    class Special(errors.VersionRetired):
        pass

    assert status_of(Special("gone")) == (Status.NOT_FOUND, 404)
