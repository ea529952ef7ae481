"""The attacks by name.  ``python -m tests.attacks.attacks NAME GRPC_PORT REST_PORT`` makes one and says how it went."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.attacks.clients import bodies, calls, floods, readers
from tests.attacks.served import Ports


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        run: makes it, in a process of its own, and says in a few words what came of it.
        options: further options of the server that is attacked.
        graph_keys: further keys of its graphs, by their names.
    """

    run: Callable[[Ports], str]
    options: tuple[str, ...] = ()
    graph_keys: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """What the attacker does, as its docstring says."""
        return (self.run.__doc__ or "").strip().rstrip(".")


ATTACKS: Final[dict[str, Attack]] = {
    "settings": Attack(floods.settings_flood),
    "window_updates": Attack(floods.window_update_flood),
    "long_texts": Attack(calls.long_texts),
    "long_chains": Attack(calls.long_chains),
    "long_outputs": Attack(calls.long_outputs),
    "unread_answers": Attack(readers.unread_answers, ("--stalled_client_seconds", "3")),
    "slow_readers": Attack(readers.slow_readers, ("--stalled_client_seconds", "3")),
    "slow_bodies": Attack(bodies.slow_bodies, ("--request_receive_seconds", "3")),
    "gzip_bombs": Attack(bodies.gzip_bombs),
    "hostile_bodies": Attack(bodies.hostile_bodies),
    "overload": Attack(calls.overload),
    "long_searches": Attack(calls.long_searches, graph_keys={"long_search": {"python_isolation": "process"}}),
}

if __name__ == "__main__":
    print(ATTACKS[sys.argv[1]].run(Ports(*map(int, sys.argv[2:]))))  # noqa: T201 - whoever started this reads it
