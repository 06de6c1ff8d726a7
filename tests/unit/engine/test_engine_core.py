"""The core serves requests step by step, and one request's trouble is not another's."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.engine.core import EngineCore
from shoal.engine.results import Collector
from shoal.errors import QueueFullError, RankError, RequestError
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


def test_dead_ranks_are_the_callers_matter() -> None:
    executor = CountingExecutor()
    core = make_core(executor)
    core.submit("r", ids("a"), SamplingParams())

    def die() -> None:
        raise RankError("rank 1 was killed by signal 9", 1)

    executor.before = die
    with pytest.raises(RankError, match="signal 9"):
        core.step()
    assert core.has_work


def test_counters_count() -> None:
    core = make_core()
    run(core, a=("abcdefgh", SamplingParams(max_tokens=3)))
    run(core, b=("abcdefgh", SamplingParams(max_tokens=3)))
    stats = core.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total, stats.steps_total) == (16, 6, 6)
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (16, 4)
    assert (stats.num_running, stats.num_waiting, stats.requests_total) == (0, 0, {"length": 2})
