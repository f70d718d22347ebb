"""rsrv's own lowerings of PyTorch operations, and the operations that have a lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from rsrv_bundle.torch_lowerings import LOWERINGS
from rsrv_bundle.torch_nms import nms

F = nn.functional


def random(*shape: int) -> torch.Tensor:
    """Return normally distributed numbers. They are always the same for a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def lowered(name: str, *arguments: Any, **options: Any) -> Any:
    """Run a lowering on tensors; return its results as numpy arrays."""
    arrays = jax.tree.map(
        lambda a: jnp.asarray(a.detach().numpy()) if isinstance(a, torch.Tensor) else a, arguments
    )
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, LOWERINGS[name](*arrays, **options))


def close(result: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-5, atol=2e-5)


GROUPS = (random(7, 4), random(4, 4, 8), torch.tensor([2, 2, 6, 7], dtype=torch.int32))
MATRIX = random(2, 3, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("aten._grouped_mm", GROUPS, torch._grouped_mm),
        ("aten._grouped_mm", (random(2, 4, 3), random(2, 3, 5)), torch.bmm),
        ("aten._int_mm", (torch.arange(-20, 20, dtype=torch.int8).view(5, 8), torch.ones(8, 8, dtype=torch.int8) * 99),
         torch._int_mm),
        ("aten._linalg_det", (MATRIX,), torch.linalg.det),
        ("aten._linalg_solve_ex", (MATRIX, random(2, 3, 2)), torch.linalg.solve),
        ("aten._linalg_solve_ex", (MATRIX, random(2, 3)), torch.linalg.solve),
        ("aten.adaptive_max_pool2d", (random(2, 1, 7, 5), (3, 4)), F.adaptive_max_pool2d),
        ("aten.adaptive_max_pool3d", (random(1, 2, 3, 7, 5), (2, 3, 2)), F.adaptive_max_pool3d),
        ("aten.nonzero_static", ((random(3, 4) > 0).int(),), lambda x: torch.nonzero_static(x, size=9)),
    ],
)  # fmt: skip
def test_a_lowering_returns_what_pytorch_does(
    name: str, arguments: tuple[Any, ...], expected: Callable[..., torch.Tensor]
) -> None:
    """Operations that torchax lacks or gets wrong agree with PyTorch's kernels."""
    result = lowered(name, *arguments, **({"size": 9} if name == "aten.nonzero_static" else {}))
    close(result[0] if isinstance(result, tuple) else result, expected(*arguments))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_rows_are_reduced(mode: str) -> None:
    """The lowering agrees with PyTorch. A bag may be empty or hold padding, and the last offset may close the last bag."""
    table, indices, offsets = random(5, 3), torch.tensor([1, 4, 0, 0, 2, 3]), torch.tensor([0, 2, 2, 6])
    number = ["sum", "mean", "max"].index(mode)
    result = lowered("aten._embedding_bag", table, indices, offsets, False, number, False, None, True, 0)[0]
    expected = F.embedding_bag(indices, table, offsets, mode=mode, include_last_offset=True, padding_idx=0)
    close(result, expected)


def test_places_of_the_largest_values_are_those_of_pytorch() -> None:
    """Adaptive max pooling returns the position of each maximum in the whole image, as unpooling needs it.

    Among equal values, it returns the first one's position.
    """
    image = random(2, 3, 7, 5).round()
    _, places = lowered("aten.adaptive_max_pool2d", image, (3, 4))
    np.testing.assert_array_equal(
        places, F.adaptive_max_pool2d(image, (3, 4), return_indices=True)[1].numpy()
    )


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "align"), [((4, 9), False), ((3, 3), True)])
def test_antialiased_resizing_agrees(mode: str, size: tuple[int, int], align: bool) -> None:
    """Images shrink and grow as in PyTorch with antialias=True."""
    image = random(1, 2, 7, 6)
    expected = F.interpolate(image, size, mode=mode, antialias=True, align_corners=align)
    close(lowered(f"aten._upsample_{mode}2d_aa", image, size, align), expected)


def test_an_unmoved_deformable_convolution_is_a_convolution() -> None:
    """With offsets of zero, the result is a plain convolution. With integer offsets, it is the convolution of a moved image.

    The mask scales each sampled value.
    """
    image, weight, bias = random(2, 4, 6, 5), random(6, 2, 3, 3), random(6)
    offset, mask = torch.zeros(2, 2 * 2 * 9, 4, 3), torch.full((2, 2 * 9, 4, 3), 0.5)
    options = (1, 1, 0, 0, 1, 1, 2, 2)
    result = lowered("torchvision.deform_conv2d", image, weight, offset, mask, bias, *options, True)
    close(result, F.conv2d(image, weight * 0.5, bias, groups=2))
    offset[:, 0::2] = 1
    result = lowered("torchvision.deform_conv2d", image, weight, offset, mask, bias, *options, False)
    moved = F.pad(image, (0, 0, 0, 1))[:, :, 1:]
    close(result, F.conv2d(moved, weight, bias, groups=2))


def test_aligned_regions_of_a_slope_have_the_values_of_their_centres() -> None:
    """On a slope, the average of a cell is the value in its middle. Outside of the image, values are zero."""
    slope = torch.arange(8.0) * torch.ones(1, 1, 8, 1)
    regions = torch.tensor([[0, 1.0, 1.0, 5.0, 5.0], [0, 20.0, 20.0, 24.0, 24.0]])
    result = lowered("torchvision.roi_align", slope, regions, 1.0, 2, 2, 2, True)
    close(result[:, 0], torch.tensor([[[1.5, 3.5]] * 2, [[0.0, 0.0]] * 2]))


def test_the_best_boxes_that_do_not_overlap_are_returned() -> None:
    """Better boxes suppress overlapping ones, and -1 pads the results. For each row, the lowering agrees with the function `nms`."""
    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [9, 9, 12, 12], [5, 5, 6, 6]]).expand(2, 4, 4)
    scores = torch.tensor([[0.5, 0.9, 0.7, -torch.inf], [0.9, 0.5, 0.2, 0.3]])
    expected = nms(boxes, scores, 0.5, 4)
    assert expected.tolist() == [[1, 2, -1, -1], [0, 3, 2, -1]]
    assert lowered("rsrv.nms", boxes, scores, 0.5, 4).tolist() == expected.tolist()


def test_every_core_operation_has_a_lowering() -> None:
    """All core operations of PyTorch have a lowering, except the listed ones.

    rsrv has its own lowerings of two of torchvision's operations.
    """
    # Imported only here, because torchax changes PyTorch for the whole process.
    from rsrv_bundle.torch_programs import _decompositions, _known

    table = _decompositions()
    # `dir(torch.ops.aten)` lists only the operations that the process has used.
    names = [
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")
    ]
    pairs = [
        (packet, overload or "default") for packet, _, overload in (name.partition(".") for name in names)
    ]
    overloads = [getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in pairs]
    core = [op for op in overloads if torch.Tag.core in op.tags]
    missing = {str(op) for op in core if op not in table and not _known(op, LOWERINGS)}
    assert len(core) > 190
    assert missing == {
        "aten._adaptive_avg_pool2d_backward.default",
        "aten.avg_pool2d_backward.default",
        "aten.convolution_backward.default",
        "aten.resize_.default",
        "aten.sym_numel.default",
        "aten.sym_storage_offset.default",
    }
    assert {name for name in LOWERINGS if name.startswith("torchvision.")} == {
        "torchvision.deform_conv2d",
        "torchvision.roi_align",
    }


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("aten.gru.input", nn.GRU(3, 4, num_layers=2, bidirectional=True)),
        ("aten.gru.input", nn.GRU(3, 4, bias=False, batch_first=True)),
        ("aten.lstm.input", nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)),
        ("aten.lstm.input", nn.LSTM(3, 4, num_layers=2, proj_size=2)),
        ("aten.lstm.input", nn.LSTM(3, 4, bias=False, proj_size=2, bidirectional=True)),
        ("aten.rnn_relu.input", nn.RNN(3, 4, nonlinearity="relu")),
        ("aten.rnn_tanh.input", nn.RNN(3, 4, num_layers=3)),
    ],
)
def test_recurrent_networks_return_what_pytorch_does(name: str, module: nn.RNNBase) -> None:
    """From random initial states, a network returns PyTorch's outputs and last states of all layers and directions."""
    # The loop computes several steps at a time. 11 is not a multiple of their number.
    x = random(2, 11, 3) if module.batch_first else random(11, 2, 3)
    cells = module.num_layers * (2 if module.bidirectional else 1)
    hidden = random(cells, 2, module.proj_size or module.hidden_size)
    state = (hidden, random(cells, 2, module.hidden_size)) if isinstance(module, nn.LSTM) else hidden
    with torch.no_grad():
        output, last = module(x, state)
    results = lowered(
        name,
        x,
        state,
        [*module.parameters()],
        module.bias,
        module.num_layers,
        0.0,
        False,
        module.bidirectional,
        module.batch_first,
    )
    for result, expected in zip(
        results, (output, *(last if isinstance(last, tuple) else [last])), strict=True
    ):
        close(result, expected)
