"""What the server's time goes to, for administrators: ``POST /v2/profile``.

The body may have ``seconds`` (5), ``rate`` (samples a second, 100) and ``models`` (names of those whose layers are
timed; by default the ones that were called meanwhile, and with an empty list none).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.admin.profile_documents import profile_document
from ovmstrio.api.admin.whole_profile import WholeProfile
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.texts import cut
from ovmstrio.dataplane.profiling import Profiler
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.api.admin.changes import Changes
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.router import Rule

__all__ = ["profile_rules"]

_DEFAULTS: Final[dict[str, Any]] = {"seconds": 5, "rate": 100, "models": None}


def profile_rules(
    plane: DataPlane, changes: Changes, read_document: Callable[[bytes], Awaitable[dict[str, Any]]]
) -> list[Rule]:
    """Make the rule; a profile shows paths and names of code, and costs what it takes, so that it counts as a change.

    Args:
        plane: whose calls are looked at.
        changes: says who may, and logs who did.
        read_document: reads a body.
    """
    profiler = Profiler(plane)
    whole = None if plane.siblings is None else WholeProfile(profiler, plane.siblings)

    async def profile(request: HttpRequest) -> HttpAnswer:
        with changes.requested("profile", request):
            asked = _asked(await read_document(request.body) if request.body else {})
            if whole is not None:
                return json_answer(await whole.take(**asked))
            return json_answer(profile_document(await profiler.take(**asked)))

    return [rule("/v2/profile", "POST", profile)]


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    """Read what is asked for.

    Raises:
        InvalidRequest: something else is there, or of another type.
    """
    if unknown := given.keys() - _DEFAULTS.keys():
        raise InvalidRequest(
            f"profile: {cut(', '.join(sorted(unknown)), 200)} not known, expected {', '.join(_DEFAULTS)}"
        )
    asked = _DEFAULTS | given
    for name in ("seconds", "rate"):
        if isinstance(asked[name], bool) or not isinstance(asked[name], int | float):
            raise InvalidRequest(f"{name}: expected a number")
        try:
            asked[name] = float(asked[name])
        except OverflowError:
            raise InvalidRequest(f"{name}: expected a number that is not so large") from None
    models = asked["models"]
    if models is not None and not (isinstance(models, list) and all(isinstance(name, str) for name in models)):
        raise InvalidRequest("models: expected a list of names")
    return asked
