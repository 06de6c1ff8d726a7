"""Engine options are validated once, and the first that is wrong is named."""

from __future__ import annotations

import pytest

from shoal.config import make_config
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), ("none", None), ("int8", "int8"), ("int4", "int4")]
)
def test_weights_are_held_as_asked_for(given: str | None, kept: str | None) -> None:
    assert make_config(model="demo", quantization=given).quantization == kept


@pytest.mark.parametrize(
    ("option", "value"), [("quantization", "int3"), ("cpu_kernels", "on"), ("block_size", 0), ("no_such", 1)]
)
def test_a_wrong_option_is_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        make_config(model="demo", **{option: value})
    assert caught.value.field == option
