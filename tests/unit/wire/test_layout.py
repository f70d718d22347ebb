"""The layout of tensors in shared memory, which the stub and the runtime compute alike."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.tensors import _TYPES
from rsrv.wire.layout import (
    ALIGNMENT,
    ITEMSIZE,
    NUMPY,
    Block,
    Interface,
    Tensor,
    Variant,
    aligned,
    pack_flat,
)
from rsrv_bundle import dtypes

X = Tensor("x", "f32", (-1, 3), 0)
MASK = Tensor("mask", "bool", (5, -1), 1)
SCALAR = Tensor("s", "i64", (), None)


def test_tensors_follow_each_other_aligned() -> None:
    """Tensors of a block are placed one after another, each at a multiple of 64 bytes. Here, the block has two rows."""
    assert Block((X, MASK, SCALAR)).places[2] == ((0, 64, 128), ((2, 3), (5, 2), ()), 192)


def test_the_batch_axis_may_be_anywhere() -> None:
    """The batch axis, which is -1 in a shape, may be any axis. A tensor without a batch axis has the same shape for all rows."""
    assert (X.shape(7), MASK.shape(7), SCALAR.shape(7)) == ((7, 3), (5, 7), ())


@given(st.integers(0, 10_000))
def test_blocks_hold_their_tensors(rows: int) -> None:
    """For any number of rows, the offsets are aligned and in order, and no tensor reaches the next one."""
    block = Block((X, MASK, SCALAR))
    offsets, _, total = block.places[rows]
    for tensor, start, end in zip(block.tensors, offsets, (*offsets[1:], total), strict=True):
        assert start % ALIGNMENT == 0
        assert start + tensor.nbytes(rows) <= end


def test_an_interface_survives_its_json() -> None:
    """The stub reads the same interface that the runtime sends at registration."""
    interface = Interface((Variant(Block((X, SCALAR)), Block((MASK,)), (1, 4)),), exact=True)

    assert Interface.from_json(interface.to_json()) == interface


def test_the_protocols_dtypes_are_the_bundles() -> None:
    """The protocol's own table of dtypes agrees with the table of the bundle format.

    The protocol has its own, so that a stub need not import the bundle format.
    """
    assert set(ITEMSIZE) == set(NUMPY) == set(dtypes.TOKENS)
    assert {token: dtypes.itemsize(token) for token in dtypes.TOKENS} == ITEMSIZE
    plain = [token for token in dtypes.TOKENS if token != "bf16" and not token.startswith("f8")]
    assert {token: dtypes.numpy_dtype(token).name for token in plain} == {
        token: NUMPY[token] for token in plain
    }


def test_every_dtype_that_clients_can_send_has_a_capsule_type() -> None:
    """Each dtype that clients can send has a DLPack code with the right width."""
    sendable = {token for token in dtypes.TOKENS if dtypes.kserve_name(token)}

    assert set(_TYPES) == sendable
    assert all(bits == 8 * ITEMSIZE[token] for token, (_, bits) in _TYPES.items())


def test_the_flat_form_has_every_number_and_name() -> None:
    """The flat form has exactly the bytes that docs/protocol.md describes and the native front reads."""
    interface = Interface((Variant(Block((X,)), Block((MASK,)), (1, 4)),), exact=True)
    client = {"inputs": [("x", "f32", (-1, 3))], "outputs": [("mask", "bool", (5, -1))]}

    x = b"\1\0\0\0x" + struct.pack("<BBhhqq", 11, 2, -1, -1, -1, 3)
    mask = b"\4\0\0\0mask" + struct.pack("<BBhhqq", 0, 2, -1, -1, 5, -1)
    variant = (
        struct.pack("<III", 2, 1, 4) + x.replace(b"\xff\xff", b"\0\0", 1) + mask[:10] + b"\1\0" + mask[12:]
    )
    numbers = {"slot": 7, "cost_ns": 9, "retry_ns": 11}
    assert pack_flat(client, interface, batched=True, traced=True, key="a@1", **numbers) == (
        b"FLAT" + struct.pack("<IIIIIQQ", 7, 1, 1, 1, 7, 9, 11) + b"\3\0\0\0a@1" + x + mask + variant
    )


def test_a_request_of_a_padded_axis_has_the_tensors_of_its_own_length() -> None:
    """A request takes the shortest variant that is long enough, and its tensors have the request's own length.

    If the length is exactly that of a variant, the variant itself is returned.
    """
    short, long = (
        Variant(
            Block((Tensor("x", "f32", (-1, length, 3), 0, 1),)),
            Block((Tensor("y", "f32", (-1,), 0),)),
            (1, 4),
        )
        for length in (4, 9)
    )
    interface = Interface.from_json(Interface((short, long), exact=False).to_json())

    index, variant = interface.at_length(5)
    assert (index, variant.length, variant.inputs.tensors[0].dims) == (1, 5, (-1, 5, 3))
    assert variant.inputs.places[2].nbytes == aligned(2 * 5 * 3 * 4)
    assert interface.at_length(4) == (0, interface.variants[0])
    assert interface.at_length(4)[1] is interface.variants[0]
    assert (interface.longest, Interface((Variant(Block((X,)), Block(()), (1,)),), exact=True).longest) == (
        9,
        0,
    )
    assert b"\0\0\1\0" in pack_flat({"inputs": [], "outputs": []}, interface, batched=True)


def test_a_type_that_no_client_can_send_has_no_flat_form() -> None:
    """An interface with a dtype that no client can send has no flat form.

    The model needs hooks for such a dtype, so the native front, which reads the flat form, cannot serve it.
    """
    interface = Interface((Variant(Block((Tensor("x", "f8_e4m3", (), None),)), Block(()), (1,)),), exact=True)

    with pytest.raises(ValueError, match="not in tuple"):
        pack_flat({"inputs": [], "outputs": []}, interface, batched=False)
