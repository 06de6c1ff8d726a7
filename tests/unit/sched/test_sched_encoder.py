"""What the scheduler promises about an encoder's input: it goes out once, whole, and what comes of it is kept
in blocks that a request's branches share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.cache.manager import CacheManager
from shoal.errors import RequestError
from shoal.messages import SamplingSpec, Step, StepResult, TokenResult, unpack_ids
from shoal.sched.beams import BeamSpec
from shoal.sched.intake import Limits, make_branches
from shoal.sched.request import RequestSpec
from shoal.sched.scheduler import Scheduler

START = 1


def scheduler(num_blocks: int = 40, **options: Any) -> Scheduler:
    caches = options.pop("enable_prefix_caching", True)
    cache = CacheManager(num_blocks, 4, enable_prefix_caching=caches)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 100, "max_encoder_len": 50}
    return Scheduler(cache, **{**limits, **options})


def request(name: str, encoder_ids: list[int], n: int = 1, **fields: Any) -> RequestSpec:
    return RequestSpec(
        request_id=name,
        prompt_ids=fields.pop("prompt_ids", [START]),
        encoder_ids=encoder_ids,
        sampling=tuple(SamplingSpec(temperature=0.0, branch=branch) for branch in range(n)),
        max_tokens=fields.pop("max_tokens", 6),
        **fields,
    )


def step(own: Scheduler) -> Step:
    """One step, in which every branch gets token 7."""
    made = own.schedule()
    assert made is not None
    tokens = [TokenResult(sequence_id=s.sequence_id, token_id=7) for s in made.sequences if s.sampling]
    own.update(StepResult(step_id=made.step_id, tokens=tuple(tokens)))
    own.check_integrity()
    return made


def test_the_input_goes_out_once() -> None:
    own = scheduler()
    (branch,) = own.add(request("a", [5, 6, 7, 8, 9]))
    first, second = step(own).sequences[0], step(own).sequences[0]
    assert unpack_ids(first.encoder_ids).tolist() == [5, 6, 7, 8, 9] and second.encoder_ids == b""
    assert first.num_encoder == second.num_encoder == 5 == branch.num_input
    assert len(unpack_ids(first.cross_block_ids)) == 2
    assert first.cross_block_ids == second.cross_block_ids
    assert not set(unpack_ids(first.cross_block_ids)) & set(unpack_ids(second.block_ids))


def test_with_a_step_in_flight_it_does_not_go_out_again() -> None:
    own = scheduler()
    own.add(request("a", [5, 6, 7]))
    steps = own.schedule(), own.schedule()
    assert [made is not None and made.sequences[0].encoder_ids != b"" for made in steps] == [True, False]


def test_after_lost_pages_it_goes_out_again() -> None:
    own = scheduler()
    own.add(request("a", [5, 6, 7]))
    step(own)
    own.reset()
    again = step(own).sequences[0]
    assert unpack_ids(again.encoder_ids).tolist() == [5, 6, 7] and again.start == 0


def test_branches_share_what_the_first_has_encoded() -> None:
    own = scheduler(enable_prefix_caching=False)
    own.add(request("a", [5, 6, 7, 8, 9], n=3))
    assert [s.encoder_ids != b"" for s in step(own).sequences] == [True]
    shares = step(own).sequences
    assert len(shares) == 3 and all(s.encoder_ids == b"" for s in shares)
    assert len({s.cross_block_ids for s in shares}) == 1


def test_inputs_take_their_share_of_a_step() -> None:
    """The second one waits for a step that has room for it whole."""
    own = scheduler()
    own.add(request("a", list(range(10))))
    own.add(request("b", list(range(10))))
    assert [s.sequence_id for s in step(own).sequences] == [0]
    assert [s.sequence_id for s in step(own).sequences] == [0, 1]


def test_a_decoder_is_not_mistaken_for_one_on_another_input() -> None:
    """The same ids, and other keys and values."""
    own = scheduler()
    prompt = [START, 2, 3, 4, 5]
    for name, encoder_ids in (("a", [5, 6]), ("b", [6, 5]), ("c", [5, 6])):
        own.add(request(name, encoder_ids, prompt_ids=prompt, max_tokens=1))
        share = step(own).sequences[0]
        assert share.start == (4 if name == "c" else 0) and share.encoder_ids != b""


def test_when_blocks_run_out_the_youngest_begins_anew() -> None:
    own = scheduler(num_blocks=8, enable_prefix_caching=False)
    own.add(request("a", list(range(8)), max_tokens=12))
    own.add(request("b", list(range(5)), max_tokens=12))
    inputs = {0: 0, 1: 0}
    while own.num_unfinished:
        for share in step(own).sequences:
            inputs[share.sequence_id] += share.encoder_ids != b""
    assert inputs == {0: 1, 1: 2} and own.stats.num_preemptions == 1


def test_forced_tokens_are_the_first_and_the_last() -> None:
    own = scheduler()
    own.add(request("a", [5], forced_first_id=8, forced_last_id=9, max_tokens=3))
    assert [step(own).sequences[0].forced_id for _ in range(3)] == [8, -1, 9]


@pytest.mark.parametrize(
    ("length", "options", "why"),
    [
        (16, {}, "the encoder takes 15"),
        (12, {"max_encoder_len": 11}, "the encoder takes 11"),
        (9, {"num_blocks": 3}, "no room for them and a decoder's"),
        (0, {}, "is empty"),
    ],
)
def test_what_can_never_be_encoded_is_refused(length: int, options: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        scheduler(**options).add(request("a", list(range(length))))
    assert caught.value.field == "prompt"


def test_beams_that_leave_no_room_beside_the_encoders_input_are_refused_by_name() -> None:
    """Twelve blocks of four: six beams have two each, and the input takes three."""
    limits = Limits(max_model_len=48, num_blocks=12, block_size=4, max_num_seqs=8, max_encoder_len=40)
    search = request("r", list(range(1, 10)), n=6)
    with pytest.raises(RequestError, match=r"each of 6 beams has room for 2 blocks") as caught:
        make_branches(replace(search, beams=BeamSpec(num_beams=6, num_returned=1)), 0, limits)
    assert caught.value.field == "num_beams"
    make_branches(search, 0, limits)
