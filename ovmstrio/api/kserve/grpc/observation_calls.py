"""``inference.GRPCInferenceService``: settings of traces and logs, of which this server has no such ones."""

from __future__ import annotations

from ovmstrio.api.kserve.grpc.administration import AdministeredService
from ovmstrio.api.kserve.observation_settings import TRACE_SETTINGS, check_trace_settings, refuse_log_settings
from ovmstrio.protocol.generated import inference as pb

__all__ = ["ObservationCalls"]


class ObservationCalls(AdministeredService):
    """The calls of the extensions for traces and logs."""

    async def trace_setting(self, message: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Tell that there are no traces.  Does not block.

        Raises:
            NotSupported: they are to be turned on.
        """
        if message.settings:
            levels = [level for each in message.settings.values() for level in each.value]
            check_trace_settings(list(message.settings), levels)
        return pb.TraceSettingResponse(
            {name: pb.TraceSettingResponseSettingValue(value) for name, value in TRACE_SETTINGS.items()}
        )

    async def log_settings(self, _: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Refuse.

        Raises:
            NotSupported: always.
        """
        refuse_log_settings()
        return pb.LogSettingsResponse()
