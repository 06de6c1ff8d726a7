"""What crosses a process comes out as it went in, in few bytes."""

from __future__ import annotations

import gc

import pytest

from shoal.messages import (
    Message,
    SamplingSpec,
    SequenceStep,
    Step,
    StepResult,
    TokenResult,
    decode,
    encode,
    pack_ids,
)

WISHES = SamplingSpec(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    seed=2**64 - 1,
    branch=3,
    min_tokens=7,
    stop_ids=(2, 50_000),
    logprobs=0,
    logit_bias={7: -1.5},
)


def decoding(sequence_id: int, spec: SamplingSpec) -> SequenceStep:
    """A branch with some 200 tokens that brings one."""
    return SequenceStep(
        sequence_id=sequence_id,
        start=200,
        token_ids=pack_ids([4711]),
        block_ids=pack_ids(range(13)),
        sampling=spec,
        num_output=17,
    )


@pytest.mark.parametrize(
    "message",
    [
        Step(step_id=3, sequences=(decoding(2**40, WISHES), decoding(1, SamplingSpec(temperature=0.0)))),
        Step(
            step_id=0,
            sequences=(SequenceStep(sequence_id=0, start=0, token_ids=pack_ids([1]), block_ids=b""),),
        ),
        StepResult(
            step_id=3,
            tokens=(
                TokenResult(sequence_id=1, token_id=0),
                TokenResult(sequence_id=2, error="no token is left"),
                TokenResult(
                    sequence_id=3,
                    token_id=9,
                    logprob=-0.5,
                    rank=1,
                    top_ids=(9, 8),
                    top_logprobs=(-0.5, -1.0),
                ),
            ),
            compute_s=0.25,
        ),
    ],
)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_decoding_branch_takes_its_own_numbers_and_little_more() -> None:
    spec = SamplingSpec(temperature=0.0, seed=2**63)
    size = [len(encode(Step(step_id=1, sequences=(decoding(9, spec),) * count))) for count in (1, 257)]
    assert (size[1] - size[0]) / 256 < 200
    answers = (TokenResult(sequence_id=2**31, token_id=49_000),) * 256
    assert len(encode(StepResult(step_id=1, tokens=answers))) < 256 * 40


def test_what_comes_with_every_branch_is_nothing_to_the_garbage_collector() -> None:
    step = decode(encode(Step(step_id=1, sequences=(decoding(1, WISHES),))))
    assert isinstance(step, Step)
    (sequence,) = step.sequences
    assert not gc.is_tracked(sequence) and not gc.is_tracked(sequence.sampling)
