"""How long replicas that are replaced have for what they have begun."""

from __future__ import annotations

from ovmstrio.cluster.ray.draining import drain_seconds


def test_callers_outlast_the_groups_that_they_wait_for() -> None:
    """Which have to end and to start anew before they answer, however many groups stand behind one another."""
    model = drain_seconds([])
    caller = drain_seconds([model])
    ingress = drain_seconds([model, caller])
    assert model == 30
    assert caller >= model + 60
    assert ingress >= caller + 60
