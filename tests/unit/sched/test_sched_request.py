from __future__ import annotations

from array import array

import pytest

from shoal.cache.manager import SequenceBlocks
from shoal.messages import PLACEHOLDER_ID, SamplingSpec, TokenResult, unpack_ids
from shoal.sched.request import BranchUpdate, Request


def branch(prompt: list[int], output: list[int], *, min_tokens: int = 0, **options) -> Request:
    token_ids = array("i", prompt + output)
    sampling = options.pop("sampling", SamplingSpec(temperature=0.0, min_tokens=min_tokens))
    defaults = {"max_tokens": 10, "eos_ids": frozenset({8}), "stop_ids": frozenset({9})}
    return Request(
        sequence_id=3,
        request_id="r",
        sampling=sampling,
        token_ids=token_ids,
        num_prompt=len(prompt),
        blocks=SequenceBlocks(token_ids, block_ids=array("i", [5, 6])),
        **{**defaults, **options},
    )


@pytest.mark.parametrize(
    ("output", "options", "end"),
    [
        ([1], {}, None),
        ([8], {}, ("stop", None)),
        ([9], {}, ("stop", 9)),
        ([8], {"stop_ids": frozenset({8})}, ("stop", None)),
        ([8], {"eos_ids": frozenset(), "stop_ids": frozenset({8})}, ("stop", 8)),
        ([8], {"eos_ids": frozenset()}, None),
        ([1, 1], {"max_tokens": 2}, ("length", None)),
        ([1, 8], {"max_tokens": 2}, ("stop", None)),
        ([8], {"min_tokens": 2}, None),
        ([1, 9], {"min_tokens": 2}, ("stop", 9)),
        ([1, 8], {"min_tokens": 3, "max_tokens": 2}, ("length", None)),
    ],
)
def test_what_ends_a_branch_and_why(output, options, end):
    """End of sequence before stop token before length, and nothing but length before min_tokens."""
    assert branch([1, 8, 9], output, **options).end() == end


def test_a_prompt_that_ends_in_a_stop_token_ends_nothing():
    """Only output counts: a branch's first output decides, whatever the prompt holds."""
    assert branch([8, 9], [1]).end() is None


def test_prompt_and_output_are_told_apart():
    """One array, two parts."""
    request = branch([1, 2], [3])
    assert (list(request.prompt_ids), list(request.output_ids)) == ([1, 2], [3])
    assert (request.num_tokens, request.num_output, request.branch) == (3, 1, 0)


def test_a_share_that_stops_short_of_the_last_token_samples_nothing():
    """A chunk of a prompt carries tokens and table only."""
    request = branch([1, 2, 3], [])
    request.num_scheduled = 1
    share = request.step(1)
    assert (share.sequence_id, share.start, share.sampling, share.num_output) == (3, 1, None, 0)
    assert list(unpack_ids(share.token_ids)) == [2] and list(unpack_ids(share.block_ids)) == [5, 6]
    assert share.history == b"" and share.num_prompt == 0


def test_a_share_that_reaches_the_last_token_samples():
    """With the very sampling object, the output's length, and no history unless it is needed."""
    request = branch([1, 2, 3], [4])
    request.num_scheduled = 3
    share = request.step(1)
    assert share.sampling is request.sampling and share.num_output == 1
    assert share.history == b"" and share.num_prompt == 0


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}]
)
def test_penalties_bring_the_whole_history(penalty):
    """Prompt then output, and where one ends."""
    request = branch([1, 2, 3], [4], sampling=SamplingSpec(temperature=1.0, **penalty))
    share = request.step(4)
    assert list(unpack_ids(share.history)) == [1, 2, 3, 4] and share.num_prompt == 3


def test_a_share_behind_the_last_token_is_a_placeholder():
    """One id in the tokens and at the end of the history, and it counts as an output token."""
    request = branch([1, 2], [4], sampling=SamplingSpec(temperature=1.0, presence_penalty=0.5))
    request.num_scheduled = 3
    share = request.step(1)
    assert (share.start, share.num_output, share.num_prompt) == (3, 2, 2)
    assert list(unpack_ids(share.token_ids)) == [PLACEHOLDER_ID]
    assert list(unpack_ids(share.history)) == [1, 2, 4, PLACEHOLDER_ID]


def test_a_branch_is_ending_while_its_last_token_is_sampled():
    """Not before, and never while there is room for another."""
    request = branch([1, 2], [4], max_tokens=2)
    assert not request.is_ending
    request.num_scheduled = 3
    assert request.is_ending
    request = branch([1, 2], [4], max_tokens=3)
    request.num_scheduled = 3
    assert not request.is_ending


def test_an_update_lists_its_new_tokens():
    """One, or none with an error."""
    request = branch([1], [2])
    assert BranchUpdate(request, TokenResult(sequence_id=3, token_id=2)).token_ids == [2]
    assert BranchUpdate(request, error="x").token_ids == []
