"""Models that keep a state, on real ranks with a step ahead: no slot becomes another sequence's too early."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.zoo.catalogue import family_of
from support.zoo.serve import TIGHT, greedy, prompts, save, serve

TOKENS = 8


@pytest.mark.parametrize("name", ["lfm2"])
def test_states_are_kept_apart_with_two_steps_in_flight(name: str, tmp_path: Path) -> None:
    family = family_of(name)
    asked = prompts()
    expected = [greedy(family, prompt, TOKENS) for prompt in asked]
    options = {"executor": "processes", "async_scheduling": True, "num_threads": 1, "max_num_seqs": 3}
    served = serve(save(family, tmp_path), asked, TOKENS, 2, **{**TIGHT, **options})
    assert served.tokens == expected
    assert (served.info.way, served.info.num_slots) == ("state", 3)
