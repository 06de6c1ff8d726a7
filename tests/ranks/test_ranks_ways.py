"""Ways over real ranks: a state's slot does not become another sequence's too early, with a step ahead; and
what one rank cannot do none does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.prove import plan_and_prove
from support.disagreeing import FAULTS, way_with_a_fault
from support.rank_pool import RankPool
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


@pytest.mark.parametrize(("fault", "ranks"), [("failing", 3), ("forgetful", 2)])
def test_all_ranks_take_the_deepest_way_that_each_of_them_passes(
    fault: str, ranks: int, rank_pool: RankPool
) -> None:
    """One rank's kernel fails in the middle of a pass, or is wrong."""
    plan = plan_and_prove(*family_of("llama").load(), ranks)
    found = rank_pool.run(way_with_a_fault, "llama", plan.to_dict(), fault, ranks - 1, ranks=ranks)
    assert [way for way, _, _ in found] == ["padded"] * ranks
    for _, notes, logits in found:
        said = FAULTS[fault].said.format(ranks - 1)
        assert any(note.startswith(f"not paged: {said}") for note in notes), notes
        assert logits == found[0][2]
