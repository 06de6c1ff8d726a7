"""Runs a model whose weights are on meta, by replacing every operation that mixes a real tensor with a
weight. Knows no regions and no ranks.

Recording, such an operation gives a random leaf of the shape it would have had; replaying, it checks
its input against the recording and gives the recorded leaf again, or a rank's part of either. One rule
serves linears, ``Conv1D``, embeddings and einsum over raw parameters, for it looks at operations, not
at modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.errors import PlanError
from shoal.plan.drive import Batch, Pass, decode_pass, prefill_pass
from shoal.plan.linears import input_size, is_linear, is_splittable, output_size
from shoal.plan.owners import Owners
from shoal.plan.random import own_random
from shoal.plan.types import pattern_of

__all__ = ["Call", "GlueError", "Kind", "Recording", "Replay", "record", "replay"]

# Asking these of a weight computes nothing.
_METADATA = {
    "__get__", "size", "dim", "numel", "untyped_storage", "stride", "storage_offset", "is_floating_point",
    "data_ptr", "__repr__", "element_size", "type", "is_contiguous", "__len__", "is_complex", "ndimension",
    "__hash__", "is_tensor", "nelement", "get_device",
}  # fmt: skip
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4  # float32 at real widths; a wrong slice is off by the size of the values


_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm"}


class GlueError(Exception):
    """Rank-local code did not hand a weight what it should have got."""


Kind = Literal["linear", "embedding", "raw"]


@dataclass(slots=True)
class Call:
    """One use of one weight."""

    weight: str  # full parameter name, as its module has it
    kind: Kind  # raw: not by its own linear or embedding module as a whole
    inputs: tuple[torch.Tensor, ...]  # floating-point, the features last for a linear
    output: torch.Tensor  # the leaf
    index: int  # how often the weight was used before
    step: int  # 0 prefill, 1 decode

    @property
    def pattern(self) -> str:
        return pattern_of(self.weight)


@dataclass(slots=True)
class Recording:
    """What one batch did: calls in order, the model's outputs and caches per pass, arguments of modules."""

    batch: Batch
    calls: list[Call] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    arguments: dict[tuple[str, str, int], torch.Tensor] = field(default_factory=dict)
    num_broadcasts: int = 0  # products of real tensors of which one is repeated along a batch dimension

    def by_key(self) -> dict[tuple[str, int], Call]:
        return {(call.weight, call.index): call for call in self.calls}

    @property
    def has_decode(self) -> bool:
        return len(self.passes) > 1


@dataclass(frozen=True, slots=True)
class _Use:
    """One operation that mixes a weight with real tensors."""

    weight: str
    is_own: bool  # the module that has the weight under this name is running
    function: str
    tensor: torch.Tensor  # the weight, or what was made of it
    inputs: tuple[torch.Tensor, ...]  # floating-point, of two dimensions or more
    index: int  # how often the weight was used before
    result_on_meta: Callable[[], torch.Tensor]


class _Interceptor(TorchFunctionMode):
    """Hands every operation on weights and real tensors to ``self.use``."""

    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self.owners = owners
        self.counts: dict[str, int] = {}
        self.num_broadcasts = 0
        self.step = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        metas = [tensor for tensor in tensors if tensor.is_meta]
        name = getattr(func, "__name__", "")
        if metas and func == torch.Tensor.device.__get__:
            return torch.device("cpu")  # what code creates "where the weight is" must be real
        if not metas or name in _METADATA:
            self.num_broadcasts += name in _PRODUCTS and _broadcasts(tensors)
            return func(*args, **kwargs)
        reals = [tensor for tensor in tensors if not tensor.is_meta]
        if name in ("__getitem__", "select", "index_select") and len(reals) == 1 and reals[0].numel() == 1:
            plain = int(reals[0])  # one expert chosen by a tensor: a view of the weight
            args = tuple(plain if value is reals[0] else value for value in args)
            reals = []
        if not reals:
            result = func(*args, **kwargs)
            for derived in _tensors(result if isinstance(result, (tuple, list)) else (result,)):
                if derived.is_meta:
                    self.owners.inherit(self.owners.known(metas), derived)
            return result
        return self._contract(func, name, args, kwargs, self.owners.known(metas), reals)

    def _contract(
        self, func: Any, name: str, args: Any, kwargs: Any, weight: torch.Tensor, reals: list[torch.Tensor]
    ) -> torch.Tensor:
        full_name, is_own = self.owners.name(weight)
        index = self.counts[full_name] = self.counts.get(full_name, -1) + 1
        inputs = tuple(tensor for tensor in reals if tensor.is_floating_point() and tensor.dim() >= 2)

        def shape() -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                result = func(*_to_meta(args), **_to_meta(kwargs))
            if not isinstance(result, torch.Tensor):
                raise PlanError(f"{name} of {full_name} gives no tensor")
            return result

        use = _Use(full_name, is_own, name, weight, inputs, index, shape)
        return self.use(use)

    def use(self, use: _Use) -> torch.Tensor:
        """The result of one use of a weight."""
        raise NotImplementedError


class _Recorder(_Interceptor):
    """Notes every use and answers with a random leaf."""

    def __init__(self, owners: Owners, recording: Recording) -> None:
        super().__init__(owners)
        self._recording = recording
        self._generator = torch.Generator().manual_seed(3)

    def use(self, use: _Use) -> torch.Tensor:
        like = use.result_on_meta()
        leaf = self._leaf(tuple(like.shape), like.dtype).requires_grad_(True)
        self._recording.calls.append(
            Call(use.weight, self._kind(use), use.inputs, leaf, use.index, self.step)
        )
        return leaf.clone()  # a copy: code may write into it

    def _kind(self, use: _Use) -> Kind:
        owner, _, attribute = use.weight.rpartition(".")
        module = self.owners.modules[owner]
        is_weight = use.is_own and attribute == "weight" and is_splittable(module)
        if not is_weight or use.tensor.numel() != input_size(module) * output_size(module):
            return "raw"
        if isinstance(module, nn.Embedding):
            return "embedding" if use.function == "embedding" and not use.inputs else "raw"
        is_product = len(use.inputs) == 1 and use.inputs[0].shape[-1] == input_size(module)
        return "linear" if is_linear(module) and is_product else "raw"

    def _leaf(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Random features; the second half of the tokens negates the first: no ReLU is dead in all."""
        leaf = torch.empty(shape, dtype=dtype).normal_(generator=self._generator)
        tokens = leaf.view(-1, shape[-1]) if shape else leaf.view(1, 1)
        half = tokens.shape[0] // 2
        tokens[half : 2 * half] = -tokens[:half]
        return leaf


def record(model: nn.Module, batch: Batch, watch_arguments: bool = False) -> Recording:
    """Run prefill, and a decode step where the model keeps a cache, noting every use of a weight.

    Args:
        model: from :func:`shoal.plan.skeleton.build_probe`.
        batch: what to feed.
        watch_arguments: make the floating-point arguments of modules leaves too, and keep them.

    Raises:
        PlanError: the model does something that cannot be followed.
        Exception: whatever the model's own code raises.
    """
    recording = Recording(batch)
    owners = Owners(model)
    handles = list(_watch_arguments(model, recording)) if watch_arguments else []
    try:
        with torch.enable_grad(), own_random(), _Recorder(owners, recording) as mode:
            recording.passes.append(prefill_pass(model, batch))
            if recording.passes[0].cache is not None:
                mode.step = 1
                recording.passes.append(decode_pass(model, batch, recording.passes[0]))
            recording.num_broadcasts = mode.num_broadcasts
    finally:
        owners.close()
        for handle in handles:
            handle.remove()
    return recording


def _watch_arguments(model: nn.Module, recording: Recording) -> Iterator[Any]:
    """Hooks that turn the floating-point arguments of modules with weights below into leaves."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        has_weights = any(is_splittable(child) for child in module.modules())
        if not name or is_splittable(module) or isinstance(module, nn.ModuleList) or not has_weights:
            continue
        yield module.register_forward_pre_hook(_argument_hook(name, counts, recording), with_kwargs=True)


def _argument_hook(name: str, counts: dict[str, int], recording: Recording) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = counts[name] = counts.get(name, -1) + 1

        def leaf(argument: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.is_meta:
                return value
            if not value.requires_grad:
                value = value.detach().clone().requires_grad_(True)
            recording.arguments[name, argument, index] = value
            return value.clone()

        positional = tuple(leaf(f"#{position}", value) for position, value in enumerate(args))
        return positional, {key: leaf(key, value) for key, value in kwargs.items()}

    return hook


@dataclass(slots=True)
class Replay:
    """A rank's part of the weights, by pattern, as indices: input columns and output rows."""

    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)


class _Replayer(_Interceptor):
    """Checks every use against the recording and answers from it."""

    def __init__(self, owners: Owners, recording: Recording, part: Replay) -> None:
        super().__init__(owners)
        self._recorded = recording.by_key()
        self._part = part

    def use(self, use: _Use) -> torch.Tensor:
        call = self._recorded.get((use.weight, use.index))
        if call is None or len(call.inputs) != len(use.inputs):
            raise GlueError(f"{use.weight} is used otherwise than in the whole model")
        columns = self._part.columns.get(call.pattern)
        for got, want in zip(use.inputs, call.inputs, strict=True):
            want = want.detach()
            check_equal(use.weight, got, want if columns is None else want.index_select(-1, columns))
        rows = self._part.rows.get(call.pattern)
        output = call.output.detach()
        return output.clone() if rows is None else output.index_select(-1, rows)


def replay(model: nn.Module, recording: Recording, part: Replay, mode: TorchFunctionMode) -> list[Pass]:
    """Run what was recorded again with a rank's part of the weights.

    Args:
        model: the recorded model, perhaps changed (integers, slices of raw parameters).
        recording: of the unchanged model.
        part: the rank's rows and columns.
        mode: active around the run; sees every operation first.

    Returns:
        the passes, with the caches as the rank's code filled them.

    Raises:
        GlueError: a weight was given something else than its columns of the recording, or the model's
            outputs differ.
        Exception: whatever the model's own code raises on shapes that do not fit.
    """
    owners = Owners(model)
    try:
        with torch.no_grad(), own_random(), _Replayer(owners, recording, part) as interceptor, mode:
            passes = [prefill_pass(model, recording.batch)]
            if recording.has_decode:
                interceptor.step = 1
                passes.append(decode_pass(model, recording.batch, passes[0]))
    finally:
        owners.close()
    if interceptor.num_broadcasts > recording.num_broadcasts:
        # Eager attention broadcasts one KV head over many query heads where other kernels would not.
        raise GlueError("it works only because a product broadcasts")
    for mine, theirs in zip(passes, recording.passes, strict=True):
        if len(mine.outputs) != len(theirs.outputs):
            raise GlueError("the number of outputs differs")
        for got, want in zip(mine.outputs, theirs.outputs, strict=True):
            check_equal("the output", got, want.detach())
    return passes


def check_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise GlueError unless both are the same up to float32 rounding (NaN equals NaN)."""
    if got.shape != want.shape:
        raise GlueError(f"{name}: {tuple(got.shape)} where {tuple(want.shape)} was wanted")
    if not torch.allclose(got, want, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True):
        raise GlueError(f"{name}: other values than in the whole model")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _broadcasts(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the batch dimensions of a product differ."""
    batches = {tuple(tensor.shape[:-2]) for tensor in tensors if tensor.dim() > 2}
    return len(batches) > 1


def _to_meta(value: Any) -> Any:
    """The same arguments with every real tensor replaced by one of its shape on meta."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(_to_meta(item) for item in value)
    return value
