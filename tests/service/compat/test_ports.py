from __future__ import annotations

from paddle_serving_server.pipeline.util import AvailablePortGenerator, GetAvailablePortGenerator
from tests.support.ports import free_ports


def test_generated_ports_are_free_and_different() -> None:
    """From the first port on; the generator of the module is one object."""
    (start,) = free_ports(1)
    ports = AvailablePortGenerator(start)
    first, second = ports.next(), ports.next()
    assert start <= first < second
    assert AvailablePortGenerator.port_is_available(first)
    assert GetAvailablePortGenerator() is GetAvailablePortGenerator()
