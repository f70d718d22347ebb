"""config.pbtxt for the layout of a bundle: its dims and its max_batch_size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from rsrv_bundle import Bundle, GenerateSpec, StateSpec, TensorSpec, dtypes
from rsrv_bundle.spec import StateTensor, TaskSpec
from rsrv_gen.config import (
    CANDIDATES,
    EXECUTE_BYTES,
    EXECUTE_ROWS,
    MARK,
    MOST_STEPS,
    ConfigError,
    RowLimits,
    max_batch_size,
    render,
    row_bytes,
)
from tests.unit.gen.bundles_for_tests import bundle, meta_bundle, spec


def rendered(of: Bundle, *, guarded: bool = True) -> Any:
    """Return the configuration as Triton parses it."""
    return text_format.Parse(render(of, guarded=guarded).decode(), ModelConfig())


def test_a_batch_axis_in_front_everywhere_lets_triton_batch() -> None:
    """The dims have no batch axis, plain dynamic batching is on, and the guard gets the number of axes."""
    inputs = [spec("x", "nchw", c=3, h=4, w=5), spec("mask", "n")]
    config = rendered(bundle(inputs, [spec("y", "nc", "i64", c=7)]))
    assert config.name == "toy"
    assert config.backend == "python"
    assert config.max_batch_size == EXECUTE_ROWS
    assert list(config.input[0].dims) == [3, 4, 5]
    assert config.output[0].data_type == ModelConfig().output.add(data_type="TYPE_INT64").data_type
    assert config.HasField("dynamic_batching")
    assert not config.dynamic_batching.ListFields()
    assert config.parameters["rsrv_axes"].string_value == "6"  # [n, 3, 4, 5] and [n, 1]


def test_without_its_guard_no_model_is_batched_by_triton() -> None:
    """Without the guard, the layout is the same, but Triton sends each request alone.

    So no request makes another one fail.
    """
    config = rendered(bundle([spec("x", "nc", c=3)], [spec("y", "nc", c=7)]), guarded=False)
    assert config.max_batch_size > 0
    assert not config.HasField("dynamic_batching")
    assert not config.parameters


def test_strings_are_tensors_of_triton() -> None:
    """A tensor with one string per row has an axis of size one, which Triton needs."""
    config = rendered(bundle([spec("x", "n")], [spec("y", "n")], client_inputs=[spec("text", "n", "bytes")]))
    assert (config.input[0].data_type, list(config.input[0].dims)) == (DataType.TYPE_STRING, [1])


def test_the_stub_is_given_no_gpu() -> None:
    """A model has one instance of the kind CPU, so it loads even without a GPU."""
    (group,) = rendered(bundle([spec("x", "n")], [spec("y", "n")])).instance_group
    assert (group.kind, group.count) == (group.KIND_CPU, 1)


def test_a_tensor_with_only_the_batch_axis_gets_one_element_a_row() -> None:
    """A tensor with only the batch axis is sent as [N, 1], because Triton has no empty dims."""
    config = rendered(bundle([spec("x", "n")], [spec("y", "nc", c=2)]))
    assert list(config.input[0].dims) == [1]
    assert config.max_batch_size > 0


@pytest.mark.parametrize(
    ("inputs", "dims"),
    [
        pytest.param([spec("x", "cn", c=3)], [[3, -1]], id="batch axis last"),
        pytest.param([spec("x", "cd", c=3, d=2)], [[3, 2]], id="no batch axis"),
        pytest.param([spec("x", "nc", c=3), spec("t", "c", c=3)], [[-1, 3], [3]], id="not in every input"),
        pytest.param([spec("x", "nc", c=3), spec("t", "")], [[-1, 3], [1]], id="a scalar beside it"),
        pytest.param([spec("x", "ch", c=3)], [[3, -1]], id="variable axis"),
    ],
)
def test_any_other_place_of_the_batch_axis_leaves_batching_to_the_runtime(
    inputs: list[TensorSpec], dims: list[list[int]]
) -> None:
    """If the batch axis is not in front, Triton does not batch. The dims have all axes, with -1 for variable sizes."""
    config = rendered(bundle(inputs, [spec("y", "nc", c=2)], input_shapes=[(5,)]))
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert [list(tensor.dims) for tensor in config.input] == dims
    assert list(config.output[0].dims) == [-1, 2]


def test_what_clients_send_decides_and_not_what_the_modules_take() -> None:
    """With client specs, the configuration describes the clients' tensors, and not the modules'."""
    config = rendered(
        bundle(
            [spec("x", "cn", c=3)],
            [spec("y", "nc", c=2)],
            client_inputs=[spec("image", "nhw", "u8", h=8, w=8)],
        )
    )
    assert [tensor.name for tensor in config.input] == ["image"]
    assert config.max_batch_size > 0


@pytest.mark.parametrize(
    ("elements", "limits", "rows"),
    [
        pytest.param(1, RowLimits(), EXECUTE_ROWS, id="small rows stop at the limit in rows"),
        pytest.param(2**20 - 1, RowLimits(), 16, id="larger rows stop at the limit in bytes"),
        pytest.param(2**26, RowLimits(), 8, id="a full execution is always possible"),
        pytest.param(2**26, RowLimits(execution=4), 4, id="executions are smaller than the largest size"),
        pytest.param(1, RowLimits(execution=4, request=5000), 5000, id="an operator allows more"),
        pytest.param(1, RowLimits(request=3), 3, id="an operator allows less than the largest size"),
    ],
)
def test_a_request_may_have_more_rows_than_an_execution(elements: int, limits: RowLimits, rows: int) -> None:
    """The largest number of rows of a request follows from the size of a row, unless an operator sets it."""
    assert max_batch_size(bundle([spec("x", "nc", c=elements)], [spec("y", "n")]), limits=limits) == rows


def test_small_shared_memory_means_fewer_rows() -> None:
    """The inputs and outputs of a request fit the given shared memory, but the rows of a full execution are always allowed."""
    of = bundle([spec("x", "nc", c=2**10 - 1)], [spec("y", "n")])
    assert [max_batch_size(of, room=room) for room in (2**20, 2**16, 1)] == [256, 16, 8]


@pytest.mark.parametrize("sizes", [(1,), (1, 8), (4096,)])
def test_a_model_with_a_tensor_without_rows_takes_no_more_rows_than_an_execution(
    sizes: tuple[int, ...],
) -> None:
    """Requests of a model with a tensor without rows cannot be split, so max_batch_size is the largest compiled size."""
    of = bundle(
        [spec("x", "nc", c=1), spec("t", "")],
        [spec("y", "n")],
        sizes=sizes,
        client_inputs=[spec("x", "nc", c=1)],
    )
    assert max_batch_size(of) == max(sizes)
    assert max_batch_size(of, limits=RowLimits(request=5000)) == max(sizes)


@pytest.mark.parametrize(("elements", "rows"), [(1, EXECUTE_ROWS), (2**20 - 1, 16), (2**26, 1)])
def test_a_module_that_hides_its_size_is_limited_by_bytes(elements: int, rows: int) -> None:
    """The file name model.mlir does not show the batch size, and the generator does not read modules.

    So only the limit in bytes applies.
    """
    made = bundle([spec("x", "nc", c=elements)], [spec("y", "n")], sizes=())
    assert max_batch_size(replace(made, modules={(0, 0): Path("model.mlir")})) == rows


@pytest.mark.parametrize(
    ("elements", "sizes", "rows"),
    [
        pytest.param(25, (1, 8), EXECUTE_ROWS, id="small rows stop at the limit in rows"),
        pytest.param(2**22, (1, 8), 8, id="large rows still allow a full batch of a callee"),
        pytest.param(2**22, (), 3, id="no callee, so the limit in bytes"),
        pytest.param(2**25, (), 1, id="one row always fits"),
        pytest.param(-1, (), EXECUTE_ROWS, id="rows have no known size"),
    ],
)
def test_a_meta_model_takes_the_rows_that_its_callees_take(
    elements: int, sizes: tuple[int, ...], rows: int
) -> None:
    """A meta model takes as many rows as fit the limit in bytes, but at least its callees' largest size."""
    meta = meta_bundle([spec("x", "nc", c=elements)], [spec("y", "n")])
    callees = [bundle([spec("x", "nc", c=2)], [spec("y", "n")], sizes=sizes), bundle([], [], sizes=())]
    assert max_batch_size(meta, callees) == rows


def test_a_meta_model_without_a_batch_axis_is_not_batched() -> None:
    """A meta model is batched only if every tensor of its clients has the batch axis in front."""
    config = rendered(meta_bundle([spec("x", "nc", c=2)], [spec("boxes", "mk", k=4)]))
    assert config.max_batch_size == 0
    assert list(config.output[0].dims) == [-1, 4]


def test_parameters_tell_the_stub_what_is_internal_and_what_is_external() -> None:
    """The parameters name external models, and mark internal and restartable models. Other models have no parameters."""
    plain = bundle([spec("x", "n")], [spec("y", "n")])
    assert not rendered(plain, guarded=False).parameters
    config = text_format.Parse(render(plain, internal=True).decode(), ModelConfig())
    assert {key: value.string_value for key, value in config.parameters.items()} == {"rsrv_internal": "true"}
    meta = bundle([spec("x", "n")], [spec("y", "n")], external=["resnet", 'a "b"'], restartable=True)
    assert json.loads(rendered(meta).parameters["rsrv_external"].string_value) == ["resnet", 'a "b"']
    assert rendered(meta).parameters["rsrv_restartable"].string_value == "true"


def test_the_largest_variant_counts() -> None:
    """The size of a row is that of the largest variant, inputs and outputs together."""
    sized = bundle([spec("x", "nhw")], [spec("y", "nh", "u8")], input_shapes=[(2, 3), (10, 1), (4, 4)])
    assert row_bytes(sized) == 4 * 4 * 4 + 4


def test_a_type_that_clients_do_not_have_is_refused_by_name() -> None:
    """A tensor of 8-bit floats for clients is refused by name."""
    with pytest.raises(ConfigError, match="x: clients cannot send or receive f8_e5m2"):
        render(bundle([spec("x", "nc", "f8_e5m2", c=2)], [spec("y", "n")]))


def test_a_model_without_inputs_is_refused() -> None:
    """A model without inputs is refused, because a request needs content."""
    with pytest.raises(ConfigError, match="at least one input"):
        render(bundle([], [spec("y", "n")]))


WIRE_TYPES = [token for token in dtypes.TOKENS if dtypes.triton_type(token)]
SPECS = st.builds(
    lambda name, letters, dtype, sizes: spec(name, letters, dtype, **dict(zip("chw", sizes, strict=True))),
    st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20),  # Printable characters.
    st.sampled_from(["", "n", "c", "nc", "cn", "nchw", "chwn", "hw"]),
    st.sampled_from(WIRE_TYPES),
    st.tuples(*[st.integers(1, 2**31 - 1)] * 3),
)


@given(
    st.lists(SPECS, min_size=1, max_size=3, unique_by=lambda s: s.name),
    st.lists(SPECS, min_size=1, max_size=3, unique_by=lambda s: s.name),
    st.lists(st.integers(1, 2**20), max_size=3),
)
def test_every_bundle_reads_back_as_it_was_meant(
    inputs: list[TensorSpec], outputs: list[TensorSpec], sizes: list[int]
) -> None:
    """For any bundle, names, types and dims are the same in the parsed configuration, and the batch axis is treated consistently."""
    of = bundle(inputs, outputs, sizes=sorted(set(sizes)))
    assert render(of).startswith(MARK.encode() + b"\n")
    config = rendered(of)
    batched = config.max_batch_size > 0
    assert batched == all(s.batch_axis == 0 for s in (*inputs, *outputs))
    for tensors, specs in ((config.input, inputs), (config.output, outputs)):
        for tensor, expected in zip(tensors, specs, strict=True):
            assert tensor.name == expected.name
            full = [-1, *tensor.dims] if batched else list(tensor.dims)
            if full == [-1, 1] and len(expected.dims) == 1:
                full = [-1]
            assert full == list(expected.dims) or (full == [1] and expected.dims == ())
    if batched:
        known = max(sizes, default=config.max_batch_size)
        assert config.max_batch_size == known or config.max_batch_size * row_bytes(of) <= EXECUTE_BYTES


def with_state(tokenizer: str | None = "", idle_timeout_s: float = 2.5) -> Bundle:
    """Return a bundle that keeps state. Unless `tokenizer` is empty, it generates with this tokenizer."""
    of = bundle([spec("x", "nc", c=3)], [spec("y", "nc", c=2)])
    state = StateSpec(4, (StateTensor("hidden", "f32", (8,)),), idle_timeout_s, "wait")
    generate = GenerateSpec("tokens", "lengths", "sampling", "token", 64, (2,), 16, tokenizer, "{text}")
    manifest = replace(of.manifest, state=state, generate=None if tokenizer == "" else generate)
    return replace(of, manifest=manifest)


def test_a_model_with_state_has_sequences_and_no_other_batching() -> None:
    """Triton assigns the sequences, with the manifest's idle time. Only the runtime counts slots."""
    config = rendered(with_state())
    assert not config.HasField("dynamic_batching")
    assert config.sequence_batching.max_sequence_idle_microseconds == 2_500_000
    assert config.sequence_batching.oldest.max_candidate_sequences == CANDIDATES
    assert not config.sequence_batching.control_input
    assert (config.max_batch_size, list(config.input[0].dims)) == (MOST_STEPS, [3])


def test_steps_with_strings_are_handed_over_one_by_one() -> None:
    """Steps with strings are sent one by one, because a malformed string would fail the steps of other sequences."""
    of = with_state()
    text = replace(of, manifest=replace(of.manifest, client_inputs=(spec("text", "n", "bytes"),)))
    assert rendered(text).max_batch_size == 1


@pytest.mark.parametrize(
    ("tokenizer", "tensors"),
    [
        ("tokenizer.json", [("text_input", "TYPE_STRING", [1]), ("text_output", "TYPE_STRING", [1])]),
        (None, [("tokens", "TYPE_INT32", [-1]), ("tokens", "TYPE_INT32", [-1])]),
    ],
)
def test_a_generation_streams_text_or_tokens(tokenizer: str | None, tensors: list[Any]) -> None:
    """A generation is decoupled and takes one prompt. Its answers have the text or the tokens first, and then the usage."""
    config = rendered(with_state(tokenizer))
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert not config.HasField("sequence_batching")
    declared = [
        (tensor.name, DataType.Name(tensor.data_type), list(tensor.dims))
        for tensor in (*config.input, *config.output)
    ]
    assert declared[:2] == tensors
    usage = ["finish_reason", "prompt_tokens", "completion_tokens", "first_token_s", "token_s"]
    assert [name for name, _, _ in declared[2:]] == usage


def test_clients_read_the_task_from_the_configuration() -> None:
    """The manifest's section `task` is a parameter with JSON. Without a task, there is no such parameter."""
    of = bundle([spec("x", "nc", c=3)], [spec("y", "nc", c=2)])
    task = TaskSpec("audio-classification", {"audio": "x"}, {"scores": "y"}, ("Größe", "b"))
    text = rendered(replace(of, manifest=replace(of.manifest, task=task))).parameters["task"].string_value
    assert json.loads(text) == {
        "kind": "audio-classification",
        "inputs": {"audio": "x"},
        "outputs": {"scores": "y"},
        "labels": ["Größe", "b"],
    }
    assert "task" not in rendered(of).parameters
