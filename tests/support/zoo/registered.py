"""Which of transformers' text classes the zoo has no family for, and why. Builds no model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers as T
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from shoal.checkpoint.support import check_supported
from shoal.errors import UnsupportedError
from support.zoo.family import Family

__all__ = ["without_family"]

_KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


def without_family(families: Iterable[Family]) -> dict[str, list[str]]:
    """Classes registered as causal, seq2seq or masked, by what is said when such a model is to be served.

    Those that are not refused are under the empty string.
    """
    families = list(families)
    classes, configs = {f.model_class for f in families}, {f.config_class for f in families}
    found: dict[str, set[str]] = {}
    for mapping in _KINDS.values():
        for kind, names in mapping.items():
            own = {names} if isinstance(names, str) else set(names)
            config = CONFIG_MAPPING_NAMES.get(kind, "")
            if not own & classes or config not in configs:
                found.setdefault(_refusal(config, sorted(own)), set()).update(own - classes)
    return {reason: sorted(names) for reason, names in sorted(found.items()) if names}


def _refusal(config_class: str, model_classes: list[str]) -> str:
    """Why a model with the config's usual settings is not served, without where in it that was seen."""
    config = getattr(T, config_class, None)
    if config is None:
        return "its config cannot be imported here"
    try:
        check_supported({**_usual(config), "architectures": model_classes})
    except UnsupportedError as error:
        return str(error).removeprefix("model: ").partition(" (")[0]
    return ""


def _usual(config: type[T.PreTrainedConfig]) -> dict[str, Any]:
    """A config's usual settings; of its own alone where it is composed of others, and none without them."""
    try:
        return config().to_dict()
    except Exception:  # whatever its checks raise: ValueError, huggingface_hub's, ...
        return {name: value for name, value in vars(config).items() if not name.startswith("_")}
