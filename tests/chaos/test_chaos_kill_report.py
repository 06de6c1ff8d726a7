"""The kill test judges itself: what it reads in a log, what it takes for a defect, when it says failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaos.kill_log import EventLog
from chaos.kill_matrix import markdown, write
from chaos.kill_report import Report
from chaos.streams import Stream, differences


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
    assert (events[3].num_in_prompt, events[3].num_beyond) == (2, 3)
    assert events[3].at - events[2].at == pytest.approx(0.5)
    assert log.first("served", after=events[-1].at + 0.1) is None
    assert log.problems() == ["the engine failed"]


def stream(*texts: str, ends: int = 1, done: bool = True, tokens: int = 4) -> Stream:
    made = Stream(is_done=done)
    for index, text in enumerate(texts):
        for number in range(ends):
            reason = {"index": index, "finish_reason": "length"}
            made.add({"choices": [{**reason, "text": text if number == 0 else ""}]})
    made.add({"usage": {"completion_tokens": tokens}, "choices": []})
    return made


@pytest.mark.parametrize(
    ("got", "ask", "defect"),
    [
        (stream("a", done=False), {}, "cut off"),
        (stream("a"), {"n": 2}, "branches"),
        (stream("a", ends=2), {}, "ends"),
        (stream("a"), {"logprobs": 1}, "0 log-probabilities for 4 tokens"),
    ],
)
def test_nothing_excuses_a_stream_that_is_not_whole(got: Stream, ask: dict[str, Any], defect: str) -> None:
    defects, differing = differences([ask], [stream("a")], [got])
    assert len(defects) == 1 and defect in defects[0] and not differing


def test_streams_that_say_something_else_are_shown() -> None:
    want = stream("a")
    assert differences([{}, {}], [want, want], [want, want]) == ([], [])
    assert len(differences([{}, {}], [want, want], [want, stream("b")])[1]) == 1
    assert len(differences([{}, {}], [want, want], [want, stream("a", tokens=5)])[1]) == 1


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
        ({"hits": {"idle": 2}}, "no loss came in this moment: decode"),
        ({"problems": ["round 1, stream 2: cut off"]}, "cut off"),
    ],
)
def test_every_promise_can_be_broken(changes: dict[str, Any], failure: str | None) -> None:
    failures = report(**changes).failures()
    assert [failure in words for words in failures] == [True] if failure else not failures


def test_results_are_written_with_what_failed(tmp_path: Path) -> None:
    cell = report(num_restarts=1).to_dict()
    results = {"date": "2026-01-02", "machine": "m", "command": "c", "cells": {"kill at 2 ranks": cell}}
    write(tmp_path / "r.json", results)
    assert json.loads((tmp_path / "r.json").read_text()) == results
    table = (tmp_path / "r.md").read_text()
    assert table == markdown(results)
    assert "| 2 | kill | 2 | 300 | 3 | 1 | 1, 0, 1, 0 |" in table
    assert "- kill at 2 ranks: 1 restarts for 2 losses" in table
