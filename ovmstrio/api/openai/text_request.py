"""The fields that bodies of chat and completions have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ovmstrio.api.openai.passed_over import check_passed_over
from ovmstrio.api.openai.response_format import read_response_format
from ovmstrio.api.openai.sampling import read_number_of_texts, read_sampling, read_stop, refuse_unserved
from ovmstrio.core.generation import GenerationRequest

if TYPE_CHECKING:
    from ovmstrio.api.openai.fields import Fields
    from ovmstrio.core.generation import GenerationLimits, Prompt

__all__ = ["StreamOptions", "make_request", "read_stream_options"]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream tells beside its text: an account of tokens behind it, or with each piece."""

    tells_usage: bool = False
    counts_on: bool = False


def read_stream_options(fields: Fields, *, is_stream: bool) -> StreamOptions:
    """Read what a stream tells; other servers' ``continuous_usage_stats`` is known."""
    if fields.get("stream_options") is None:
        return StreamOptions()
    if not is_stream:
        fields.refuse("stream_options", "stream_options provided, but stream not set to true")
        return StreamOptions()
    options = fields.within("stream_options")
    if options is None:
        return StreamOptions()
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    unknown = sorted(options.names() - known)
    if unknown:
        told = "Found unexpected stream options. Properties accepted in stream_options: include_usage"
        fields.refuse("stream_options", told, got=", ".join(name[:40] for name in unknown[:4]))
    tells_usage = options.flag("include_usage", "stream_options.include_usage is not a boolean")
    return StreamOptions(bool(tells_usage), bool(tells_usage and options.flag("continuous_usage_stats")))


def make_request(
    fields: Fields,
    limits: GenerationLimits,
    prompt: Prompt,
    *,
    max_tokens: int | None,
    is_stream: bool,
    logprobs: bool,
    echo: bool = False,
    deadline: float,
) -> GenerationRequest:
    """Make the request for one prompt of the fields that all bodies have; what is wrong with them is noted."""
    sampling = read_sampling(fields, limits, max_tokens=max_tokens, is_stream=is_stream)
    keeps_special = fields.flag("skip_special_tokens") is False
    request = GenerationRequest(
        prompt,
        sampling,
        stop=read_stop(fields),
        keeps_stop=bool(fields.flag("include_stop_str_in_output")),
        n=read_number_of_texts(fields, limits, sampling.best_of),
        logprobs=logprobs,
        echo=echo,
        grammar=read_response_format(fields),
        skips_special_tokens=not keeps_special,
        # Without the marks of special tokens there is nothing to find calls and reasoning by.
        parses=not keeps_special,
        deadline=deadline,
    )
    refuse_unserved(fields)
    check_passed_over(fields)
    return request
