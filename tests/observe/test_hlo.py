"""The text of a compiled program is read into instructions and shapes."""

import pytest

from jaxpp.observe.hlo import parse_shape


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0}", 30),
        ("f64[2]{0:T(256)}", 16),
        ("(f16[3]{0}, (c64[2], pred[7]{0}), token[])", 6 + 16 + 7),
        ("u8[0,4]{1,0}", 0),
        ("s4[5]{0}", 5),
        ("s4[5]{0:E(4)}", 3),
        ("f8e4m3fn[6]{0}", 6),
        ("s64[<=4]{0}", 32),
    ],
)
def test_bytes_of_a_shape_are_those_of_its_arrays(text, num_bytes):
    assert parse_shape(text).num_bytes == num_bytes


def test_tuples_are_flattened_and_an_array_prints_as_hlo_writes_it():
    shape = parse_shape("(f32[], (bf16[16,4]{1,0:S(5)}, pred[7]{0})) tuple(%a)")
    assert [str(array) for array in shape.arrays] == ["f32[]", "bf16[16,4]", "pred[7]"]
    assert [array.on_host for array in shape.arrays] == [False, True, False]
    assert (shape.size, shape.num_bytes, shape.on_host) == (1 + 64 + 7, 4 + 128 + 7, True)
