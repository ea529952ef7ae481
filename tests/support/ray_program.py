"""A Ray cluster of one or two nodes on this machine, in a process of its own, which ends with it.

Its argument is the number of nodes; it writes its address, and then obeys lines: ``kill`` ends the second node
as a loss of power would, ``add`` starts another one, ``nodes`` and ``replicas GROUP`` tell how many there are.  Each is
answered by a line.  Of the resource ``place`` each node has one, and of ``head`` the first one many.  It ends with its
standard input.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_health_check_period_ms": "500"}

_STORE_BYTES = 80_000_000


def main() -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    # Ray prints what becomes of its processes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # It notes there where the last cluster of the machine is.
    (Path(os.environ["RAY_TMPDIR"]) / "ray").mkdir()
    options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": _STORE_BYTES}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**options, "include_dashboard": False, "resources": {"head": 100, "place": 1}},
    )
    seconds = [cluster.add_node(**options, resources={"place": 1}) for _ in range(int(sys.argv[1]) - 1)]
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    try:
        print("address", cluster.address, file=answers, flush=True)
        for line in sys.stdin:
            word, *arguments = line.split()
            if word == "kill":
                cluster.remove_node(seconds.pop(), allow_graceful=False)
                answer = "killed"
            elif word == "add":
                seconds.append(cluster.add_node(**options, resources={"place": 1}))
                answer = "added"
            elif word == "nodes":
                answer = str(sum(bool(node["Alive"]) for node in ray.nodes()))
            else:
                deployment = serve.status().applications["ovms"].deployments[arguments[0]]
                answer = str(deployment.replica_states.get("RUNNING", 0))
            print(answer, file=answers, flush=True)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
