"""Number of examples of a Hypothesis property, relative to the profile's."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100


def examples(count: int) -> int:
    """Return ``count`` with --thorough, and otherwise the same share of ``count`` as other properties get of 100."""
    return max(1, count * settings.get_profile(settings.get_current_profile_name()).max_examples // _USUAL)
