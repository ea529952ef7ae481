from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings

from tests.support.examples import examples
from tests.support.pipelines import call, serving_pipeline, write_library
from tests.unit.pipelines.random_pipelines import Case, cases


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_library(tmp_path_factory.mktemp("library"))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_pipelines_compute_what_numpy_computes(case: Case, library: Path) -> None:

    async def main() -> None:
        async with serving_pipeline(case.spec(library)) as pipeline:
            for _ in range(2):
                found = await call(pipeline, **case.inputs)
                assert found.keys() == case.expected.keys()
                for name, array in case.expected.items():
                    np.testing.assert_array_equal(found[name], array, err_msg=name)
            declared = {spec.name: spec.shape for spec in pipeline.metadata.outputs}
            for name, array in case.expected.items():
                assert len(declared[name]) == array.ndim
                assert all(dim.accepts(size) for dim, size in zip(declared[name], array.shape, strict=True))

    trio.run(main)
