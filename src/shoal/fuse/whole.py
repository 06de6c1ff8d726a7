"""A decoder from ids to logits without its own code between embedding, layers, norm and head. Knows no page.

Beside a small model's layers that code takes long: a tenth of a step. Which modules stand where is seen in a
run of the model; what is put together from them must give that run's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shoal.attention.base import AttentionBatch
from shoal.attention.hook import AttentionContext
from shoal.comm.base import Comm
from shoal.cpu_kernels.norm import Norm
from shoal.fuse.common import UnrecognisedError, agree, attempt
from shoal.fuse.match import find_norm, find_sum, is_close
from shoal.fuse.replace import Chain, FusedLayers
from shoal.fuse.stack import Stack
from shoal.fuse.tables import Tables
from shoal.jit.team import Team

__all__ = ["WholeModel", "find_whole"]

_TOKENS = (11, 1)  # of the runs; the last ones' logits are wanted, at most so many:
_WANTED = 2

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A module that was called in a run."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any

    def again(self, change: Callable[[Any], Any]) -> Any:
        """The module called with each argument changed."""
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return self.module(*map(change, self.args), **kwargs)


@dataclass(frozen=True, slots=True)
class _Given:
    """An argument that a step brings: its hidden states or its positions."""

    is_positions: bool


@dataclass(frozen=True, slots=True, eq=False)
class WholeModel:
    """Embedding, layers, last norm and head, each called once a step."""

    embedding: nn.Module
    factor: float  # of what is looked up
    tables: tuple[_Call, ...]  # calls that make rotary tables; arguments are as they were, or a _Given
    tables_of: tuple[int | None, ...]  # of each layer, by number among those calls
    stack: Stack
    norm: Callable[[torch.Tensor], torch.Tensor]
    head: nn.Module
    logits_factor: float
    dtype: torch.dtype  # of the model

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Logits [R, V] of tokens ``wanted`` [R] of ids [T] at ``positions`` [T]; all int64."""
        hidden = self.embedding(ids[None])
        if self.factor != 1.0:
            hidden = hidden * self.factor
        where = positions[None]

        def change(argument: Any) -> Any:
            if not isinstance(argument, _Given):
                return argument
            return where if argument.is_positions else hidden

        made = [call.again(change) for call in self.tables]
        pairs = [(cos[0], sin[0]) for cos, sin in made]
        tables = [None if number is None else pairs[number] for number in self.tables_of]
        rows = self.stack.run(hidden[0], batch, tables)[wanted].to(self.dtype)
        logits: torch.Tensor = self.head(self.norm(rows)[None])[0]
        return logits if self.logits_factor == 1.0 else logits * self.logits_factor


@torch.inference_mode()
def find_whole(
    model: PreTrainedModel, layers: FusedLayers, context: AttentionContext, team: Team, comm: Comm, run: Run
) -> tuple[WholeModel | None, str]:
    """What computes the model's logits, or why nothing does; all ranks call together.

    Args:
        layers: what was fused of the model.
        context: that the model is attached to; holds the batch of the last run.
        run: the model's logits [R, V] of one prompt, ids [T], at tokens wanted [R], over pages that stay in
            use until the next run.
    """
    chain = layers.only_chain
    if chain is None:
        return None, "its layers are not all fused in one row"
    prompts = [_prompt(model, tokens) for tokens in _TOKENS]
    noted = _note(model, chain, lambda: run(*prompts[0]))
    whole, problem = attempt(lambda: _put_together(model, chain, noted, prompts[0], team))
    if not agree(comm, "" if whole is None else "put together") or whole is None:
        return None, problem or "another rank computes something else"
    for ids, wanted in prompts:
        want = run(ids, wanted)
        assert context.batch is not None, "a run over pages leaves its batch"
        batch, positions = context.batch, torch.arange(len(ids))
        got, problem = attempt(lambda: whole(ids, positions, wanted, batch))  # noqa: B023 - called at once
        if got is not None and not is_close(got.float(), want.float()):
            problem = "put together it gives other logits"
        if not agree(comm, "" if problem else "equal"):
            return None, problem or "on another rank it differs"
    return whole, ""


def _prompt(model: PreTrainedModel, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(3, 3 + tokens) % model.config.get_text_config().vocab_size
    return ids, torch.arange(max(0, tokens - _WANTED), tokens)


@dataclass(slots=True)
class _Noted:
    """What happened outside the layers in a run."""

    calls: list[_Call]
    first: torch.Tensor  # [1, T, W] into the first layer
    last: torch.Tensor  # [1, T, W] out of the last one
    logits: torch.Tensor  # [R, V]

    def of(self, module: nn.Module | None, what: str) -> _Call:
        """The only call of a module."""
        found = [call for call in self.calls if call.module is module]
        if len(found) != 1:
            raise UnrecognisedError(f"its {what} is called {len(found)} times")
        return found[0]


def _note(model: PreTrainedModel, chain: Chain, run: Callable[[], torch.Tensor]) -> _Noted:
    """The calls in a run."""
    calls: list[_Call] = []
    entered: list[torch.Tensor] = []
    left: list[torch.Tensor] = []
    within = {module for layer in chain.modules for module in layer.modules()}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        calls.append(_Call(module, args, dict(kwargs), out))

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    def leave(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        left.append(out[0] if isinstance(out, tuple) else out)

    outside = [module for module in model.modules() if module not in within]
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in outside]
    handles.append(chain.modules[0].register_forward_pre_hook(enter, with_kwargs=True))
    handles.append(chain.modules[-1].register_forward_hook(leave))
    try:
        logits = run()
    finally:
        for handle in handles:
            handle.remove()
    return _Noted(calls, entered[0], left[0], logits)


def _put_together(
    model: PreTrainedModel,
    chain: Chain,
    noted: _Noted,
    prompt: tuple[torch.Tensor, torch.Tensor],
    team: Team,
) -> WholeModel:
    """The calls of a run that make its logits.

    Raises:
        UnrecognisedError: something else is done in between.
    """
    ids, wanted = prompt
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up, scored = noted.of(embedding, "embedding"), noted.of(head, "head")
    norm = _find_last_norm(noted, wanted, scored)
    tables: list[_Call] = []
    tables_of: list[int | None] = []
    for given in chain.given:
        call = None if given is None else _maker(noted, given)
        if call is not None and call not in tables:
            tables.append(call)
        tables_of.append(None if call is None else tables.index(call))
    positions = torch.arange(len(ids))[None]
    return WholeModel(
        embedding,
        _factor(noted.first, looked_up.out, "what its layers are given"),
        tuple(_with_places(call, noted.first, positions) for call in tables),
        tuple(tables_of),
        chain.stack,
        _fast_norm(norm, team),
        scored.module,
        _factor(noted.logits, scored.out[0][-len(wanted) :], "its logits"),
        noted.first.dtype,
    )


def _factor(target: torch.Tensor, source: torch.Tensor, what: str) -> float:
    """``target`` is ``source`` times this."""
    found = find_sum(target.float(), {"source": source.float()})
    if found is None:
        raise UnrecognisedError(f"where {what} comes from is not seen")
    return found[0][1]


def _find_last_norm(noted: _Noted, wanted: torch.Tensor, head: _Call) -> _Call:
    """The call that makes the head's rows of the last layer's."""
    for call in noted.calls:
        source, out = call.args[0] if call.args else None, call.out
        if not isinstance(source, torch.Tensor) or not isinstance(out, torch.Tensor):
            continue
        takes_it = source.shape == noted.last.shape and torch.equal(source, noted.last)
        is_alone = len(call.args) == 1 and not call.kwargs and out.shape == source.shape
        if takes_it and is_alone and head.args and _holds(head.args[0], out, wanted):
            return call
    raise UnrecognisedError("what is between its layers and its head is not seen")


def _holds(given: torch.Tensor, out: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a head was given all rows of ``out`` [1, T, W], or the wanted ones."""
    return any(rows.shape == given.shape and torch.equal(rows, given) for rows in (out[:, wanted], out))


def _fast_norm(call: _Call, team: Team) -> Callable[[torch.Tensor], torch.Tensor]:
    """Our norm where it is one in float32, else the module."""
    module, source = call.module, call.args[0]
    look = find_norm(module, source, call.out) if source.dtype is torch.float32 else None
    if look is None:
        return module
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    return Norm(look.width, weight, bias, look.eps, team, is_centred=look.is_centred, adds_one=look.adds_one)


def _maker(noted: _Noted, given: Tables) -> _Call:
    """The call that made these tables."""
    for call in noted.calls:
        out = call.out
        if isinstance(out, tuple) and len(out) == 2 and all(a is b for a, b in zip(out, given, strict=True)):
            return call
    raise UnrecognisedError("where its rotary tables come from is not seen")


def _with_places(call: _Call, hidden: torch.Tensor, positions: torch.Tensor) -> _Call:
    """The call with places for what each step brings."""

    def place(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.shape == hidden.shape and argument.dtype == hidden.dtype:
            return _Given(is_positions=False)
        if argument.shape == positions.shape and torch.equal(argument.long(), positions):
            return _Given(is_positions=True)
        raise UnrecognisedError("what its rotary tables are made of is not seen")

    args, kwargs = tuple(map(place, call.args)), {name: place(v) for name, v in call.kwargs.items()}
    return _Call(call.module, args, kwargs, None)
