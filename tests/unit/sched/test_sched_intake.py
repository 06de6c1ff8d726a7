from __future__ import annotations

import pytest
from sched_words import spec

from shoal.errors import RequestError
from shoal.sched.intake import Limits, make_branches

LIMITS = Limits(max_model_len=10, num_blocks=6, block_size=2)
ROOMY = Limits(max_model_len=100, num_blocks=3, block_size=2)


def only_branch(limits=LIMITS, prompt_ids=(1, 2, 3), **options):
    return make_branches(spec("r", list(prompt_ids), **options), 0, limits)[0]


@pytest.mark.parametrize(
    ("prompt_ids", "words"),
    [
        ([], "empty"),
        ([1, -2], "at least 0, got -2"),
        ([1, 2**31], "token ids"),
        ([1, "a"], "token ids"),
        ([1, 2.5], "token ids"),
        (None, "token ids"),
        ([1] * 10, r"max_model_len \(10\)"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_name(prompt_ids, words):
    """RequestError with field and reason."""
    with pytest.raises(RequestError, match=words) as caught:
        make_branches(spec("r", prompt_ids), 0, LIMITS)
    assert caught.value.field == "prompt"


def test_a_prompt_larger_than_all_blocks_is_refused():
    """Six positions are there, seven are wanted."""
    assert only_branch(ROOMY, [1] * 6).max_tokens == 1
    with pytest.raises(RequestError, match="3 blocks of 2") as caught:
        only_branch(ROOMY, [1] * 7)
    assert caught.value.field == "prompt"


def test_no_output_at_all_is_refused():
    """max_tokens is at least one."""
    with pytest.raises(RequestError) as caught:
        only_branch(max_tokens=0)
    assert caught.value.field == "max_tokens"


def test_output_is_capped_by_the_model_length_and_by_the_blocks():
    """The last output token takes part in the length, and needs no slot."""
    assert only_branch(max_tokens=5).max_tokens == 5
    assert only_branch(max_tokens=50).max_tokens == 7
    assert only_branch(max_tokens=None).max_tokens == 7
    assert only_branch(ROOMY, max_tokens=50).max_tokens == 4


def test_the_longest_prompt_that_fits_gives_one_token():
    """One below the model length."""
    assert only_branch(prompt_ids=[1] * 9, max_tokens=None).max_tokens == 1


def test_ignoring_eos_leaves_the_stop_tokens():
    """Only the end of sequence is ignored."""
    request = only_branch(ignore_eos=True)
    assert not request.eos_ids and request.stop_ids


def test_branches_follow_the_first_with_arrays_of_their_own():
    """Ids in order, one leader, whole blocks shared, a token left to each."""
    first, second, third = make_branches(spec("r", [1, 2, 3, 4], n=3), 7, LIMITS)
    assert [first.sequence_id, second.sequence_id, third.sequence_id] == [7, 8, 9]
    assert [first.branch, second.branch, third.branch] == [0, 1, 2]
    assert first.leader is None and second.leader is first and third.leader is first
    assert second.num_shared == 2
    second.token_ids.append(9)
    assert list(first.token_ids) == [1, 2, 3, 4] and second.blocks.token_ids is second.token_ids


def test_branches_of_a_short_prompt_are_independent():
    """There is no full block to wait for."""
    assert make_branches(spec("r", [1, 2], n=2), 0, LIMITS)[1].leader is None


def test_the_callers_prompt_is_copied():
    """Output never shows up in a caller's list."""
    prompt_ids = [1, 2, 3]
    only_branch(prompt_ids=prompt_ids).token_ids.append(4)
    assert prompt_ids == [1, 2, 3]
