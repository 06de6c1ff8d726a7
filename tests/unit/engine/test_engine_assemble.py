"""Tokens become text, logprobs and reasons, branch by branch."""

from __future__ import annotations

from typing import Any

from shoal.engine.assemble import Assembly
from shoal.engine.text import Tokenizer
from shoal.messages import SamplingSpec, TokenResult
from shoal.sampling_params import SamplingParams
from shoal.sched.intake import Limits, make_branches
from shoal.sched.request import BranchUpdate, Request, RequestSpec
from support.engines import VOCABULARY, LetterBackend

TOKENIZER = Tokenizer(LetterBackend(), vocab_size=VOCABULARY)


def begin(**params: Any) -> tuple[Assembly, list[Request]]:
    asked = SamplingParams(**params)
    sampling = tuple(SamplingSpec(temperature=0.0, branch=branch) for branch in range(asked.n))
    spec = RequestSpec(request_id="r", prompt_ids=[97], sampling=sampling)
    branches = make_branches(spec, 0, Limits(64, 64, 4))
    return Assembly("r", branches, TOKENIZER, asked), branches


def token(request: Request, letter: str, *end: Any) -> BranchUpdate:
    request.token_ids.append(ord(letter))
    found = TokenResult(
        sequence_id=request.sequence_id,
        token_id=ord(letter),
        logprob=-1.0,
        rank=3,
        top_ids=(ord("p"), ord(letter)),
        top_logprobs=(-0.5, -1.0),
    )
    return BranchUpdate(request, found, *end)


def test_the_chosen_tokens_logprob_comes_first_and_once() -> None:
    assembly, (request,) = begin(logprobs=2)
    delta, _ = assembly.push(token(request, "q"))
    assert delta.logprobs is not None
    (entries,) = delta.logprobs
    assert [(chr(i), e.logprob, e.rank, e.decoded_token) for i, e in entries.items()] == [
        ("q", -1.0, 3, "q"),
        ("p", -0.5, 1, "p"),
    ]


def test_a_stop_string_is_told_to_the_scheduler_and_cut() -> None:
    assembly, (request,) = begin(stop="xy")
    assert assembly.push(token(request, "x"))[0].text == "", "it may be the beginning of the stop string"
    delta, ended_by = assembly.push(token(request, "y"))
    assert (delta.text, delta.finish_reason, delta.stop_reason, ended_by) == ("", "stop", "xy", "xy")
    assert assembly.is_finished


def test_a_stop_string_counts_before_the_length_and_needs_no_telling() -> None:
    assembly, (request,) = begin(stop="x")
    delta, ended_by = assembly.push(token(request, "x", "length", None))
    assert (delta.finish_reason, delta.stop_reason, ended_by) == ("stop", "x", None)


def test_held_back_text_comes_with_the_end() -> None:
    assembly, (request,) = begin(stop="xy")
    assembly.push(token(request, "x"))
    delta, _ = assembly.push(token(request, "x", "length", None))
    assert (delta.text, delta.finish_reason) == ("xx", "length")


def test_held_back_text_comes_with_an_error() -> None:
    assembly, (request,) = begin(stop="xy")
    assembly.push(token(request, "x"))
    delta, _ = assembly.push(BranchUpdate(request, None, "error", None, "not finite"))
    assert (delta.text, delta.finish_reason, delta.error, delta.token_ids) == ("x", "error", "not finite", [])


def test_the_text_of_a_token_that_ends_is_shown_only_on_request() -> None:
    for shows, text in ((False, ""), (True, "z")):
        assembly, (request,) = begin(include_stop_str_in_output=shows)
        delta, _ = assembly.push(token(request, "z", "stop", None))
        assert (delta.text, delta.token_ids) == (text, [ord("z")])


def test_a_request_is_finished_when_its_last_branch_is() -> None:
    assembly, (first, second) = begin(n=2)
    assembly.push(token(second, "b", "length", None))
    assert not assembly.delta([]).finished
    assembly.push(token(first, "b", "length", None))
    assert assembly.delta([]).finished
