"""What a model carries from one pass to the next, and how it is handed back. Knows no plan.

Caches have several names (``cache``, ``past_key_values``, ``mems``, ``state`` ...). What
serves as one is seen by its name alone: the output has it, and ``forward`` takes it. Where it is not
transformers' own kind of cache, the model's ``prepare_inputs_for_generation`` says what goes with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["CACHE_NAMES", "carried", "encoder_output", "further_arguments", "switches"]

CACHE_NAMES = ("cache", "past_key_values")  # transformers' own; the second is the older name
_NO_CACHE = ("_ids", "_mask", "_embeds", "labels", "hidden_states", "attentions", "_outputs")  # ends of names


def carried(model: nn.Module, output: Any) -> dict[str, Any]:
    """What the next pass takes back of an output, by the name of the argument."""
    if not isinstance(output, Mapping):
        return {}
    accepted = inspect.signature(model.forward).parameters
    found = {
        name: value
        for name, value in output.items()
        if name in accepted and value is not None and not name.endswith(_NO_CACHE)
    }
    for name in CACHE_NAMES:
        if name in found:  # what else there is goes along with it
            return {name: found[name]}
    return found


def switches(model: nn.Module) -> dict[str, bool]:
    """Arguments that ask for a cache: ``use_cache``, or ``use_x`` where ``x`` is an argument as well."""
    accepted = inspect.signature(model.forward).parameters
    wanted = [name for name in accepted if name.startswith("use_") and name.removeprefix("use_") in accepted]
    return dict.fromkeys([*(["use_cache"] if "use_cache" in accepted else []), *wanted], True)


def further_arguments(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, cache: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a pass that goes on from a cache of the model's own kind, as the model prepares them.

    Args:
        model: has ``prepare_inputs_for_generation``, if it is made to generate.
        ids: all tokens so far, the new one included, ``[batch, tokens]``.
        mask: of the same shape.
        cache: what was carried over.

    Returns:
        None where the model does not say.
    """
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return None
    given = {**cache, **switches(model), "attention_mask": mask}
    if "next_sequence_length" in inspect.signature(prepare).parameters:
        given["next_sequence_length"] = 1
    prepared = dict(prepare(ids, **given))
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in prepared.items() if name in accepted and value is not None}


@contextmanager
def encoder_output(model: nn.Module) -> Iterator[list[Any]]:
    """A list that gets what the model's encoder gives while it runs, for later passes to go on from."""
    found: list[Any] = []
    get = getattr(model, "get_encoder", None)
    encoder = get() if get is not None else None
    if not isinstance(encoder, nn.Module) or encoder is model:
        yield found
        return
    handle = encoder.register_forward_hook(lambda module, args, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()
