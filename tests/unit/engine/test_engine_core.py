"""The core serves requests step by step, and one request's trouble is not another's."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.engine.core import EngineCore
from shoal.engine.results import Collector
from shoal.engine.supervisor import RestartPolicy
from shoal.errors import EngineDeadError, QueueFullError, RankError, RankMemoryError, RequestError
from shoal.messages import PLACEHOLDER_ID, StepResult, unpack_ids
from shoal.sampling_params import SamplingParams
from support.engines import CountingExecutor, LetterBackend, make_core


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def run(core: EngineCore, **requests: tuple[str, SamplingParams]) -> dict[str, Collector]:
    """Serve requests together to their ends."""
    collectors = {}
    for request_id, (prompt, params) in requests.items():
        core.submit(request_id, ids(prompt), params)
        collectors[request_id] = Collector(request_id, prompt, ids(prompt), params)
    while core.has_work:
        for delta in core.step():
            collectors[delta.request_id].push(delta)
    return collectors


def texts(collector: Collector) -> list[tuple[str, str | None]]:
    return [(branch.text, branch.finish_reason) for branch in collector.final().outputs]


def test_requests_side_by_side_each_get_their_own() -> None:
    done = run(make_core(), a=("a", SamplingParams(max_tokens=3)), w=("w", SamplingParams(max_tokens=9)))
    assert texts(done["a"]) == [("bcd", "length")]
    assert texts(done["w"]) == [("xy", "stop")], "z ends the sequence and is not shown"


def test_a_stop_string_ends_the_branch_in_the_scheduler_too() -> None:
    executor = CountingExecutor()
    core = make_core(executor)
    done = run(core, a=("a", SamplingParams(max_tokens=20, stop="de")))
    assert texts(done["a"]) == [("bc", "stop")]
    assert len(executor.steps) == 4, "no step after the one that completed it"
    assert core.stats().kv_cache_usage == 0


def test_branches_end_each_on_its_own() -> None:
    done = run(make_core(), a=("a", SamplingParams(n=3, max_tokens=5, stop=["d", "g"])))
    assert texts(done["a"]) == [("bc", "stop"), ("ce", "stop"), ("", "stop")]
    assert done["a"].final().finished


def test_a_failing_branch_fails_alone() -> None:
    core = make_core()
    done = run(core, bad=("?", SamplingParams()), good=("a", SamplingParams(max_tokens=2)))
    assert texts(done["bad"]) == [("", "error")]
    assert done["bad"].final().outputs[0].error == "logits are not finite"
    assert texts(done["good"]) == [("bc", "length")]
    assert core.stats().requests_total == {"error": 1, "length": 1}


def test_text_that_cannot_be_made_fails_its_request_alone() -> None:
    class Broken(LetterBackend):
        def decode(self, ids: Any, **options: Any) -> str:
            if ord("Q") in ids:
                raise OverflowError("no such letter")
            return super().decode(ids, **options)

    core = make_core(backend=Broken())
    params = SamplingParams(max_tokens=3)
    done = run(core, bad=("P", params), good=("a", params))
    assert texts(done["bad"]) == [("", "error")]
    assert "no such letter" in (done["bad"].final().outputs[0].error or "")
    assert texts(done["good"]) == [("bcd", "length")]
    assert core.stats().kv_cache_usage == 0


def test_a_refused_request_leaves_nothing_behind() -> None:
    """Stop strings without a tokenizer are refused after the scheduler has seen the request."""
    core = make_core(has_tokenizer=False)
    with pytest.raises(RequestError, match="stop"):
        core.submit("r", [97], SamplingParams(stop="x"))
    assert not core.has_work
    core.submit("r", [97], SamplingParams(max_tokens=1))
    (delta,) = core.step()
    assert delta.outputs[0].token_ids == [98]
    assert core.stats().prompt_tokens_total == 1


def test_a_refused_request_changes_no_later_seed() -> None:
    seeds = []
    for refused in (0, 2):
        executor = CountingExecutor()
        core = make_core(executor)
        for _ in range(refused):
            with pytest.raises(RequestError):
                core.submit("r", [97] * 100, SamplingParams())
        run(core, r=("a", SamplingParams(max_tokens=1)))
        sampling = executor.steps[0].sequences[0].sampling
        assert sampling is not None
        seeds.append(sampling.seed)
    assert seeds[0] == seeds[1]


def test_a_name_in_use_is_refused_and_its_owner_goes_on() -> None:
    core = make_core()
    core.submit("r", ids("a"), SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="still being served"):
        core.submit("r", ids("b"), SamplingParams())
    assert core.step()[0].outputs[0].text == "b"


def test_a_full_queue_refuses() -> None:
    core = make_core(max_num_seqs=1, max_num_queued_requests=1)
    for request_id in ("running", "waiting"):
        core.submit(request_id, ids("a"), SamplingParams())
    with pytest.raises(QueueFullError):
        core.submit("third", ids("a"), SamplingParams())


def test_an_aborted_request_is_not_heard_of_again() -> None:
    core = make_core()
    core.submit("r", ids("a"), SamplingParams(n=2, max_tokens=9))
    core.step()
    core.abort("r")
    core.abort("r")
    core.abort("never seen")
    assert not core.has_work and core.step() == []
    assert core.stats().requests_total == {"abort": 2}
    assert core.stats().kv_cache_usage == 0


def test_ranks_that_die_too_often_are_the_callers_matter() -> None:
    executor = CountingExecutor()
    core = make_core(executor)
    core.submit("r", ids("a"), SamplingParams())

    def die() -> None:
        raise RankError("rank 1 was killed by signal 9", 1)

    executor.before = die
    with pytest.raises(EngineDeadError, match="signal 9"):
        core.step()
    assert core.has_work


def test_the_next_step_is_on_its_way_before_the_last_one_is_answered() -> None:
    executor = CountingExecutor()
    core = make_core(executor, steps_in_flight=2)
    core.submit("r", ids("a"), SamplingParams(max_tokens=4))
    assert core.step()[0].outputs[0].text == "b"
    assert executor.events == [("submit", 0), ("submit", 1), ("collect", 0)]
    assert core.step()[0].outputs[0].text == "c"
    assert executor.events[3:] == [("submit", 2), ("collect", 1)]


def test_who_has_ended_is_not_heard_of_again_and_its_last_step_is_still_taken_in() -> None:
    """By a token, by a stop string, by an abort: the step in flight is answered, to nobody."""
    for prompt, params, aborts in (
        ("y", SamplingParams(), False),
        ("a", SamplingParams(stop="b"), False),
        ("a", SamplingParams(), True),
    ):
        core = make_core(steps_in_flight=2)
        core.submit("r", ids(prompt), params)
        (delta,) = core.step()
        assert delta.finished != aborts
        if aborts:
            core.abort("r")
        assert core.has_work and core.stats().kv_cache_usage > 0
        assert core.step() == []
        assert not core.has_work and core.stats().kv_cache_usage == 0


def test_a_step_ahead_changes_no_answer() -> None:
    """Ends of every kind, more requests than seats, and one that fails."""
    requests = {
        "eos": ("v", SamplingParams(max_tokens=30)),
        "stop": ("a", SamplingParams(n=3, max_tokens=20, stop=["d", "gi"])),
        "ids": ("b", SamplingParams(max_tokens=20, stop_token_ids=[ord("h")], min_tokens=4)),
        "length": ("abcdefgh" * 5, SamplingParams(max_tokens=7, logprobs=1, presence_penalty=1.0)),
        "bad": ("?", SamplingParams(max_tokens=5)),
        "one": ("c", SamplingParams(n=2, max_tokens=1)),
    }
    answers = []
    for steps_in_flight in (1, 2):
        core = make_core(max_num_seqs=3, steps_in_flight=steps_in_flight)
        done = run(core, **requests)
        answers.append({name: collector.final() for name, collector in done.items()})
        assert core.stats().kv_cache_usage == 0
    assert answers[0] == answers[1]


def test_counters_count() -> None:
    core = make_core()
    run(core, a=("abcdefgh", SamplingParams(max_tokens=3)))
    run(core, b=("abcdefgh", SamplingParams(max_tokens=3)))
    stats = core.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total, stats.steps_total) == (16, 6, 6)
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (16, 4)
    assert (stats.num_running, stats.num_waiting, stats.requests_total) == (0, 0, {"length": 2})


POISON = ord("!")


class Mortal(CountingExecutor):
    """Its ranks do not survive a step that computes ``POISON``."""

    def collect(self) -> StepResult:
        for sequence in self._submitted[0].sequences:
            computed = unpack_ids(sequence.token_ids)
            if PLACEHOLDER_ID in computed:
                computed.append(self._sampled[sequence.sequence_id])
            if POISON in computed:
                raise RankError("rank 0: ValueError: no such letter", 0)
        return super().collect()


def run_on(core: EngineCore, **requests: tuple[str, SamplingParams]) -> dict[str, Collector]:
    """As ``run``, through restarts."""
    collectors = {}
    for request_id, (prompt, params) in requests.items():
        core.submit(request_id, ids(prompt), params)
        collectors[request_id] = Collector(request_id, prompt, ids(prompt), params)
    while core.has_work:
        core.supervisor.wait(10)
        core.check()
        for delta in core.step():
            collectors[delta.request_id].push(delta)
        core.check_integrity()
    return collectors


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("poison", ["ab!", "\x1e"])  # in its prompt; in its third token
def test_a_request_that_ranks_do_not_survive_is_failed_alone(poison: str, steps_in_flight: int) -> None:
    executor = Mortal()
    core = make_core(executor, steps_in_flight=steps_in_flight, restarts=RestartPolicy(2))
    good = {letter: (letter, SamplingParams(max_tokens=9, n=2)) for letter in "ABCDEF"}
    done = run_on(core, bad=(poison, SamplingParams(max_tokens=9, n=2)), **good)
    for branch in done.pop("bad").final().outputs:
        assert branch.finish_reason == "error" and "no such letter" in (branch.error or "")
    assert {name: texts(collector) for name, collector in done.items()} == {
        name: texts(collector) for name, collector in run(make_core(), **good).items()
    }
    assert core.stats().requests_total == {"error": 2, "length": 12}
    assert core.stats().kv_cache_usage == 0
    assert executor.num_loads <= 6


def test_two_such_requests_are_both_found() -> None:
    core = make_core(Mortal(), restarts=RestartPolicy(4))
    params = SamplingParams(max_tokens=3)
    done = run_on(core, x=("x!", params), a=("a", params), y=("y!", params), b=("b", params))
    assert [texts(done[name])[0][1] for name in "xayb"] == ["error", "length", "error", "length"]


def test_ranks_that_survive_nobody_are_not_the_requests_fault() -> None:
    core = make_core(Mortal(), restarts=RestartPolicy(3))
    params = SamplingParams(max_tokens=3)
    with pytest.raises(EngineDeadError, match="max_restarts"):
        run_on(core, **{name: (f"{name}!", params) for name in "abcd"})


def test_a_step_that_takes_too_much_memory_is_made_smaller_and_tried_again() -> None:
    class Small(CountingExecutor):
        """Its ranks have memory for so many tokens."""

        room = 20

        def collect(self) -> StepResult:
            if sum(len(unpack_ids(s.token_ids)) for s in self._submitted[0].sequences) > self.room:
                raise RankMemoryError("rank 0: MemoryError", 0)
            return super().collect()

    executor = Small()
    core = make_core(executor)
    prompt = "abcdefgh" * 4
    done = run_on(core, r=(prompt, SamplingParams(max_tokens=2)))
    assert texts(done["r"]) == [("ij", "length")]
    assert [len(unpack_ids(step.sequences[0].token_ids)) for step in executor.steps] == [16, 16, 1]
    executor.room = 0
    core.submit("r", ids("a"), SamplingParams())
    assert core.step() == []
    core.supervisor.wait(10)
    core.check()
    with pytest.raises(EngineDeadError, match="MemoryError"):
        core.step()


def test_when_the_suspect_on_trial_is_aborted_the_others_run_again() -> None:
    core = make_core(Mortal(), restarts=RestartPolicy(9))
    params = SamplingParams(max_tokens=3)
    core.submit("bad", ids("!"), params)
    core.submit("good", ids("a"), params)
    for _ in range(2):
        core.step()
        core.supervisor.wait(10)
        core.check()
    core.abort("bad")
    tokens = [delta.outputs[0].token_ids for _ in range(3) for delta in core.step()]
    assert tokens == [[98], [99], [100]] and not core.has_work
