"""Which versions of models are kept where only the highest few are wanted: a policy without a clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ovmstrio.config.specs import LatestVersions
from ovmstrio.repository.versions import choose_versions
from ovmstrio.runtimes.handlers.models.tree import ModelKey, versions_by_model

__all__ = ["keep_latest"]


def keep_latest(
    keys: Iterable[ModelKey], count: int, *, broken: Collection[ModelKey], loaded: Collection[ModelKey]
) -> frozenset[ModelKey]:
    """Choose the highest versions of each model, so many of them that are good as far as is known.

    Args:
        keys: what there is.
        count: how many of a model are wanted.
        broken: those that could not be loaded, which take nobody's place.
        loaded: those that could; the highest of them stays until a higher one has shown that it can be loaded too.
    """
    policy = LatestVersions(num_versions=count)
    kept: set[ModelKey] = set()
    for ordered in versions_by_model(keys).values():
        # Versions may have more digits than a number, so that the policy is told their ranks.
        ranked = dict(enumerate(reversed(ordered)))
        _, wanted = choose_versions(policy, ranked, [rank for rank, key in ranked.items() if key in broken])
        kept.update(ranked[rank] for rank in wanted)
        kept.update([key for key in ordered if key in loaded][:1])
    return frozenset(kept)
