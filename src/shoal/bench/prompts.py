"""The prompts of workloads as token ids, and what of an answer to GSM8K is right. Knows no engine.

Every round of every workload gets prompts of its own, so that none finds another's in a prefix cache; what
the prompts of one round share (solved examples, a chat template's beginning) stays shared.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Protocol

from shoal.bench.workloads import Workload
from shoal.errors import UsageError

__all__ = ["PromptTokenizer", "instructions", "is_right", "make_prompts", "questions"]

_RANDOM_BELOW = 16000  # the source's vocabulary of random prompts
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class PromptTokenizer(Protocol):
    """What is asked of :class:`shoal.engine.text.Tokenizer`."""

    @property
    def is_present(self) -> bool: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


def questions() -> list[dict[str, str]]:
    """128 questions of GSM8K's test split: ``question``, and ``answer`` with the number behind ``####``."""
    text = (files("shoal.bench") / "data" / "gsm8k-test-128.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def instructions() -> list[str]:
    """64 instructions."""
    return (files("shoal.bench") / "data" / "instructions-64.txt").read_text(encoding="utf-8").splitlines()


def make_prompts(workload: Workload, tokenizer: PromptTokenizer, round_number: int) -> list[list[int]]:
    """A round's prompts.

    Raises:
        UsageError: the model has no tokenizer, and these prompts are text.
    """
    if workload.kind == "random":
        return _random(workload, tokenizer.vocab_size, _title(workload, round_number))
    if not tokenizer.is_present:
        raise UsageError(
            f"{workload.name}: its prompts are text, and this model has no tokenizer; "
            "the rollouts, few_blocks and multi_return_seq need none",
            field="workload",
        )
    title = _title(workload, round_number)
    if workload.kind == "gsm8k":
        return [tokenizer.encode(text) for text in _gsm8k(workload, title)]
    if workload.kind == "instructions":
        return [_instruction(f"{title} {text}", tokenizer) for text in instructions()[: workload.count]]
    return _mixed(workload, tokenizer, title)


def is_right(workload: Workload, index: int, text: str) -> bool:
    """Whether an answer to a gsm8k prompt ends in the right number: the one behind ``####``, or the last.

    Args:
        workload: of kind gsm8k.
        index: of the prompt.
        text: the answer; what follows a next ``Question:`` does not count.
    """
    asked = questions()[workload.shots + index]
    own = text.split("Question:", 1)[0]
    said = _NUMBER.findall(own.rpartition("####")[2]) if "####" in own else _NUMBER.findall(own)[-1:]
    return bool(said) and _value(said[0]) == _value(asked["answer"].rpartition("####")[2])


def _value(number: str) -> float:
    return float(number.replace(",", "").strip())


def _title(workload: Workload, round_number: int) -> str:
    """What no other round begins with, in its first tokens."""
    return f"{round_number} {workload.name}."


def _gsm8k(workload: Workload, title: str) -> list[str]:
    known = questions()
    solved = "".join(f"Question: {q['question']}\nAnswer: {q['answer']}\n\n" for q in known[: workload.shots])
    asked = known[workload.shots : workload.shots + workload.count]
    return [f"{title}\n\n{solved}Question: {q['question']}\nAnswer:" for q in asked]


def _instruction(text: str, tokenizer: PromptTokenizer) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.render_chat([{"role": "user", "content": text}])
    return tokenizer.encode(f"{text}\n")


def _random(workload: Workload, vocab_size: int, title: str) -> list[list[int]]:
    draw = random.Random(title)
    below = min(_RANDOM_BELOW, vocab_size)
    return [[draw.randrange(below) for _ in range(workload.prompt_tokens)] for _ in range(workload.count)]


def _mixed(workload: Workload, tokenizer: PromptTokenizer, title: str) -> list[list[int]]:
    """GSM8K's text, cut to lengths spaced evenly from the fewest tokens to the most."""
    known = questions()
    prompts = []
    for index in range(workload.count):
        share = index / max(workload.count - 1, 1)
        fewest, most = workload.fewest_prompt_tokens, workload.prompt_tokens
        length = round(fewest + share * (most - fewest))
        ids: list[int] = []
        at = 4 * index
        text = title
        while len(ids) < length:
            text += f" {known[at % len(known)]['question']} {known[at % len(known)]['answer']}"
            ids = tokenizer.encode(text)
            at += 1
        prompts.append(ids[:length])
    return prompts
