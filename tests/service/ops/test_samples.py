from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ovmstrio.samples
from ovmstrio.samples.calling import call
from ovmstrio.samples.ops_diamond import client as diamond
from ovmstrio.samples.ops_regression import client as regression
from tests.support.served_in_thread import ServedInThread, serving_in_thread

SAMPLES = Path(ovmstrio.samples.__file__).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve both samples; ``petal`` runs its Op in processes."""
    folder = tmp_path_factory.mktemp("samples")
    entries = []
    for name, sample in (("petal", "ops_regression"), ("diamond", "ops_diamond")):
        shutil.copytree(SAMPLES / sample, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        entries.append({"name": name, "path": name})
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": [], "op_pipeline_config_list": entries}))
    with serving_in_thread(config_path=config) as running:
        yield running


def test_the_regression_sample_in_processes(server: ServedInThread) -> None:
    url, sizes = f"http://{server.http}", [each for each, _ in regression.FLOWERS]
    assert regression.widths(url, sizes) == pytest.approx([0.2162, 1.4848, 2.3338], abs=1e-3)
    assert regression.widths(url, sizes[:1]) == pytest.approx([0.2162], abs=1e-3)
    with pytest.raises(SystemExit, match=r"error 10000: .*could not convert string to float"):
        call(f"{url}/petal/prediction", {"x": "5.1,3.5,long"})
    with pytest.raises(SystemExit, match=r"error 5000: .*feed shapes do not match"):
        regression.widths(url, [(1.0, 2.0)])
    assert regression.widths(url, sizes[1:2]) == pytest.approx([1.4848], abs=1e-3)


def test_the_diamond_sample_in_batches(server: ServedInThread) -> None:
    url, sizes = f"http://{server.http}", [regression.FLOWERS[number % 3][0] for number in range(48)]
    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(lambda each: diamond.estimate(url, each), sizes))
    metrics = server.ask("GET", "/metrics").text
    np.testing.assert_allclose(answers[:3], [(0.2176, 0.0028), (1.5378, 0.1062), (2.2327, 0.2023)], atol=2e-3)
    assert answers == answers[:3] * 16
    for op in ("all_sizes", "petal_only"):
        (batches,) = re.findall(rf'ovmstrio_op_batch_size_count{{[^}}]*op="{op}"[^}}]*}} (\S+)', metrics)
        assert 3 <= float(batches) < 48
