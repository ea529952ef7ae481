from __future__ import annotations

import pytest

from ovmstrio.api.tensorflow.tensorflow_types import BY_DATATYPE, BY_NUMBER, TensorFlowType
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.protocol.descriptors import POOL


def test_every_datatype_has_its_type_and_number() -> None:
    """The table agrees with the enumeration that clients know, and leaves out nothing that a servable can have."""
    numbers = POOL.FindEnumTypeByName("tensorflow.DataType").values_by_number
    assert {number: row.name for number, row in BY_NUMBER.items()} == {n: numbers[n].name for n in BY_NUMBER}
    assert set(BY_DATATYPE) == set(BY_NAME)


@pytest.mark.parametrize("row", BY_NUMBER.values(), ids=lambda row: row.name)
def test_every_field_for_values_is_a_repeated_one(row: TensorFlowType) -> None:
    """The field exists, and what protobuf packs as numpy does is of fixed size."""
    field = POOL.FindMessageTypeByName("tensorflow.TensorProto").fields_by_name[row.values_field]
    assert field.is_repeated
    assert row.packed == (field.cpp_type in {field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE, field.CPPTYPE_BOOL})
