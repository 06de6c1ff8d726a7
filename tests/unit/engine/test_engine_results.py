"""Deltas add up to whole outputs."""

from __future__ import annotations

from shoal.engine.outputs import CompletionDelta, RequestDelta, TokenLogprob
from shoal.engine.results import Collector
from shoal.sampling_params import SamplingParams


def delta(*outputs: CompletionDelta, finished: bool = False) -> RequestDelta:
    return RequestDelta("r", list(outputs), finished, num_prompt_tokens=1, num_cached_tokens=4)


def test_texts_ids_and_logprobs_add_up_by_branch() -> None:
    collector = Collector("r", "a", [97], SamplingParams(n=2, logprobs=0))
    for token, logprob in ((5, -0.5), (6, -0.25)):
        entry = {token: TokenLogprob(logprob)}
        collector.push(delta(CompletionDelta(1, text=str(token), token_ids=[token], logprobs=[entry])))
    collector.push(delta(CompletionDelta(0, finish_reason="stop", stop_reason="x"), finished=True))
    output = collector.final()
    first, second = output.outputs
    assert (first.finish_reason, first.stop_reason, first.token_ids) == ("stop", "x", [])
    assert (second.text, second.token_ids, second.cumulative_logprob) == ("56", [5, 6], -0.75)
    assert second.logprobs is not None and [list(entry) for entry in second.logprobs] == [[5], [6]]
    assert output.finished and output.num_cached_tokens == 4


def test_without_logprobs_none_are_reported() -> None:
    collector = Collector("r", None, [1], SamplingParams())
    collector.push(delta(CompletionDelta(0, token_ids=[5])))
    assert collector.final().outputs[0].logprobs is None
    assert collector.final().outputs[0].cumulative_logprob is None


def test_why_a_branch_failed_is_kept() -> None:
    collector = Collector("r", None, [1], SamplingParams())
    collector.push(delta(CompletionDelta(0, finish_reason="error", error="not finite"), finished=True))
    branch = collector.final().outputs[0]
    assert (branch.finish_reason, branch.error) == ("error", "not finite")


def test_an_output_given_out_does_not_change_later() -> None:
    collector = Collector("r", None, [1], SamplingParams())
    early = collector.output()
    collector.push(delta(CompletionDelta(0, text="x", token_ids=[5])))
    assert (early.outputs[0].text, early.outputs[0].token_ids) == ("", [])
