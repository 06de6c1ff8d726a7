"""What the zoo knows of one family: which class, which small settings, what it is fed. Builds no weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import transformers as T
from transformers.dynamic_module_utils import get_class_from_dynamic_module

__all__ = ["CUSTOM", "HEADS", "HIDDEN", "LAYERS", "NEURONS", "VOCABULARY", "Family", "Kind", "named"]

Kind = Literal["decoder", "encoder", "seq2seq"]

VOCABULARY = 101  # prime: no rank count divides it
HIDDEN = 64
HEADS = 4
NEURONS = 250  # about four times the hidden size, as is usual, but no multiple of it
LAYERS = 2

CUSTOM = Path(__file__).parent / "custom"


@dataclass(frozen=True)
class Family:
    """One family, or a variant of one (``llama:9q3kv``).

    ``settings`` go to the config class. A family that transformers does not have names the folder of its
    code under ``custom`` instead of a config class, and the settings change that folder's config.json.
    """

    name: str
    model_class: str
    config_class: str
    settings: Mapping[str, Any]
    kind: Kind
    tokens: int = 12  # of a prompt: what the model's chunks, blocks and windows need
    extra: str = ""  # further inputs, see inputs.py: "global attention" or "entities"
    attention: tuple[str, ...] = ("eager", "sdpa")
    generates: bool | None = None  # None: all but encoders do
    seeds: bool = False  # its layers seed torch's own generator, which ranks that are threads would share

    @property
    def is_custom(self) -> bool:
        """Whether its code comes with the checkpoint."""
        return (CUSTOM / self.config_class).is_dir()

    @property
    def can_generate(self) -> bool:
        return self.kind != "encoder" if self.generates is None else self.generates

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers has it."""
        return self.is_custom or (hasattr(T, self.model_class) and hasattr(T, self.config_class))

    def has_attention(self, attention: str) -> bool:
        """Whether the installed transformers computes the family's attention this way."""
        return attention == "eager" or bool(getattr(self.load()[0], "_supports_sdpa", False))

    def load(self) -> tuple[type[Any], Any]:
        """The model class and a fresh config; imports the family's code."""
        settings = copy.deepcopy(dict(self.settings))
        if not self.is_custom:
            return getattr(T, self.model_class), getattr(T, self.config_class)(**settings)
        folder = str(CUSTOM / self.config_class)
        config = T.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        # Anew, not by from_pretrained(**settings): that would set attributes on a finished config.
        config = type(config)(**{**json.loads((Path(folder) / "config.json").read_text()), **settings})
        places = {place for auto, place in config.auto_map.items() if auto != "AutoConfig"}
        place = next(place for place in places if place.endswith(f".{self.model_class}"))
        return get_class_from_dynamic_module(place, folder), config


def named(*families: Family) -> dict[str, Family]:
    """By name; a name that occurs twice is a mistake."""
    by_name = {family.name: family for family in families}
    assert len(by_name) == len(families), "two families of one name"
    return by_name
