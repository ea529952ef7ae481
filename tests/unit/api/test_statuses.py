"""The table of statuses."""

from __future__ import annotations

import pytest
from grpclib.const import Status

from ovmstrio.core import errors
from ovmstrio.wire.statuses import STATUS_OF, status_of


def _subclasses(cls: type[errors.ServerError]) -> set[type[errors.ServerError]]:
    return {cls}.union(*(_subclasses(child) for child in cls.__subclasses__()))


def test_every_error_has_statuses() -> None:
    """The table is total over the classes that ``errors`` defines."""
    defined = {cls for cls in _subclasses(errors.ServerError) if cls.__module__ == errors.__name__}
    assert defined == set(STATUS_OF)


@pytest.mark.parametrize(("cls", "row"), STATUS_OF.items())
def test_statuses_are_failures(cls: type[errors.ServerError], row: tuple[Status, int]) -> None:
    """No error is reported as success on either wire, but for OVMS's 204: there was nothing to answer with."""
    grpc, http = row
    assert grpc is not Status.OK
    assert 400 <= http < 600 or (cls, http) == (errors.NothingToGather, 204)


@pytest.mark.parametrize(
    ("cls", "grpc", "http"),
    [
        (errors.MalformedPayload, Status.INVALID_ARGUMENT, 400),
        (errors.UserCodeError, Status.INTERNAL, 500),
        (errors.TooManyRequests, Status.UNAVAILABLE, 503),
        (errors.QueueTimeout, Status.UNAVAILABLE, 503),
        (errors.ServiceLoading, Status.UNAVAILABLE, 503),
        (errors.StorageFailure, Status.UNAVAILABLE, 503),
    ],
)
def test_errors_of_handlers_have_the_statuses_of_nucleus(
    cls: type[errors.ServerError], grpc: Status, http: int
) -> None:
    """What may pass is unavailable; the caller's mistake and the handler's are told apart."""
    assert STATUS_OF[cls] == (grpc, http)


def test_a_derived_error_has_the_statuses_of_its_nearest_ancestor() -> None:
    """Code outside the tree may derive from a class and is reported as that class."""

    class Special(errors.VersionRetired):
        """Derived by somebody."""

    assert status_of(Special("gone")) == (Status.NOT_FOUND, 404)
