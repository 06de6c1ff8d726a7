"""Models with quantised weights are refused, whoever quantised them; others are not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UnsupportedError
from shoal.plan.quantised import refuse_quantised
from support.planner import FAMILIES


class _Params4bit(nn.Parameter):
    """As bitsandbytes makes them: a parameter class of its own over packed bytes."""


class _Affine(torch.Tensor):
    """As torchao makes them: a tensor class inside a plain parameter."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self.values_inside = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_inside)
        raise NotImplementedError


def _bitsandbytes() -> nn.Module:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = _Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    return linear


def _torchao() -> nn.Module:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(_Affine(torch.zeros(4, 4)), requires_grad=False)
    return linear


def _gptq() -> nn.Module:
    module = nn.Module()
    module.register_buffer("qweight", torch.zeros(1, 4, dtype=torch.int32))
    module.register_buffer("scales", torch.zeros(1, 4))
    return module


def _float8() -> nn.Module:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    return linear


def _packed() -> nn.Module:
    """As torch.ao's dynamic linears are: no weight, only packed parameters."""
    module = nn.Module()
    module._packed_params = nn.Module()
    return module


@pytest.mark.parametrize("make", [_bitsandbytes, _torchao, _gptq, _float8, _packed])
def test_a_quantised_linear_is_refused_by_name(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(make()))
    with pytest.raises(UnsupportedError, match=r"1\.0 is quantised .*without"):
        refuse_quantised(model)


def test_a_model_that_says_it_is_quantised_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.config = SimpleNamespace(quantization_config={"quant_method": "awq"})  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="quantization_config: awq"):
        refuse_quantised(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_ordinary_models_are_not_refused(name: str) -> None:
    model_class, config = FAMILIES[name]()
    with torch.device("meta"):
        refuse_quantised(model_class(config))


def test_old_masks_of_bytes_and_integer_tables_are_no_weights() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("bias_mask", torch.ones(4, 4, dtype=torch.uint8))
    model.table = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
    refuse_quantised(model.to(torch.bfloat16))
