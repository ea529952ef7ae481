"""The graph of Ops; scripts rarely touch it."""

from ovmstrio.ops.graph import OpGraph as DAG  # noqa: N814 - the name that scripts import

__all__ = ["DAG"]
