"""``inference.GRPCInferenceService``: the repository's index, and loads and unloads by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.kserve.grpc.administration import AdministeredService
from ovmstrio.api.kserve.repository_index import repository_index
from ovmstrio.api.kserve.repository_requests import control_of, load_parameters, unload_parameters
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.encoding.generated import inference as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RepositoryCalls"]


class RepositoryCalls(AdministeredService):
    """The calls of the repository extension; the server has one repository, which has no name."""

    async def repository_index(self, message: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """List every version that the server knows of.  Does not block.

        Raises:
            InvalidRequest: one of several repositories is asked for.
        """
        _check_repository(message.repository_name)
        entries = repository_index(self._plane, only_ready=message.ready)
        return pb.RepositoryIndexResponse(
            [
                pb.RepositoryIndexResponseModelIndex(entry.name, entry.version, entry.state, entry.reason)
                for entry in entries
            ]
        )

    async def repository_model_load(self, message: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load a model.

        Raises:
            PermissionDenied: who asks may not.
            FailedPrecondition: the server follows its configuration.
            InvalidRequest: a parameter is unknown, or one of several repositories is named.
            ModelFailure: it cannot be loaded.

        Cancellation: at once; the load goes on.
        """
        with self._making("load", model=message.model_name):
            _check_repository(message.repository_name)
            config, files = load_parameters(_plain(message.parameters))
            await control_of(self._plane).load(message.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(
        self, message: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model.

        Raises:
            PermissionDenied: who asks may not.
            FailedPrecondition: the server follows its configuration.
            InvalidRequest: a parameter is unknown, or one of several repositories is named.
            NotFound: nothing of that name could be loaded.

        Cancellation: at once; it goes on.
        """
        with self._making("unload", model=message.model_name):
            _check_repository(message.repository_name)
            with_callees = unload_parameters(_plain(message.parameters))
            await control_of(self._plane).unload(message.model_name, with_callees=with_callees)
        return pb.RepositoryModelUnloadResponse()


def _plain(parameters: Mapping[str, pb.ModelRepositoryParameter]) -> dict[str, object]:
    return {
        name: next(
            (each for each in (one.bool_param, one.int64_param, one.string_param, one.bytes_param) if each is not None),
            None,
        )
        for name, one in parameters.items()
    }


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequest(f'repository_name: expected none, as this server has one repository, got "{name}"')
