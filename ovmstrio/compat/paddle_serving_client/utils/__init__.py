"""Tools of load scripts: their arguments, concurrent calls and latencies."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from itertools import chain
from multiprocessing import Pool
from typing import Any

import numpy as np

__all__ = ["MultiThreadRunner", "benchmark_args", "show_latency"]


def benchmark_args() -> Namespace:
    """Parse the command line: ``thread``, ``model``, ``endpoint``, ``request`` and ``batch_size``."""
    parser = ArgumentParser("benchmark")
    parser.add_argument("--thread", type=int, default=10, help="number of concurrent callers")
    parser.add_argument("--model", default="", help="model to evaluate")
    parser.add_argument("--endpoint", default="127.0.0.1:9292", help="address of the server")
    parser.add_argument("--request", default="rpc", help="protocol")
    parser.add_argument("--batch_size", type=int, default=1, help="samples per request")
    return parser.parse_args()


def show_latency(latency_list: Iterable[float]) -> None:
    """Write mean, median and percentiles of milliseconds to standard error."""
    times = np.asarray(list(latency_list), np.float64)
    figures = {"mean": times.mean(), "median": np.median(times)}
    figures |= {f"{share}_percent": np.percentile(times, share) for share in (80, 90, 99)}
    lines = [f"{name}: {float(value)}ms\n" for name, value in figures.items()]
    sys.stderr.write("".join(["latency:\n", *lines]))


class MultiThreadRunner:
    """Runner of a function in several processes at once."""

    def run(self, thread_func: Callable[[int, Any], Any], thread_num: int, global_resource: Any) -> list[list[Any]]:
        """Call the function once in each process, with a number from 1 and the resource.

        Returns the lists that the calls return, joined by position; requests of the calls use no proxy.
        """
        os.environ.update(http_proxy="", https_proxy="")
        with Pool(thread_num) as pool:
            arguments = [(number, global_resource) for number in range(1, thread_num + 1)]
            results = pool.starmap(thread_func, arguments, chunksize=1)
        returned = [lists for lists in results if lists is not None]
        return [list(chain.from_iterable(parts)) for parts in zip(*returned, strict=True)]
