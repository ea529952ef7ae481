"""Memory of freed tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource
import numpy as np
from ovmstrio.server.freed_memory import keep_freed_memory

def pages(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        tensors = [np.ones(2**20, np.float32) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages(3)
given_back = pages(10)
assert keep_freed_memory()
pages(3)
print(given_back, pages(10))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_tensors_are_put_where_others_were() -> None:
    """The kernel has to find hardly any new pages for them, as it had to before."""
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    given_back, kept = map(int, ran.stdout.split())
    assert kept < given_back / 100
