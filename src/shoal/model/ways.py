"""Which ways there are for which kind of model, so that one that is asked for is refused before anything is
loaded. Knows no model; whether a way is right for one is tried (:mod:`.choose` and its like).
"""

from __future__ import annotations

from typing import Any

from shoal.errors import ConfigError

__all__ = ["WAYS", "check_way"]

WAYS: dict[str, tuple[str, ...]] = {
    "a decoder": ("paged", "padded", "state", "recompute"),
    "an encoder-decoder": ("seq2seq",),
    "an encoder": ("packed", "padded", "alone"),
}
"""By kind of model, the fast ones first."""


def check_way(way: str, compiles: bool, config: Any, pools: bool) -> None:
    """Refuse a way that is none for this kind of model, or that is not what is to be compiled.

    Args:
        way: as the engine's option; ``auto`` is for every model.
        compiles: whether ``torch.compile`` is asked for.
        config: transformers'.
        pools: whether vectors and scores are wanted, and no text.

    Raises:
        ConfigError: it does not fit.
    """
    kind = "an encoder" if pools else "an encoder-decoder" if config.is_encoder_decoder else "a decoder"
    if way not in ("auto", *WAYS[kind]):
        raise ConfigError(
            f"way: {config.model_type} is served as {kind}, and {way} is no way for one; there are auto, "
            f"{', '.join(WAYS[kind])}",
            field="way",
        )
    if compiles and (kind != "a decoder" or way not in ("auto", "paged")):
        served = kind if way == "auto" else f"{kind} the {way} way"
        raise ConfigError(
            f"compile: only decoders on the paged way are compiled, and this is {served}; leave it off",
            field="compile",
        )
