"""``inference.GRPCInferenceService``: settings of traces and logs."""

from __future__ import annotations

from ovmstrio.api.kserve.grpc.administration import AdministeredService
from ovmstrio.api.kserve.observation_settings import (
    TRACE_SETTINGS,
    change_log_settings,
    check_trace_settings,
    log_settings,
)
from ovmstrio.encoding.generated import inference as pb

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

    async def log_settings(self, message: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Change what is logged, as far as the message says anything of it, and tell what is.  Does not block.

        Raises:
            PermissionDenied: it is to be changed, and who asks may not.
            FailedPrecondition: the log is that of the program which the server is a part of.
            InvalidRequest: a setting is unknown or of another type, or two contradict each other.
            NotSupported: a setting is chosen when the server starts.
        """
        if message.settings:
            settings = {name: _plain(value) for name, value in message.settings.items()}
            with self._making("log settings", settings=settings):
                change_log_settings(settings)
        return pb.LogSettingsResponse({name: _setting(value) for name, value in log_settings().items()})


def _plain(value: pb.LogSettingsRequestSettingValue) -> object:
    choices = (value.bool_param, value.uint32_param, value.string_param)
    return next((each for each in choices if each is not None), None)


def _setting(value: bool | int | str) -> pb.LogSettingsResponseSettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponseSettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponseSettingValue(uint32_param=value)
    return pb.LogSettingsResponseSettingValue(string_param=value)
