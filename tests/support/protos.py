"""Protobuf files of users, as the tests of handlers need them."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Final

FOUR_KINDS: Final = """
    syntax = "proto3";
    package {package};

    service Kinds {{
      rpc Alpha (Sample) returns (Sample);
      rpc Beta (stream Sample) returns (Sample);
      rpc Gamma (Sample) returns (stream Sample);
      rpc Delta (stream Sample) returns (stream Sample);
    }}

    message Sample {{
      string text = 1;
      int64 number = 2;
      bytes data = 3;
    }}
"""
"""A service with one method of each kind, in a package of any name."""

PRIMES: Final = """
    syntax = "proto3";
    package prime_generator;

    service Generator {
      rpc Predict (Input) returns (stream Output);
    }

    message Input {
      int64 prime_numbers_to_generate = 1;
    }

    message Output {
      int64 prime_number = 1;
    }
"""
"""A service that streams as many prime numbers as it is asked for."""


def written(folder: Path, name: str, text: str) -> Path:
    """Write a file, indented as in the source of a test, and give its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path
