"""Graph of Ops, under the name ``DAG``."""

from ovmstrio.ops.graph import OpGraph as DAG  # noqa: N814 - the name that scripts import

__all__ = ["DAG"]
