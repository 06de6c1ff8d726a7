"""The zoo's families with other heads that transformers registers for them: encoders as decoders, and all
that have a head that sorts texts. Data only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from support.zoo.family import Family, named

__all__ = ["causal_heads", "classifiers"]


def causal_heads(families: Iterable[Family]) -> dict[str, Family]:
    """Encoders, and decoders of encoder-decoders, that generate on their own."""
    heads = _by_config(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    families = list(families)
    own = {family.model_class for family in families}
    return named(
        *(
            _with_head(family, "decoder", head, "decoder", is_decoder=True, **_ALONE.get(family.kind, {}))
            for family, head in _first_of_each(families, heads)
            if head not in own
        )
    )


_ALONE: dict[str, dict[str, Any]] = {"seq2seq": {"is_encoder_decoder": False}}


def classifiers(families: Iterable[Family]) -> dict[str, Family]:
    """Families that sort texts. Padding has a token, without which transformers takes no batch; of one that
    shows what then becomes of it, there is a variant.
    """
    heads = _by_config(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    found = [
        _with_head(family, "classifier", head, "encoder", pad_token_id=0)
        for family, head in _first_of_each(families, heads)
    ]
    unpadded = [
        replace(family, name=f"{family.name}:no padding", settings={**family.settings, "pad_token_id": None})
        for family in found
        if family.name in _ALSO_UNPADDED
    ]
    return named(*found, *unpadded)


_ALSO_UNPADDED = ("gpt2 classifier", "qwen2 classifier")


def _by_config(heads: Mapping[str, Any]) -> dict[str, str]:
    return {CONFIG_MAPPING_NAMES[kind]: head for kind, head in heads.items() if isinstance(head, str)}


def _first_of_each(families: Iterable[Family], heads: Mapping[str, str]) -> Iterator[tuple[Family, str]]:
    seen: set[str] = set()
    for family in families:
        if family.config_class in heads and family.config_class not in seen:
            seen.add(family.config_class)
            yield family, heads[family.config_class]


def _with_head(family: Family, what: str, head: str, kind: Any, **settings: Any) -> Family:
    return replace(
        family,
        name=f"{family.name} {what}",
        model_class=head,
        kind=kind,
        generates=None,
        settings={**family.settings, **settings},
    )
