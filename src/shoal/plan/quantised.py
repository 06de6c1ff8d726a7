"""Whether a model in memory holds quantised weights, which cannot be split yet. Imports no such library.

A quantised linear's numbers mean something only together with scales that belong to blocks of them; cutting
one without the other is silently wrong. So such models are refused, by what their tensors and modules look
like: no library is imported, and one nobody has heard of is noticed too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shoal.errors import UnsupportedError

__all__ = ["refuse_quantised"]

# Dtypes that weights have only when they are quantised. Tables and masks have others.
_NARROW = {
    torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
}  # fmt: skip

# Buffers under which packed weights are kept beside no weight at all (GPTQ, AWQ, HQQ, compressed-tensors).
_PACKED = {"qweight", "qzeros", "W_q", "weight_packed", "_packed_params"}

_PLAIN_PACKAGES = ("torch.Tensor", "torch.nn.parameter", "torch._subclasses", "torch.distributed")


def refuse_quantised(model: nn.Module) -> None:
    """Refuse a model of which a weight is quantised.

    Args:
        model: any module, on any device.

    Raises:
        UnsupportedError: the message names the first such module, what it is, and what to do.
    """
    for name, reason in _signs(model):
        where = f"{name} is quantised" if name else "its weights are quantised"
        raise UnsupportedError(
            f"model: {where} ({reason}), and quantised weights cannot be split yet; load the model without "
            "quantisation (no quantization_config)",
            field="model",
        )


def _signs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(module name, what shows it) of everything that is quantised."""
    quantiser = getattr(model, "hf_quantizer", None)
    if quantiser is not None:
        yield "", f"by {type(quantiser).__name__}"
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings:
        yield "", f"quantization_config: {_method(settings)}"
    for name, module in model.named_modules():
        kind = f"a {type(module).__module__.partition('.')[0]} {type(module).__name__}"
        packed = sorted(_PACKED & {*vars(module), *module._buffers, *module._parameters, *module._modules})
        if packed:
            yield name, f"{kind} with {packed[0]}"
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter.dtype in _NARROW:
                yield name, f"{kind} with {attribute} in {parameter.dtype}"
            for tensor in (parameter, parameter.data):
                if not _is_plain(tensor):
                    yield name, f"{kind} with {attribute} as a {type(tensor).__name__}"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch's own kind, which indexing cuts as one expects, or spread by torch itself."""
    place = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return type(tensor) in (torch.Tensor, nn.Parameter) or place.startswith(_PLAIN_PACKAGES)


def _method(settings: Any) -> str:
    values = settings if isinstance(settings, dict) else vars(settings)
    method = values.get("quant_method", type(settings).__name__)
    return str(getattr(method, "value", method))
