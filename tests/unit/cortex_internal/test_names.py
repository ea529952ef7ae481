"""The exceptions and the clients that handlers import."""

from __future__ import annotations

from cortex_internal.lib.client.python import ModelClient
from cortex_internal.lib.client.tensorflow import TensorFlowClient
from cortex_internal.lib.exceptions import CortexException, UserException, UserRuntimeException


def test_the_texts_of_exceptions() -> None:
    """The parts joined by colons, with what the class says around them."""
    assert str(CortexException("a", "b")) == "a: b"
    assert str(UserException("a", "b")) == "error: a: b"
    assert str(UserRuntimeException("model x", "not found")) == "error: model x: not found: runtime exception"


def test_wrapping_puts_parts_before() -> None:
    """And keeps the text."""
    error = UserException("b")
    error.wrap("while loading", "a")
    assert str(error) == "while loading: a: error: b"


def test_a_runtime_exception_is_a_user_exception() -> None:
    """So that handlers catch either."""
    assert issubclass(UserRuntimeException, UserException)
    assert issubclass(UserException, CortexException)


def test_the_clients_have_the_methods_that_handlers_call() -> None:
    """As names to annotate with."""
    assert ModelClient.__abstractmethods__ == {"get_model", "set_load_method", "metadata", "caching"}
    assert TensorFlowClient.__abstractmethods__ == {"predict"}
