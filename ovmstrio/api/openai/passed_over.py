"""Fields that say nothing to this server, but are of a kind: who sends another is told, as by OpenAI's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ovmstrio.api.openai.fields import Fields

__all__ = ["check_passed_over", "check_passed_over_of_responses"]

_TEXTS: Final = ("user", "safety_identifier", "prompt_cache_key", "service_tier", "verbosity")
_OBJECTS: Final = ("metadata", "prediction")
_CUT: Final = "truncation"
_WHOLE: Final = "disabled"


def check_passed_over(fields: Fields) -> None:
    """Look at those of all bodies that make text."""
    for name in _TEXTS:
        fields.text(name)
    for name in _OBJECTS:
        fields.mapping(name)


def check_passed_over_of_responses(fields: Fields) -> None:
    """Look at those that Responses have beside them, of which some would change the answer."""
    fields.mapping("stream_options")
    fields.unsigned("max_tool_calls", least=1)
    for each in fields.items("include") or ():
        if not isinstance(each, str):
            fields.refuse("include", "include contains a non string element")
            break
    cut = fields.text(_CUT)
    if cut not in {None, _WHOLE, "auto"}:
        fields.refuse(_CUT, f"{_CUT} should be either 'auto' or '{_WHOLE}'", got=repr(cut[:40]) if cut else "''")
    if fields.unsigned("top_logprobs"):
        told = "top_logprobs above 0 is not supported: the library tells of the chosen token only; leave it out"
        fields.refuse("top_logprobs", told, code="unsupported_parameter")
