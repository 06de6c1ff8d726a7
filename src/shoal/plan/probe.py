"""Runs a model whose weights are on meta, by replacing every operation that mixes a real tensor with a
weight. Knows no regions and no ranks.

Recording, such an operation gives a random leaf of the shape it would have had; replaying, it checks
its input against the recording and gives the recorded leaf again, or a rank's part of either. One rule
serves linears, ``Conv1D``, embeddings, stacked experts and einsum over raw parameters, for it looks at
operations, not at modules. A raw parameter that is used in some other way than as a factor of a product
gets values, and the model is recorded anew: what goes through it keeps its features.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.errors import PlanError
from shoal.plan.calls import Call, Recording
from shoal.plan.decisions import Decisions
from shoal.plan.drive import Batch, Pass, decode_pass, prefill_pass, restored
from shoal.plan.features import Features
from shoal.plan.intercept import Interceptor
from shoal.plan.linears import is_splittable
from shoal.plan.owners import Owners
from shoal.plan.random import own_random
from shoal.plan.saved import kept_for_backward
from shoal.plan.skeleton import materialise
from shoal.plan.types import pattern_of
from shoal.plan.uses import Use, carries_features, describe, describe_product

__all__ = ["Call", "GlueError", "Recording", "Replay", "record", "replay"]

_log = logging.getLogger("shoal.plan")
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4  # float32 at real widths; a wrong slice is off by the size of the values


class GlueError(Exception):
    """Rank-local code did not hand a weight what it should have got."""


class _Recorder(Interceptor):
    """Notes every use and answers with a random leaf."""

    def __init__(self, owners: Owners, recording: Recording) -> None:
        super().__init__(owners)
        self.without_values: set[str] = set()  # patterns of raw parameters that are no plain factors
        self._recording = recording
        self._generator = torch.Generator().manual_seed(3)

    def use(self, use: Use) -> torch.Tensor:
        like = use.result_on_meta()
        leaf = self._leaf(tuple(like.shape), like.dtype).requires_grad_(True)
        what = describe(use, self.owners, self.analyser)
        earlier = self._recording.calls
        if what.kind == "raw" or (
            what.how is not None and what.inputs and carries_features(what.how, what.inputs[0], earlier)
        ):
            self.without_values.add(pattern_of(use.weight))
        earlier.append(
            Call(
                use.weight, what.kind, what.inputs, leaf, use.index, self.step, what.input_features,
                what.output_features, use.function, self._users(use), what.how,
            )
        )  # fmt: skip
        added = use.operation.terms(what.how) if what.how is not None else None
        return leaf.clone() if added is None else leaf + added  # a copy: code may write into it

    def _users(self, use: Use) -> tuple[str, ...]:
        held = self.owners.users.get(use.weight, set())
        return tuple(sorted({*held, self.owners.running}))

    def _leaf(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Random features; the second half of the tokens negates the first: no ReLU is dead in all."""
        leaf = torch.empty(shape, dtype=dtype).normal_(generator=self._generator)
        if not leaf.numel():  # an expert that got no token
            return leaf
        tokens = leaf.view(-1, shape[-1]) if shape else leaf.view(1, 1)
        half = tokens.shape[0] // 2
        tokens[half : 2 * half] = -tokens[:half]
        return leaf


def record(
    model: nn.Module, batch: Batch, watch_arguments: bool = False, is_measured: bool = True
) -> Recording:
    """Run prefill, and a decode step where the model keeps a cache, noting every use of a weight.

    Args:
        model: from :func:`shoal.plan.skeleton.build_probe`.
        batch: what to feed.
        watch_arguments: make the floating-point arguments of modules leaves too, and keep them.
        is_measured: keep what gradients need; without, a recording can only be replayed.

    Raises:
        PlanError: the model does something that cannot be followed.
        Exception: whatever the model's own code raises.
    """
    while True:
        recording, *without_values = _record(model, batch, watch_arguments, is_measured)
        if not any(materialise(model, patterns) for patterns in without_values):
            return recording


def _record(
    model: nn.Module, batch: Batch, watch_arguments: bool, is_measured: bool
) -> tuple[Recording, set[str], set[str]]:
    """One recording, and the patterns of parameters that ought to have values: those that are no factors,
    and those that ought to have them if giving them to the former does not help.
    """
    recording = Recording(batch)
    recording.num_stubs = sum(parameter.is_meta for parameter in model.parameters())
    owners = Owners(model)
    handles = list(_watch_arguments(model, recording)) if watch_arguments else []
    recorder = _Recorder(owners, recording)
    try:
        decisions = Decisions() if is_measured else nullcontext()
        with restored(model), _gradients(is_measured), own_random(), recorder, decisions:
            recording.passes.append(prefill_pass(model, batch))
            if recording.passes[0].carried:
                recorder.step = 1
                _record_decode(model, recording)
            recording.num_broadcasts = recorder.num_broadcasts
            recording.operations = frozenset(recorder.operations.items())
            recording.draws = frozenset(recorder.draws)
            recording.taken = decisions.taken if isinstance(decisions, Decisions) else []
        for name in sorted({*owners.entangled, *_tables_with_values(model)}):
            # What else is done with them is not known.
            recording.calls.append(Call(name, "raw", (), torch.zeros(1, requires_grad=True), -1, 0))
    finally:
        owners.close()
        for handle in handles:
            handle.remove()
    return recording, recorder.without_values, {pattern_of(name) for name in owners.entangled}


def _record_decode(model: nn.Module, recording: Recording) -> None:
    """A decode step, unless the model's own code cannot be driven through one as we do it."""
    try:
        recording.passes.append(decode_pass(model, recording.batch, recording.passes[0]))
    except PlanError:
        raise
    except Exception as error:  # the model's own code may want its cache or its arguments otherwise
        _log.info("%s is measured without a decode step: %s", type(model).__name__, error)
        recording.calls = [call for call in recording.calls if call.step == 0]


@contextmanager
def _gradients(are_wanted: bool) -> Iterator[None]:
    with torch.set_grad_enabled(are_wanted), kept_for_backward() if are_wanted else nullcontext():
        yield


def _tables_with_values(model: nn.Module) -> Iterator[str]:
    """Weights of embeddings that code of its own uses, so that they were given values."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and is_splittable(module) and not module.weight.is_meta:
            yield f"{name}.weight"


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
    """A rank's part of the weights, by pattern, as features: input columns and output rows.

    ``slabs`` has, for weights that code of its own multiplies by, the dimension of the parameter that is
    cut, and the rank's indices along it.
    """

    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    slabs: Mapping[str, tuple[int, torch.Tensor]] = field(default_factory=dict)
    result: Callable[[Call], torch.Tensor] | None = None  # what a use gives instead of what was recorded


class _Replayer(Interceptor):
    """Checks every use against the recording and answers from it."""

    def __init__(self, owners: Owners, recording: Recording, part: Replay) -> None:
        super().__init__(owners)
        self._recorded = recording.by_key()
        self._part = part

    def use(self, use: Use) -> torch.Tensor:
        call = self._recorded.get((use.weight, use.index))
        if call is None:
            raise GlueError(f"{use.weight} is used otherwise than in the whole model")
        if call.kind == "product":
            return self._product(use, call)
        if len(call.inputs) != len(use.inputs):
            raise GlueError(f"{use.weight} is used otherwise than in the whole model")
        columns = self._part.columns.get(call.pattern)
        for got, want in zip(use.inputs, call.inputs, strict=True):
            want = want.detach()
            check_equal(use.weight, got, want if columns is None else want.index_select(-1, columns))
        rows = self._part.rows.get(call.pattern)
        output = self._result(call)
        return output.clone() if rows is None else output.index_select(-1, rows)

    def _product(self, use: Use, call: Call) -> torch.Tensor:
        """The same for code of its own: with the rank's part of the weight it must do the same product."""
        assert call.how is not None
        slab = self._part.slabs.get(call.pattern)
        wanted = () if slab is None else (slab[0],)
        is_alike = use.function == call.function
        what = describe_product(use, self.owners, call.how, wanted) if is_alike else None
        if what is None:
            raise GlueError(f"{use.weight} is used otherwise than in the whole model")
        columns, rows = self._part.columns.get(call.pattern), self._part.rows.get(call.pattern)
        self._check_part(call, call.input_features, what.input_features, columns)
        self._check_part(call, call.output_features, what.output_features, rows)
        if what.inputs:
            want = call.inputs[0].detach()
            check_equal(use.weight, what.inputs[0], _cut(call, call.input_features, want, columns))
        output = _cut(call, call.output_features, self._result(call), rows)
        if use.operation.shape({}) != tuple(output.shape):
            raise GlueError(f"{use.weight}: its product has another shape than a rank's part of the result")
        added = use.operation.terms(call.how)
        return output.clone() if added is None else output + added

    def _result(self, call: Call) -> torch.Tensor:
        return call.output.detach() if self._part.result is None else self._part.result(call)

    def _check_part(
        self, call: Call, whole: Features | None, local: Features | None, kept: torch.Tensor | None
    ) -> None:
        """Raise GlueError unless the rank's code takes just the kept features out of its part."""
        if whole is None or local is None:
            if kept is not None:
                raise GlueError(f"{call.weight} is used otherwise than in its region")
            return
        slab = self._part.slabs.get(call.pattern)
        count = whole.count if kept is None else len(kept)
        if local.count != count:
            raise GlueError(f"{call.weight}: {local.count} features where {count} were wanted")
        if slab is None or kept is None:
            return
        dim, indices = slab
        if dim not in whole.places or dim not in local.places:
            raise GlueError(f"{call.weight} is used otherwise than in its region")
        if not torch.equal(indices[local.places[dim]], whole.places[dim][kept]):
            raise GlueError(f"{call.weight}: other features than in the whole model")


def _cut(
    call: Call, features: Features | None, tensor: torch.Tensor, kept: torch.Tensor | None
) -> torch.Tensor:
    """The kept features of an activation."""
    if kept is None or features is None:
        return tensor
    part = features.cut(tensor, kept)
    if part is None:
        raise GlueError(f"{call.weight}: what a rank keeps is no part along one dimension")
    return part


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
        with (
            restored(model),
            torch.no_grad(),
            own_random(),
            _Replayer(owners, recording, part) as interceptor,
            mode,
        ):
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
