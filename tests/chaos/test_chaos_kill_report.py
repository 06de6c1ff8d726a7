"""The kill test judges itself: what it reads in a log, what it takes for a defect, when it says failed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chaos.kill import judge as judge_all
from chaos.kill import tiny
from chaos.kill_log import EventLog
from chaos.kill_matrix import markdown, write
from chaos.kill_report import Report
from chaos.kill_ties import Judge
from chaos.streams import Asks, Stream, asks_of
from shoal import LLM, SamplingParams


def entry(seconds: float, message: str, level: str = "info") -> str:
    return json.dumps({"time": f"2026-01-02T03:04:{seconds:06.3f}Z", "level": level, "message": message})


def test_a_log_tells_what_was_lost_when_and_in_which_moment(tmp_path: Path) -> None:
    lines = [
        entry(1, "starting ranks of generation 0: processes 11, 12"),
        entry(2, "LlamaForCausalLM ready in 1.0 s: 9 blocks of 16 tokens, sequences of up to 64"),
        "SHOAL_FAULT: raise at 1767323045.500",
        entry(6, "rank 1: RuntimeError; starting the ranks anew, 5 sequences will be replayed "
                 "(in flight: 2 in their prompt, 3 beyond)", "warning"),
        entry(7, "restart failed after 1.0 s: rank 0 was killed by signal 9", "warning"),
        entry(8, "restart 1: the ranks serve again after 1.0 s"),
        entry(9, "the engine failed", "error"),
        entry(9, "rank 1 failed:\nTraceback", "error"),
        entry(10, "half a line")[:-5],
    ]  # fmt: skip
    path = tmp_path / "log"
    path.write_text("\n".join(lines))
    log = EventLog(path)
    events = log.events()
    kinds = ["spawned", "ready", "fault", "lost", "failed", "served"]
    assert [event.kind for event in events] == kinds
    assert events[0].pids == (11, 12)
    assert (events[3].num_replayed, events[3].num_in_prompt, events[3].num_beyond) == (5, 2, 3)
    assert events[3].at - events[2].at == pytest.approx(0.5)
    assert log.first("served", after=events[-1].at + 0.1) is None
    assert log.problems() == ["the engine failed"]


def stream(
    *texts: str, ends: int = 1, done: bool = True, tokens: int | None = None, reason: str = "length"
) -> Stream:
    """Each letter a token."""
    made = Stream(is_done=done)
    for index, text in enumerate(texts):
        for number in range(ends):
            new = text if number == 0 else ""
            choice = {"index": index, "finish_reason": reason, "text": new, "token_ids": list(map(ord, new))}
            made.add({"choices": [choice]})
    made.add({"usage": {"completion_tokens": tokens or sum(map(len, texts))}, "choices": []})
    return made


ASK: dict[str, Any] = {
    "prompt": "",
    "max_tokens": 3,
    "temperature": 0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@pytest.mark.parametrize(
    ("got", "ask", "defect"),
    [
        (stream("abc", done=False), {}, "cut off"),
        (stream("abc"), {"n": 2}, "branches"),
        (stream("abc", ends=2), {}, "ends"),
        (stream("abc", tokens=4), {}, "3 tokens, and 4 in the usage"),
        (stream("ab"), {}, "2 of 3 tokens, and ended by 'length'"),
        (stream("abcd"), {}, "4 of 3 tokens"),
        (stream("ab", reason="stop"), {"min_tokens": 3}, "ended by 'stop'"),
        (stream("abc"), {"logprobs": 1}, "0 log-probabilities for 3 tokens"),
    ],
)
def test_nothing_excuses_a_stream_that_is_not_whole(got: Stream, ask: dict[str, Any], defect: str) -> None:
    whole = got.defect({**ASK, **ask})
    assert whole is not None and defect in whole
    assert stream("abc").defect(ASK) is None and stream("ab", reason="stop").defect(ASK) is None


def scores(ids: list[int]) -> torch.Tensor:
    """After any token the next letter is the likeliest; after b, c and x are too close to tell."""
    table = torch.zeros(len(ids), 128)
    for row, token in enumerate(ids):
        table[row, token + 1] = 5.0
        if token == ord("b"):
            table[row, ord("x")] = 5.0 + 5e-4
    return table


@pytest.mark.parametrize(
    ("got", "further", "found"),
    [
        ("abcd", {}, None),
        ("abxy", {}, None),  # a tie, and then its own way
        ("abxz", {}, "token 3 is 122 instead of 121"),  # a token was lost after the tie
        ("abxx", {}, "token 3 is 120"),  # or came twice
        ("accd", {}, "token 1 is 99 instead of 98, 5.00e+00 apart"),
        ("abxy", {"temperature": 1.0, "seed": 3}, "token 2 is 120 instead of 99"),  # noise parts them
        ("abxy", {"temperature": 1.0, "seed": 3, "top_k": 1}, "token 2"),
        ("abxy", {"frequency_penalty": 0.1}, None),
    ],
)
def test_only_rounding_explains_other_ids(got: str, further: dict[str, Any], found: str | None) -> None:
    judge = Judge(lambda prompt: [ord("a") - 1], scores)
    ask = {**ASK, "max_tokens": 4, **further}
    words = judge.unexplained(ask, stream("abcd"), stream(got))
    assert [found in one for one in words] == [True] if found else not words


def test_equal_ids_with_another_text_or_another_end_are_explained_by_nothing() -> None:
    judge = Judge(lambda prompt: [ord("a") - 1], scores)
    other = stream("abcd")
    other.branches[0].text = "abcc"
    for have in (other, stream("abc", reason="stop"), stream("abcd", tokens=5)):
        assert judge.unexplained(ASK, stream("abcd"), have)


def test_the_judge_chooses_what_the_engine_generates(tmp_path: Path) -> None:
    """For every kind of request and every branch."""
    arguments = tiny(tmp_path)
    asks = asks_of(6, 24, 3, random.Random(1), arguments["words"])
    judge = Judge.of_model(arguments["model"])
    with LLM(arguments["model"], kv_cache_memory_bytes=1 << 20) as llm:
        for ask in asks.bodies[:6]:
            names = set(ask) & (set(SamplingParams.field_names()) - {"logprobs"})
            params = SamplingParams(**{name: ask[name] for name in names})
            for output in llm.generate([ask["prompt"]], params)[0].outputs:
                assert judge.chosen(ask, output.index, output.token_ids) == list(output.token_ids)


def test_every_stream_is_held_against_its_ask_undisturbed() -> None:
    asks = Asks([{**ASK, "max_tokens": 4}] * 2, 2)
    expected = {0: stream("abcd"), 1: stream("bcde")}
    ended = [(0, stream("abcd")), (1, stream("abcd")), (0, stream("abxy")), (1, stream("bc"))]
    found = Report(1, "kill", 2, 3.0, [])
    judge_all(asks, expected, ended, found, lambda: Judge(lambda prompt: [ord("a") - 1], scores))
    assert (found.num_streams, found.num_different) == (4, 2)
    other, short = sorted(found.problems)
    assert (
        other.startswith("stream 1 of ask 1, choice 0: token 0 is 97")
        and "stream 3 of ask 1: 2 of 4" in short
    )


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "hits": {"idle": 1, "decode": 1},
        "noticed_s": [0.1, 0.9],
        "timed_out_s": [2.9],
        "recovered_s": [12.9],
        "cold_s": [9.0, 10.0, 30.0],
        "num_streams": 300,
        "num_different": 3,
        "num_restarts": 2,
        "num_replayed": 40,
    }
    return Report(1, "kill", 2, 3.0, ["idle", "decode"], **{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, None),
        ({"noticed_s": [1.1]}, "noticed after 1.10 s"),
        ({"timed_out_s": [3.1]}, "noticed after 3.10 s"),
        ({"recovered_s": [13.1]}, "recovered after 13.10 s, allowed are 13.00 s"),
        ({"num_different": 4}, "4 of 300 streams differ"),
        ({"num_restarts": 1}, "1 restarts for 2 losses"),
        ({"hits": {"idle": 2}}, "decode: not met"),
        ({"problems": ["round 1, stream 2: cut off"]}, "cut off"),
    ],
)
def test_every_promise_can_be_broken(changes: dict[str, Any], failure: str | None) -> None:
    failures = report(**changes).failures()
    assert [failure in words for words in failures] == [True] if failure else not failures


def test_results_are_written_with_what_failed(tmp_path: Path) -> None:
    cell = report(num_restarts=1).to_dict()
    cell["took_s"] = 90.0
    results = {"date": "2026-01-02", "machine": "m", "command": "c", "cells": {"kill at 2 ranks": cell}}
    write(tmp_path / "r.json", results)
    assert json.loads((tmp_path / "r.json").read_text()) == results
    table = (tmp_path / "r.md").read_text()
    assert table == markdown(results)
    assert "| 2 | kill | 1 | 2 | 300 | 3 | 1 | 40 | 1, 0, 1, 0 |" in table and "| 1.5 |" in table
    assert "- kill at 2 ranks: 1 restarts for 2 losses" in table
