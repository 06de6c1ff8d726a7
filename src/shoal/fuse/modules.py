"""Linears outside fused layers over packed weights: what no layer's recipe covers runs as its model wrote it,
but for the products. Knows no layer and no attention.

Every linear that the model calls as a module is packed, proved against what it replaces on random input,
and its unpacked weight freed. Whether other code reads that weight shows only when the model runs: whoever
asks for this compares the model's logits, and restores. Weights are held whole until then
(:meth:`PackedModules.round`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shoal.comm.base import Comm
from shoal.cpu_kernels.layout import pack, unpack
from shoal.cpu_kernels.linear import PackedLinear
from shoal.cpu_kernels.settle import settle
from shoal.fuse.common import is_linear
from shoal.fuse.head import FusedHead, fuse_head, head_storage
from shoal.jit.team import Team
from shoal.shard.layers import GatheredConv1D, GatheredLinear, RowConv1D, RowLinear
from shoal.shard.link import Linked

__all__ = ["PackedModules", "pack_modules"]

_TOLERANCE = 2e-4
_SCALES = (0.3, 3.0)  # of the random input
_ROWS = 5  # of it at each scale, and of the weight's own rows, which give the largest sums
_LEAST_FEATURES = 16  # a panel: what is narrower would be mostly filling
_WHOLE_STORAGES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ROW, _GATHERED = (RowLinear, RowConv1D), (GatheredLinear, GatheredConv1D)


@dataclass(slots=True)
class _Linear:
    """A linear that was replaced."""

    module: nn.Module
    packed: PackedLinear
    dtype: torch.dtype  # of its own weight

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter("weight")

    def free(self) -> None:
        """Let the linear's own weight go."""
        self.weight.data = self.weight.new_empty(0)

    def restore(self) -> None:
        """Give the linear its own code and weight back, as it was but for what the storage rounded."""
        vars(self.module).pop("forward", None)
        rows = unpack(self.packed.weight).to(self.dtype)
        self.weight.data = rows.T.contiguous() if isinstance(self.module, Conv1D) else rows


@dataclass(slots=True)
class PackedModules:
    """What was replaced."""

    storage: str  # that is asked for
    problem: str = ""  # why a linear was not packed, where one did not prove
    _model: PreTrainedModel | None = None
    _team: Team | None = None
    _comm: Comm | None = None
    _linears: list[_Linear] = field(default_factory=list)
    _head: FusedHead | None = None

    @property
    def num_linears(self) -> int:
        return len(self._linears)

    @property
    def num_bytes(self) -> int:
        """Bytes of packed weights."""
        own = sum(linear.packed.weight.num_bytes for linear in self._linears)
        return own + (self._head.num_bytes if self._head is not None else 0)

    @property
    def is_rounded(self) -> bool:
        """Whether weights are to be rounded once they are known to be right."""
        return self.storage in ("int8", "int4")

    @property
    def notes(self) -> tuple[str, ...]:
        """What was packed and what not."""
        found = []
        if self._linears:
            found.append(f"{len(self._linears)} linears packed")
        if self._head is not None and self._head.problem:
            found.append(f"head not packed: {self._head.problem}")
        if self.problem:
            found.append(f"not packed: {self.problem}")
        return tuple(found)

    @torch.inference_mode()
    def round(self) -> None:
        """Hold the weights in the storage that was asked for; all ranks call together."""
        if not self.is_rounded:
            return
        for linear in self._linears:
            rows = unpack(linear.packed.weight)
            linear.packed.weight = pack(rows, _own_bias(linear.module), self.storage)
        self._settle()
        if self._head is not None and not self._head.problem:
            assert self._model is not None and self._team is not None and self._comm is not None
            self._head.restore()
            self._head = fuse_head(self._model, self._team, self._comm, head_storage(self.storage))

    def _settle(self) -> None:
        settle(linear.packed.weight for linear in self._linears)

    @torch.inference_mode()
    def restore(self) -> None:
        """Put the modules back as they were."""
        for linear in self._linears:
            linear.restore()
        self._linears.clear()
        if self._head is not None:
            self._head.restore()
            self._head = None


@torch.inference_mode()
def pack_modules(
    model: PreTrainedModel, run: Callable[[], object], team: Team, comm: Comm, storage: str
) -> PackedModules:
    """Replace the linears that a run of the model calls, and its head with them; all ranks call together.

    Args:
        model: with its weights; those of fused layers are gone already, and stay so.
        run: runs the model; called once, before anything is replaced, or not at all.
        team: whose threads compute.
        storage: of packed weights, a name of :data:`shoal.cpu_kernels.layout.STORAGES`; until
            :meth:`PackedModules.round` they are held whole.
    """
    packed = PackedModules(storage, _model=model, _team=team, _comm=comm)
    head = model.get_output_embeddings()
    paths = _candidates(model, head, run, comm)
    linears: list[_Linear] = []
    is_right: list[bool] = []
    for path in paths:
        linear, error = _packed(model.get_submodule(path), team)
        is_right.append(error <= _TOLERANCE)
        if is_right[-1]:
            linear.module.forward = _forward(linear.module, linear.packed)
            linear.free()
        elif not packed.problem:
            packed.problem = f"{path} differs by {error:.1e}"
        linears.append(linear)
    for linear, own, all_of_them in zip(linears, is_right, _everywhere(is_right, comm), strict=True):
        if all_of_them:
            packed._linears.append(linear)
        elif own:
            linear.restore()
    if not packed.is_rounded:  # else what is packed now gives way to what is rounded
        packed._settle()
    if packed._linears and head is not None and "forward" not in vars(head):
        whole = _WHOLE_STORAGES.get(model.dtype, "float32")
        packed._head = fuse_head(model, team, comm, whole)
    return packed


def _candidates(
    model: PreTrainedModel, head: nn.Module | None, run: Callable[[], object], comm: Comm
) -> list[str]:
    """Paths of what can be packed on every rank. Where there is nothing, nothing is run."""
    linears = {
        path: module for path, module in model.named_modules() if is_linear(module) and module is not head
    }
    shared = _shared(model)
    fits = _everywhere([_is_packable(module, shared) for module in linears.values()], comm)
    paths = [path for path, does in zip(linears, fits, strict=True) if does]
    if not paths:
        return []
    called = _called([linears[path] for path in paths], run)
    fits = _everywhere([linears[path] in called for path in paths], comm)
    return [path for path, does in zip(paths, fits, strict=True) if does]


def _everywhere(found: list[bool], comm: Comm) -> list[bool]:
    """Which hold on every rank."""
    if not found:
        return []
    counts = comm.all_reduce(torch.tensor([int(one) for one in found]))
    return [int(count) == comm.size for count in counts]


def _called(linears: list[nn.Module], run: Callable[[], object]) -> set[nn.Module]:
    """Those that the model calls with one tensor and nothing else."""
    good: set[nn.Module] = set()
    odd: set[nn.Module] = set()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_plain = len(args) == 1 and isinstance(args[0], torch.Tensor) and not kwargs
        (good if is_plain else odd).add(module)

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in linears]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return good - odd


def _shared(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that several modules have."""
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if parameter in seen else seen).add(parameter)
    return shared


def _is_packable(module: nn.Module, shared: set[nn.Parameter]) -> bool:
    """Whether a linear is one that kernels can stand for, and worth it."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or min(weight.shape) < _LEAST_FEATURES:
        return False  # among them those of fused layers, which have no elements
    is_changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    is_known = not isinstance(module, Linked) or isinstance(module, (*_ROW, *_GATHERED))
    return is_known and not is_changed and weight not in shared and weight.dtype in _WHOLE_STORAGES


def _packed(module: nn.Module, team: Team) -> tuple[_Linear, float]:
    """A linear packed, and by how much what is packed differs from what it replaces."""
    weight = module.get_parameter("weight")
    storage, is_transposed = _WHOLE_STORAGES[weight.dtype], isinstance(module, Conv1D)
    packed = PackedLinear(pack(weight, _own_bias(module), storage, is_transposed=is_transposed), team)
    worst = 0.0
    for x in _inputs(module):
        try:
            want = _replaced(module, x)
        except RuntimeError:  # only its class is a linear's: its own code takes other shapes
            worst = float("inf")
            break
        gap = (packed(x) - want).abs().max() / want.abs().max().clamp_min(1e-30)
        worst = max(worst, float(gap) if torch.isfinite(gap) else float("inf"))
    return _Linear(module, packed, weight.dtype), worst


def _own_bias(module: nn.Module) -> torch.Tensor | None:
    """What is added to the products before ranks have to do with them."""
    return None if isinstance(module, _ROW) else module._parameters.get("bias")


def _inputs(module: nn.Module) -> list[torch.Tensor]:
    """What a linear is proved on, [rows, K] float32 each."""
    weight = module.get_parameter("weight")
    rows = weight.T if isinstance(module, Conv1D) else weight
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(_ROWS, rows.shape[1], generator=generator) * scale for scale in _SCALES]
    own = rows[torch.randint(len(rows), (_ROWS,), generator=generator)].float()
    return [*random, own / own.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)]


def _replaced(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a linear's own code makes of [rows, K], in float32; without what ranks do with it."""
    if isinstance(module, Linked):
        weight = module.get_parameter("weight").float()
        y = functional.linear(x, weight.T if isinstance(module, Conv1D) else weight)
        bias = _own_bias(module)
        return y if bias is None else y + bias.float()
    floats = {name: parameter.float() for name, parameter in module.named_parameters()}
    out: torch.Tensor = torch.func.functional_call(module, floats, (x,))
    return out


def _forward(module: Any, packed: PackedLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    """What stands for a linear's code, collectives included."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return packed(x) if x.dtype is torch.float32 else packed(x.float()).to(x.dtype)

    def summed(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = module.comm.all_reduce(plain(x))
        return y if module.bias is None else y + module.bias

    def gathered(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = module.comm.all_gather(plain(x), module.sizes)
        return y

    if isinstance(module, _ROW):
        return summed
    return gathered if isinstance(module, _GATHERED) else plain
