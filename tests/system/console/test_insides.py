from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.all_kinds import write_all_kinds
from tests.support.served_in_thread import serving_in_thread

NODE = (
    "import time\nfrom pyovms import Tensor\nclass OvmsPythonModel:\n    def execute(self, inputs):\n"
    "        begun = time.process_time()\n        while time.process_time() - begun < 0.2:\n            pass\n"
    "        return [Tensor('out', b'')]\n"
)


def test_a_profile_has_the_processes_of_services_with_their_cpu_time(tmp_path: Path) -> None:
    texts = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
    with serving_in_thread(config_path=write_all_kinds(tmp_path, node=NODE), python_isolation="process") as server:
        pids = server.ask("GET", "/console/api/services/graph").json()["facts"]["processes"]
        with ThreadPoolExecutor(1) as pool:
            profiling = pool.submit(lambda: server.ask("POST", "/v2/profile", json={"seconds": 2, "models": []}))
            while not profiling.done():
                assert server.ask("POST", "/v2/models/graph/infer", json=texts).status_code == 200
        profile = profiling.result().json()
    (process,) = [each for each in profile["processes"] if each["service"] == "graph"]
    assert [process["pid"]] == pids
    assert process["cpu_seconds"] > 0
