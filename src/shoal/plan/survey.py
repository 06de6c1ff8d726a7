"""Which batches a probe model is recorded on, so that as much of its code as can be reached is run.
Knows no regions.

Plain ids come first in every model. Further arguments (global attention, entities) send some through other
code; so do more tokens than a block or a chunk holds. Code that no recording ran is not known, and what
only such code uses is never split by what was measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.autograd import Function

from shoal.plan.cones import Flow, measure
from shoal.plan.drive import Batch, batch_of, with_special_inputs
from shoal.plan.inline import inlined, refusing_function
from shoal.plan.naming import Naming
from shoal.plan.probe import Recording, record
from shoal.plan.skeleton import embedding_size

__all__ = ["Survey", "data_flow", "long_batch", "measure_first", "survey"]

TOKENS = 8  # per row of a plain batch
_LENGTH_WORDS = ("block", "chunk", "window", "radius")  # in names of settings on which code paths depend
_TIMES = (4, 16)  # such a setting: several chunks; more blocks than global, sliding and random ones
_FEW_TOKENS = 64  # of a long batch that costs little
_MAX_SCORES = 1 << 25  # attention scores of a row of a long batch: what can be afforded
_log = logging.getLogger("shoal.plan")


@dataclass(slots=True)
class Survey:
    """Recordings, the one that ran the most code first; its arguments were watched."""

    recordings: list[Recording]
    long_tokens: int = 0  # of a row of the long batch; 0: more tokens run no other code


def survey(model: nn.Module, config: Any) -> Survey:
    """Record the model on every kind of batch: plain ids at one row and at two.

    Args:
        model: from :func:`shoal.plan.skeleton.build_probe`.
        config: the whole model's.

    Raises:
        PlanError: the model does something that cannot be followed.
        Exception: whatever the model's own code raises on plain ids.
    """
    vocabulary = embedding_size(config)
    plain = [batch_of(vocabulary, rows, TOKENS) for rows in (1, 2)]
    found = Survey(_special(model, config, plain[0]))
    found.recordings += [record(model, batch, batch is plain[0], batch is plain[0]) for batch in plain]
    long = _long(model, config, found.recordings[-1])
    if long is not None:
        found.recordings.append(long)
        found.long_tokens = long.batch.ids.shape[1]
    return found


def measure_first(model: nn.Module, recordings: list[Recording]) -> Flow:
    """Measure the first recording; anew, where a Function of the model's own refuses to give gradients.

    Args:
        model: what was recorded.
        recordings: the first is replaced if it had to be recorded anew.

    Raises:
        Exception: whatever the model's own code raises in the backward pass.
    """
    inline: set[type[Function]] = set()
    while True:
        try:
            return measure(recordings[0])
        except Exception as error:  # backward code of the model's own may refuse in any way
            function = refusing_function(error)
            if function is None or function in inline:
                raise
            inline.add(function)
            names = {call.weight: call.pattern for call in recordings[0].calls}
            with inlined(inline):
                recordings[0] = record(model, recordings[0].batch, watch_arguments=True)
            for call in recordings[0].calls:
                call.pattern = names.get(call.weight, call.pattern)


def data_flow(model: nn.Module, config: Any, naming: Naming) -> Flow:
    """Record a model at one row with everything it takes, and measure, weights called as they are named.

    Raises:
        Exception: whatever the model's own code raises, forward or backward.
    """
    plain = batch_of(embedding_size(config), 1, TOKENS)
    recordings = _special(model, config, plain) or [record(model, plain)]
    naming.apply(recordings)
    return measure_first(model, recordings)


def _special(model: nn.Module, config: Any, plain: Batch) -> list[Recording]:
    """What the model does with its further arguments. Such a recording comes first, to be measured."""
    batch = with_special_inputs(type(model), config, plain)
    if batch is None:
        return []
    try:
        return [record(model, batch, watch_arguments=True)]
    except Exception as error:  # the model's own code may want its arguments otherwise
        _log.info("%s is measured without its further arguments: %s", type(model).__name__, error)
        return []


def long_batch(vocabulary: int, tokens: int, padding: int = 0) -> Batch:
    """Two rows of many tokens; a decoder's own prompt stays short."""
    batch = batch_of(vocabulary, 2, tokens, padding, seed=5)
    return replace(batch, target_ids=batch.target_ids[:, :TOKENS])


def _long(model: nn.Module, config: Any, short: Recording) -> Recording | None:
    """The first longer batch that is cheap, or that runs other operations than a short one; None if none
    does. (Which tokens look at which may depend on the length without another operation.)
    """
    for tokens in _lengths(config):
        try:
            recording = record(model, long_batch(embedding_size(config), tokens), is_measured=False)
        except Exception as error:  # more tokens than the model takes, or a number that it does not
            _log.info("%s is not measured at %d tokens: %s", type(model).__name__, tokens, error)
            continue
        if tokens <= _FEW_TOKENS or recording.operations != short.operations:
            return recording
    return None


def _lengths(config: Any) -> Iterator[int]:
    """Numbers of tokens that are several times, and many times, a length on which code may depend."""
    settings = [
        size
        for name, value in vars(config).items()
        if any(word in name for word in _LENGTH_WORDS) and "layer" not in name
        for size in (value if isinstance(value, (list, tuple)) else [value])
        if type(size) is int and size > 1
    ]
    positions = getattr(config, "max_position_embeddings", None)
    heads = getattr(config, "num_attention_heads", None)
    scores = _MAX_SCORES // heads if isinstance(heads, int) and heads else _MAX_SCORES
    most = min(math.isqrt(scores), positions if isinstance(positions, int) else _MAX_SCORES)
    for times in _TIMES:
        lengths = [times * size for size in settings if TOKENS < times * size <= most]
        if lengths:
            yield max(lengths)
