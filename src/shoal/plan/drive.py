"""Runs a model once: what it is called with, and what of its output counts. Knows no plan.

Arguments are chosen by the signature of the model's ``forward``, so that one function serves decoders,
encoders and encoder-decoders of every transformers version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput

from shoal.errors import PlanError
from shoal.plan.carried import CACHE_NAMES, carried, encoder_output, further_arguments, switches

__all__ = [
    "Batch",
    "Pass",
    "batch_of",
    "decode_pass",
    "floating_outputs",
    "prefill_pass",
    "restored",
    "with_special_inputs",
]


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids ``[batch, tokens]`` and which of them are real (mask of the same shape, 1 or 0)."""

    ids: torch.Tensor
    mask: torch.Tensor
    next_ids: torch.Tensor  # [batch, 1], fed in the decode step
    target_ids: torch.Tensor  # [batch, fewer tokens], a decoder's own prompt in encoder-decoders
    special: Mapping[str, torch.Tensor] = field(default_factory=dict)  # further arguments of the prefill


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward: its floating-point outputs, and what the next one goes on from."""

    outputs: tuple[torch.Tensor, ...]
    carried: Mapping[str, Any] = field(default_factory=dict)  # caches, by the argument that takes them back
    encoder: Any = None  # what the encoder of an encoder-decoder gave

    @property
    def cache(self) -> Any:
        """The cache, None if the model keeps none."""
        return next(iter(self.carried.values()), None)


def batch_of(vocabulary: int, batch: int, tokens: int, padding: int = 0, seed: int = 1) -> Batch:
    """Random ids; the first row's last ``padding`` tokens are masked out.

    The last, not the first: a causal row that may look at nothing at all is NaN in float64, where eager
    attention's "minus infinity" does not survive the softmax's cast to float32.
    """
    generator = torch.Generator().manual_seed(seed)
    low = min(5, vocabulary - 1)  # small ids tend to mean padding, begin and end

    def draw(count: int) -> torch.Tensor:
        return torch.randint(low, min(vocabulary, 1000), (batch, count), generator=generator)

    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[0, tokens - padding :] = 0
    return Batch(draw(tokens), mask, draw(1), draw(max(2, tokens - 2)))


def with_special_inputs(model_class: type[nn.Module], config: Any, batch: Batch) -> Batch | None:
    """The batch with every argument besides ids and mask that the model's ``forward`` takes and that sends
    it through other code; None if it takes none.

    An argument is known by its name, which says in transformers what it is; sizes come from the config.
    """
    accepted = inspect.signature(model_class.forward).parameters
    generator = torch.Generator().manual_seed(9)
    made = {name: make(config, batch, generator) for name, make in _SPECIAL.items() if name in accepted}
    special = {name: value for name, value in made.items() if value is not None}
    special |= _further_ids(accepted, config, batch, generator)
    return replace(batch, special=special) if special else None


def _global_attention_mask(config: Any, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """The first token looks everywhere; in the first row one more, so that rows differ."""
    mask = torch.zeros_like(batch.ids)
    mask[:, 0] = 1
    mask[0, min(2, mask.shape[1] - 1)] = 1
    return mask


def _permutation_mask(config: Any, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """``[batch, tokens, tokens]``: 1 where a token may not look; each may look at the first."""
    rows, tokens = batch.ids.shape
    mask = torch.randint(0, 2, (rows, tokens, tokens), generator=generator).float()
    mask[:, :, 0] = 0.0
    return mask


def _target_mapping(config: Any, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """``[batch, 2, tokens]``: the second and the third token are to be predicted."""
    rows, tokens = batch.ids.shape
    return torch.eye(tokens)[1:3].expand(rows, -1, -1).clone()


def _token_type_ids(config: Any, batch: Batch, generator: torch.Generator) -> torch.Tensor | None:
    """Two kinds of tokens, where no table of them in the config says that without any all are of the first
    kind: then they may well be other code."""
    if any("type_vocab" in name for name in vars(config)):
        return None
    return torch.randint(0, 2, batch.ids.shape, generator=generator)


_SPECIAL: Mapping[str, Callable[[Any, Batch, torch.Generator], torch.Tensor | None]] = {
    "global_attention_mask": _global_attention_mask,
    "perm_mask": _permutation_mask,
    "target_mapping": _target_mapping,
    "token_type_ids": _token_type_ids,
}
_FURTHER_ROWS = 3  # entities and the like in a row
_MENTION = 2  # tokens that one of them stands for


def _further_ids(
    accepted: Mapping[str, Any], config: Any, batch: Batch, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A second sequence of ids beside the tokens: ``x_ids`` where the config has an ``x_vocab_size``, with
    its mask and, per id, the positions of the tokens it stands for (-1: none).
    """
    found: dict[str, torch.Tensor] = {}
    rows, tokens = batch.ids.shape
    for kind in (name.removesuffix("_ids") for name in accepted if name.endswith("_ids")):
        size = getattr(config, f"{kind}_vocab_size", None)
        if not isinstance(size, int) or size < 1:
            continue
        found[f"{kind}_ids"] = torch.randint(
            min(1, size - 1), size, (rows, _FURTHER_ROWS), generator=generator
        )
        if f"{kind}_attention_mask" in accepted:
            found[f"{kind}_attention_mask"] = torch.ones(rows, _FURTHER_ROWS, dtype=torch.long)
        if f"{kind}_position_ids" in accepted:
            shape = (rows, _FURTHER_ROWS, _MENTION)
            positions = torch.randint(0, tokens, shape, generator=generator)
            positions[:, -1, -1] = -1
            found[f"{kind}_position_ids"] = positions
    return found


def prefill_pass(model: nn.Module, batch: Batch) -> Pass:
    """The whole batch at once, asking for a cache where the model has one."""
    special = {name: _as_model(model, value) for name, value in batch.special.items()}
    arguments: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.mask, **special}
    head = str(inspect.signature(model.forward).return_annotation)
    if "MultipleChoice" in head:  # [batch, choices, tokens]
        choices = {"input_ids": (batch.ids, batch.ids.flip(1)), "attention_mask": (batch.mask, batch.mask)}
        return _call(model, {name: torch.stack(pair, 1) for name, pair in choices.items()})
    if not _config(model, "is_encoder_decoder"):
        return _call(model, arguments)
    if "Seq2SeqSequenceClassifier" in head:  # classifies by a row's last end token; decodes what it encodes
        return _call(model, {**arguments, "input_ids": _ended(batch.ids, _config(model, "eos_token_id"))})
    arguments["decoder_input_ids"] = batch.target_ids
    with encoder_output(model) as encoder:
        done = _call(model, arguments)
    return replace(done, encoder=encoder[0]) if encoder else done


def _ended(ids: torch.Tensor, end: Any) -> torch.Tensor:
    """The ids with one end token in each row, its last; as they are if the config has none."""
    if not isinstance(end, int):
        return ids
    other = torch.where(ids == end, ids - 1, ids)
    return torch.cat([other[:, :-1], torch.full_like(ids[:, :1], end)], 1)


def decode_pass(model: nn.Module, batch: Batch, before: Pass) -> Pass:
    """One further token per row, on the cache that ``before`` left (which it changes).

    Raises:
        Exception: whatever the model's own code raises; not every model can be driven so.
    """
    assert before.carried, "only a model that left a cache can go on from it"
    mask = torch.cat([batch.mask, torch.ones_like(batch.next_ids)], 1)
    if not before.carried.keys() & set(CACHE_NAMES):
        ids = torch.cat([batch.ids, batch.next_ids], 1)
        prepared = further_arguments(model, ids, mask, before.carried)
        return _call(model, prepared or {**before.carried, "input_ids": batch.next_ids})
    arguments: dict[str, Any] = {**before.carried, "attention_mask": mask}
    if _config(model, "is_encoder_decoder"):
        arguments |= {"decoder_input_ids": batch.next_ids, "attention_mask": batch.mask}
        arguments["encoder_outputs"] = before.encoder
    else:
        arguments["input_ids"] = batch.next_ids
    return _call(model, arguments)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is as it was: its attributes, tensors and submodules.

    Forward code may count, grow tables, or put another attention in the place of its own for good.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    tables = [
        (table, dict(table))
        for _, attributes in before
        for table in (attributes["_modules"], attributes["_parameters"], attributes["_buffers"])
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for table, content in tables:
            table.clear()
            table.update(content)


def floating_outputs(output: Any, left_out: Container[str] = CACHE_NAMES) -> tuple[torch.Tensor, ...]:
    """Every floating-point tensor of a model's output; caches and hidden bookkeeping left out."""
    if isinstance(output, torch.Tensor):
        return (output,) if output.is_floating_point() else ()
    if isinstance(output, Mapping):
        parts: Sequence[Any] = [value for key, value in output.items() if key not in left_out]
    elif isinstance(output, (tuple, list)):
        parts = output
    else:
        return ()
    return tuple(tensor for part in parts for tensor in floating_outputs(part, left_out))


def _call(model: nn.Module, arguments: dict[str, Any]) -> Pass:
    accepted = set(inspect.signature(model.forward).parameters)
    arguments = {**switches(model), **arguments}
    arguments = {name: value for name, value in arguments.items() if name in accepted and value is not None}
    try:
        output = model(**arguments)
    except AttributeError as error:
        # A cache that asks the config for what this kind does not have; no split takes that from a config.
        if not isinstance(error.obj, PreTrainedConfig) or not arguments.get("use_cache"):
            raise
        output = model(**{**arguments, "use_cache": False})
    kept = carried(model, output)
    outputs = floating_outputs(output, {*CACHE_NAMES, *kept})
    if not outputs:
        raise PlanError(f"{type(model).__name__} gives no floating-point output")
    # Without an encoder to watch, what the output says of it has to do.
    state = output.get("encoder_last_hidden_state") if isinstance(output, Mapping) else None
    return Pass(outputs, kept, None if state is None else BaseModelOutput(last_hidden_state=state))


def _as_model(model: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """Floating-point arguments in the dtype that the model computes in."""
    parameter = next(model.parameters(), None)
    return value.to(parameter.dtype) if parameter is not None and value.is_floating_point() else value


def _config(model: nn.Module, name: str) -> Any:
    return getattr(getattr(model, "config", None), name, None)
