"""Weights are packed as a recipe says, freed in the layer, and put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.cpu_kernels.layout import unpack
from shoal.fuse.recipe import Gate, Piece, Project
from shoal.fuse.weights import Packer, norm_tensors


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.up, self.gate = nn.Linear(8, 12), nn.Linear(8, 5, bias=False), nn.Linear(8, 5)
        self.conv = Conv1D(6, 8)
        self.conv.bias.data = torch.randn(6)


def whole(module: str, count: int) -> Piece:
    return Piece(module, torch.arange(count), torch.ones(count))


@torch.inference_mode()
def test_pieces_are_packed_one_after_the_other_with_their_factors() -> None:
    layer = Layer()
    rows, factors = torch.tensor([3, 1]), torch.tensor([0.5, -2.0])
    packed = Packer(layer, "float32").project(
        Project("y", "x", (Piece("qkv", rows, factors), whole("conv", 6), whole("up", 5)))
    )
    weight = torch.cat([layer.qkv.weight[rows] * factors[:, None], layer.conv.weight.T, layer.up.weight])
    bias = torch.cat([layer.qkv.bias[rows] * factors, layer.conv.bias, torch.zeros(5)])
    assert torch.equal(unpack(packed), weight)
    assert packed.bias is not None and torch.equal(packed.bias[:13], bias)


@torch.inference_mode()
@pytest.mark.parametrize(("is_summed", "has_bias"), [(True, False), (False, True)])
def test_one_rank_alone_brings_the_bias_of_what_is_summed(is_summed: bool, has_bias: bool) -> None:
    step = Project("y", "x", (whole("qkv", 12),), is_summed=is_summed)
    packed = Packer(Layer(), "float32", has_bias_of_sums=False).project(step)
    assert (packed.bias is not None) == has_bias


@torch.inference_mode()
def test_what_is_packed_is_freed_and_comes_back() -> None:
    layer = Layer()
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    packer = Packer(layer, "float32")
    packer.project(
        Project(
            "q",
            "x",
            (
                Piece("qkv", torch.arange(4), torch.full((4,), 0.5)),
                Piece("qkv", torch.arange(4, 12), torch.ones(8)),
            ),
        )
    )
    packer.project(Project("y", "x", (whole("conv", 6),)))
    packer.gate(Gate("h", "x", whole("gate", 5), whole("up", 5), "silu"))
    packer.free()
    assert [layer.get_submodule(name).weight.numel() for name in ("qkv", "conv", "gate", "up")] == [0] * 4
    assert layer.qkv.bias.numel() == 12, "small things stay"
    assert packer.num_bytes > 0
    packer.restore()
    assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())


@torch.inference_mode()
def test_weights_of_fewer_bits_come_back_rounded_in_the_dtype_they_had() -> None:
    layer = Layer().bfloat16()
    before = layer.qkv.weight.clone()
    packer = Packer(layer, "int8")
    packer.project(Project("y", "x", (whole("qkv", 12),)))
    packer.free()
    packer.restore()
    assert layer.qkv.weight.dtype is torch.bfloat16
    assert torch.allclose(layer.qkv.weight, before, atol=0.01)
    assert not torch.equal(layer.qkv.weight, before)


@torch.inference_mode()
def test_a_norm_that_adds_one_is_given_its_weight_plus_one() -> None:
    layer = nn.Module()
    layer.norm, layer.bare = nn.LayerNorm(4).bfloat16(), nn.LayerNorm(4, elementwise_affine=False)
    weight, bias = norm_tensors(layer, "norm", adds_one=True)
    assert weight is not None and bias is not None and weight.dtype is torch.float32
    assert weight.tolist() == [2.0] * 4 and bias.tolist() == [0.0] * 4
    assert list(norm_tensors(layer, "bare", adds_one=False)) == [None, None]
