"""Prompts are the workload's, differ from round to round, and answers to GSM8K are marked by their number."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shoal.bench.prompts import instructions, is_right, make_prompts, questions
from shoal.bench.workloads import WORKLOADS, Scale
from shoal.errors import UsageError
from support.toy import VOCABULARY, ToyTokenizer


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_rounds_share_no_prompt_and_a_round_is_the_same_every_time(name: str) -> None:
    workload = Scale.parse("small").apply(WORKLOADS[name])
    first, second = (make_prompts(workload, ToyTokenizer(), number) for number in (1, 2))
    assert len(first) == workload.count
    assert first == make_prompts(workload, ToyTokenizer(), 1)
    beginnings = {tuple(prompt[:16]) for prompt in first}
    assert not beginnings & {tuple(prompt[:16]) for prompt in second}


def test_workloads_share_no_prompt_either() -> None:
    """Rows with equal options share an engine, and so its prefix cache."""
    seen: set[tuple[int, ...]] = set()
    for workload in WORKLOADS.values():
        beginnings = {tuple(p[:16]) for p in make_prompts(workload, ToyTokenizer(), 1)}
        assert not seen & beginnings, workload.name
        seen |= beginnings


def test_random_prompts_have_their_length_and_stay_in_the_vocabulary() -> None:
    prompts = make_prompts(WORKLOADS["few_blocks"], ToyTokenizer(is_present=False), 1)
    assert {len(prompt) for prompt in prompts} == {256}
    assert max(max(prompt) for prompt in prompts) == VOCABULARY - 1


def test_mixed_lengths_go_evenly_from_the_fewest_to_the_most() -> None:
    lengths = [len(prompt) for prompt in make_prompts(WORKLOADS["mixed_32"], ToyTokenizer(), 1)]
    assert (lengths[0], lengths[-1], len(lengths)) == (20, 400, 32)
    assert max(b - a for a, b in pairwise(lengths)) <= 13


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(UsageError, match="gsm8k_default: its prompts are text"):
        make_prompts(WORKLOADS["gsm8k_default"], ToyTokenizer(is_present=False), 1)


def test_there_are_enough_questions_and_instructions() -> None:
    assert len(questions()) == 128
    assert len(set(instructions())) == 64
    workload = WORKLOADS["gsm8k_default"]
    assert workload.shots + workload.count == 128


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("She makes 9 * 2 = 18.\n#### 18", True),
        ("#### 18.00", True),
        ("The answer is 18", True),
        ("The answer is 17", False),
        ("#### 17 and not 18", False),
        ("18\n\nQuestion: How many are 5 and 6?\nAnswer: 11", True),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_an_answer_is_right_by_its_number(text: str, right: bool) -> None:
    workload = Scale.parse("ci").apply(WORKLOADS["gsm8k_default"])
    number = questions()[workload.shots]["answer"].rpartition("####")[2].strip()
    assert is_right(workload, 0, text.replace("18", number).replace("17", "987654")) == right


def test_thousands_are_written_with_and_without_commas() -> None:
    workload = WORKLOADS["gsm8k_default"]
    numbers = [int(q["answer"].split("#### ")[1].replace(",", "")) for q in questions()[workload.shots :]]
    at = next(index for index, number in enumerate(numbers) if number >= 1000)
    number = numbers[at]
    assert is_right(workload, at, f"#### ${number:,}")
    assert is_right(workload, at, f"#### {number}")
