"""Beams over the scheduler find what a search without blocks, queues and budgets finds, however tight."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.cache.manager import CacheManager
from shoal.cache.spec import WindowSpec
from shoal.errors import RequestError
from shoal.messages import SamplingSpec, SequenceStep, StepResult, TokenResult, unpack_ids
from shoal.sched.beams import BeamGroup, BeamSpec
from shoal.sched.request import BranchUpdate, RequestSpec
from shoal.sched.scheduler import Scheduler

VOCABULARY = 23
ENDING = frozenset({3, 11})


def logprobs(ids: Sequence[int]) -> list[float]:
    """A made-up model: what follows a whole sequence."""
    numbers = random.Random(repr(list(ids)))
    return [-6 * numbers.random() - 0.1 for _ in range(VOCABULARY)]


def searched(
    prompt: list[int], spec: BeamSpec, max_tokens: int, num_ending: int = len(ENDING)
) -> list[list[int]]:
    """The output ids of the sequences that transformers' search returns: its tensors, written as lists."""
    num_beams, floor = spec.num_beams, -1e9
    beams = [(0.0, list(prompt))] + [(floor, list(prompt))] * (num_beams - 1)
    done: list[tuple[float, list[int], bool]] = [(floor, [], False)] * num_beams
    for length in range(1, max_tokens + 1):
        every = [
            (score + logprob, [*ids, token])
            for score, ids in beams
            for token, logprob in enumerate(logprobs(ids))
        ]
        top = sorted(every, key=lambda e: -e[0])[: max(2, 1 + num_ending) * num_beams]
        hits = [ids[-1] in ENDING or length == max_tokens for _, ids in top]
        going = [(score + hit * floor, ids) for (score, ids), hit in zip(top, hits, strict=True)]
        beams = sorted(going, key=lambda e: -e[0])[:num_beams]
        for place, ((score, ids), hit) in enumerate(zip(top, hits, strict=True)):
            if hit and place < num_beams:
                done.append((score / length**spec.length_penalty, ids, True))
        done = sorted(done, key=lambda e: -e[0])[:num_beams]
        is_full = all(is_sent for _, _, is_sent in done)
        longest = max_tokens if spec.early_stopping == "never" and spec.length_penalty > 0 else length
        is_hopeless = is_full and beams[0][0] / longest**spec.length_penalty <= done[-1][0]
        if all(hits) or is_hopeless or (is_full and spec.early_stopping is True):
            break
    return [ids[len(prompt) :] for _, ids, _ in done[: spec.num_returned]]


def request(name: str, prompt: list[int], beams: BeamSpec, max_tokens: int = 9) -> RequestSpec:
    num_candidates = BeamGroup.num_candidates(beams.num_beams, len(ENDING))
    return RequestSpec(
        request_id=name,
        prompt_ids=prompt,
        sampling=tuple(
            SamplingSpec(temperature=0.0, branch=branch, num_candidates=num_candidates)
            for branch in range(beams.num_beams)
        ),
        max_tokens=max_tokens,
        eos_ids=frozenset({3}),
        stop_ids=ENDING - {3},
        beams=beams,
    )


class Ranks:
    """Keeps what was written where, and answers with candidates or, without a search, the likeliest token."""

    def __init__(self, **options: Any) -> None:
        num_blocks, caches = options.pop("num_blocks", 200), options.pop("enable_prefix_caching", True)
        self.block_size = 4
        window = None
        if "window" in options:
            window = WindowSpec(block_size=self.block_size, **options.pop("window"))
        cache = CacheManager(num_blocks, self.block_size, enable_prefix_caching=caches, window=window)
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 200, **options}
        self.scheduler = Scheduler(cache, **limits)
        self.kept: dict[int, int] = {}  # token by slot
        self.window = window
        self.window_kept: dict[int, int] = {}  # the same of layers that see a window
        self.updates: list[BranchUpdate] = []
        self.fails = False
        self.bars_from = 1 << 30  # sequences of so many tokens find none to go on with
        self.num_forks = 0

    def run(self) -> None:
        while self.scheduler.num_unfinished:
            step = self.scheduler.schedule()
            assert step is not None
            tokens = tuple(self.token(s) for s in step.sequences)
            result = StepResult(step_id=step.step_id, tokens=tuple(t for t in tokens if t is not None))
            self.updates += self.scheduler.update(result)
            self.scheduler.check_integrity()

    def token(self, sequence: SequenceStep) -> TokenResult | None:
        blocks, ids = unpack_ids(sequence.block_ids), unpack_ids(sequence.token_ids)
        slots = [block * self.block_size + offset for block in blocks for offset in range(self.block_size)]
        for place, token in enumerate(ids, sequence.start):
            self.kept[slots[place]] = token
        if self.window is not None:
            self.check_window(self.window, sequence, slots)
        if sequence.sampling is None:
            return None
        if self.fails:
            return TokenResult(sequence_id=sequence.sequence_id, error="it broke")
        whole = [self.kept[slot] for slot in slots[: sequence.start + len(ids)]]
        ranked = sorted(enumerate(logprobs(whole)), key=lambda e: -e[1])[
            : sequence.sampling.num_candidates or 1
        ]
        if len(whole) >= self.bars_from:
            return TokenResult(sequence_id=sequence.sequence_id, token_id=0)
        top_ids, top = zip(*ranked, strict=True)
        return TokenResult(
            sequence_id=sequence.sequence_id, token_id=top_ids[0], top_ids=top_ids, top_logprobs=top
        )

    def check_window(self, window: WindowSpec, sequence: SequenceStep, slots: list[int]) -> None:
        """Write what a step brings, and find what its first token's window shows."""
        blocks, count = unpack_ids(sequence.window_block_ids), len(unpack_ids(sequence.token_ids))
        for place in range(max(0, sequence.start - window.window + 1), sequence.start + count):
            index, offset = divmod(place, self.block_size)
            assert index >= sequence.window_base, "a block in the window is gone"
            slot = blocks[index - sequence.window_base] * self.block_size + offset
            token = self.kept[slots[place]]
            if place >= sequence.start:
                self.window_kept[slot] = token
            assert self.window_kept.get(slot) == token

    def outputs(self, name: str) -> list[list[int]]:
        own = [update for update in self.updates if update.request.request_id == name]
        branches = sorted({update.request.branch for update in own})
        return [[t for u in own if u.request.branch == branch for t in u.token_ids] for branch in branches]


PROMPTS = [[5], [6, 7, 8], list(range(4, 8)), list(range(5, 18))]
SEARCHES = [
    BeamSpec(num_beams=2, num_returned=1),
    BeamSpec(num_beams=4, num_returned=4, early_stopping=True),
    BeamSpec(num_beams=3, num_returned=2, length_penalty=2.0, early_stopping="never"),
    BeamSpec(num_beams=4, num_returned=3, length_penalty=-0.5),
]
TIGHT: dict[str, dict[str, Any]] = {
    "roomy": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "few blocks": {
        "num_blocks": 0,
        "enable_prefix_caching": False,
    },  # as many as the longest one's beams take
    "few tokens": {"max_num_batched_tokens": 3},
    "few seats": {"max_num_seqs": 4},
    "windows": {"window": {"window": 5, "num_blocks": 90}, "enable_prefix_caching": False},
    "few windows": {"window": {"window": 5, "num_blocks": 14}, "max_num_batched_tokens": 3},
    "nothing kept": {"keeps_kv": False, "enable_prefix_caching": False, "max_model_len": 64},
}


@pytest.mark.parametrize("room", TIGHT)
@pytest.mark.parametrize("beams", SEARCHES, ids=str)
def test_the_search_is_transformers(beams: BeamSpec, room: str) -> None:
    """Several searches at once, of prompts from one token to several blocks."""
    options = dict(TIGHT[room])
    if room == "few blocks":
        options["num_blocks"] = 6 * beams.num_beams
    ranks = Ranks(**options)
    for number, prompt in enumerate(PROMPTS):
        ranks.scheduler.add(request(str(number), prompt, beams))
    ranks.run()
    for number, prompt in enumerate(PROMPTS):
        assert ranks.outputs(str(number)) == searched(prompt, beams, 9)
    assert ranks.scheduler.stats.cache_usage == 0


def test_beams_that_find_no_room_are_computed_anew() -> None:
    """Searches that fit one at a time: the younger ones' beams give their blocks up for the older ones'."""
    beams = SEARCHES[2]
    ranks = Ranks(num_blocks=6 * beams.num_beams, enable_prefix_caching=False)
    for number, prompt in enumerate(PROMPTS):
        ranks.scheduler.add(request(str(number), prompt, beams))
    ranks.run()
    assert [ranks.outputs(str(n)) for n in range(4)] == [searched(prompt, beams, 9) for prompt in PROMPTS]
    assert ranks.scheduler.stats.num_preemptions > 0


def test_ends_say_why() -> None:
    """Each sequence's last update, and no other, has its reason."""
    ranks = Ranks()
    ranks.scheduler.add(request("a", [5, 6], SEARCHES[1]))
    ranks.run()
    ends = [update for update in ranks.updates if update.finish_reason]
    assert [update.request.branch for update in ends] == [0, 1, 2, 3]
    for update in ends:
        (last,) = update.token_ids
        if last == 3:
            assert (update.finish_reason, update.stop_reason) == ("stop", None)
        elif last in ENDING:
            assert (update.finish_reason, update.stop_reason) == ("stop", last)
        else:
            assert update.finish_reason == "length"


def _no_text(output_ids: Sequence[int]) -> str | None:
    raise UnicodeError(f"no text for {list(output_ids)}")


@pytest.mark.parametrize("change", [{"find_stop": _no_text}, {"length_penalty": 1e6}], ids=["text", "score"])
def test_a_search_whose_choice_raises_ends_alone(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Others go on, and its blocks are free."""
    ranks = Ranks()
    for name, beams in (("bad", replace(SEARCHES[1], **change)), ("good", SEARCHES[1])):
        ranks.scheduler.add(request(name, PROMPTS[1], beams))
    ranks.run()
    bad = [update for update in ranks.updates if update.request.request_id == "bad"]
    assert [update.finish_reason for update in bad] == ["error"] * 4
    assert all("Error: " in (update.error or "") for update in bad) and "request bad" in caplog.text
    assert ranks.outputs("good") == searched(PROMPTS[1], SEARCHES[1], 9)
    assert ranks.scheduler.num_unfinished == 0 and ranks.scheduler.stats.cache_usage == 0


def test_each_token_comes_with_what_the_search_added_up() -> None:
    """The logprobs of a sequence's tokens make its score, and each is among its step's candidates."""
    ranks = Ranks()
    beams = SEARCHES[3]
    ranks.scheduler.add(request("a", [5, 6], beams))
    ranks.run()
    for branch in range(3):
        own = [u.token for u in ranks.updates if u.request.branch == branch and u.token is not None]
        ids = [5, 6]
        for token in own:
            known = logprobs(ids)
            assert token.logprob == known[token.token_id]
            assert token.rank == sorted(known, reverse=True).index(token.logprob) + 1
            assert token.top_ids[0] == known.index(max(known))
            ids.append(token.token_id)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_stop_strings_end_beams_as_tokens_do(early_stopping: bool | str) -> None:
    """A search that asks whether an output ends finds what one with those ending tokens finds."""
    spec = BeamSpec(num_beams=3, num_returned=3, early_stopping=early_stopping)
    asking = replace(spec, find_stop=lambda ids: "!" if ids[-1] in ENDING else None)
    ranks = Ranks()
    for number, prompt in enumerate(PROMPTS):
        told = replace(request(str(number), prompt, asking), eos_ids=frozenset(), stop_ids=frozenset())
        ranks.scheduler.add(told)
    ranks.run()
    for number, prompt in enumerate(PROMPTS):
        # Transformers takes as many candidates as there are ending tokens; here none is known before.
        assert ranks.outputs(str(number)) == searched(prompt, spec, 9, num_ending=0)
    ends = [u for u in ranks.updates if u.finish_reason]
    assert {(u.finish_reason, u.stop_reason) for u in ends} <= {("stop", "!"), ("length", None)}
    assert any(u.stop_reason == "!" for u in ends)


def test_a_search_without_a_token_to_go_on_with_is_told() -> None:
    """All were barred."""
    ranks = Ranks()
    ranks.bars_from = 3
    ranks.scheduler.add(request("a", [5, 6], SEARCHES[3]))
    ranks.run()
    assert [u.finish_reason for u in ranks.updates] == ["error"] * 3
    assert all("no token is left" in str(u.error) for u in ranks.updates)


def test_a_beam_that_fails_ends_the_search() -> None:
    """Whoever waits for its sequences is told."""
    ranks = Ranks()
    ranks.scheduler.add(request("a", [5, 6], SEARCHES[3]))
    ranks.fails = True
    ranks.run()
    assert [(u.request.branch, u.finish_reason, u.error) for u in ranks.updates] == [
        (branch, "error", "it broke") for branch in range(3)
    ]


def test_an_abort_takes_all_beams() -> None:
    """Running, waiting and parked."""
    ranks = Ranks(max_num_seqs=4)
    ranks.scheduler.add(request("a", [5, 6], SEARCHES[3]))
    for _ in range(3):
        step = ranks.scheduler.schedule()
        assert step is not None
        tokens = tuple(token for s in step.sequences if (token := ranks.token(s)) is not None)
        ranks.scheduler.update(StepResult(step_id=step.step_id, tokens=tokens))
    ranks.scheduler.abort("a")
    ranks.scheduler.check_integrity()
    assert ranks.scheduler.num_unfinished == 0 and ranks.scheduler.stats.cache_usage == 0


def test_replay_goes_on_where_the_search_was() -> None:
    """The pages are lost in the middle; what was chosen stays."""
    ranks = Ranks()
    ranks.scheduler.add(request("a", [5, 6, 7, 8, 9], SEARCHES[3]))
    for number in range(5):
        step = ranks.scheduler.schedule()
        assert step is not None
        if number == 4:
            ranks.scheduler.reset()
            ranks.kept.clear()
            break
        tokens = tuple(token for s in step.sequences if (token := ranks.token(s)) is not None)
        ranks.updates += ranks.scheduler.update(StepResult(step_id=step.step_id, tokens=tokens))
    ranks.run()
    assert ranks.outputs("a") == searched([5, 6, 7, 8, 9], SEARCHES[3], 9)


def test_more_beams_than_run_at_once_are_refused() -> None:
    """By name."""
    with pytest.raises(RequestError, match="max_num_seqs is 3") as caught:
        Ranks(max_num_seqs=3).scheduler.add(request("a", [5], SEARCHES[1]))
    assert caught.value.field == "num_beams"
