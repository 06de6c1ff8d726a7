"""A way that is none for a kind of model is refused before anything is loaded."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import transformers as T

from shoal.config import EngineConfig
from shoal.errors import ConfigError
from shoal.model.ways import WAYS, check_way

KINDS: dict[str, tuple[Any, bool]] = {  # config, whether vectors are wanted
    "a decoder": (T.LlamaConfig(), False),
    "an encoder-decoder": (T.T5Config(), False),
    "an encoder": (T.BertConfig(), True),
}


def test_the_option_takes_every_way() -> None:
    asked = set(get_args(EngineConfig.model_fields["way"].annotation))
    assert asked == {"auto", *(way for ways in WAYS.values() for way in ways)}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_takes_its_own_ways(kind: str) -> None:
    config, pools = KINDS[kind]
    for way in {way for ways in WAYS.values() for way in ways}:
        if way in WAYS[kind]:
            check_way(way, False, config, pools)
            continue
        with pytest.raises(ConfigError, match=f"{way} is no way for one; there are auto, ") as caught:
            check_way(way, False, config, pools)
        assert caught.value.field == "way"


@pytest.mark.parametrize(("kind", "way"), [("a decoder", "padded"), ("an encoder", "auto")])
def test_what_is_never_compiled_is_not_asked_to_be(kind: str, way: str) -> None:
    config, pools = KINDS[kind]
    with pytest.raises(ConfigError, match="only decoders on the paged way are compiled") as caught:
        check_way(way, True, config, pools)
    assert caught.value.field == "compile"
    check_way("paged", True, *KINDS["a decoder"])
