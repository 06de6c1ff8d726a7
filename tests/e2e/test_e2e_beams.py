"""Beam searches through the engine find what transformers finds, and come in the forms that users know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from shoal import LLM, BeamSearchParams, SamplingParams
from shoal.errors import RequestError
from support import encoders, families, seq2seq
from support.searches import SearchCase, assert_same_search, draw_case
from support.zoo.family import VOCABULARY
from support.zoo.seq2seq import SEQ2SEQ

FAMILIES = ["t5", "marian", "gpt2", "llama"]
STOPS = list(range(3, 101, 7))  # so many that beams end at every length
FIXED = [
    SearchCase(10, STOPS, num_beams=4, num_return_sequences=1),
    SearchCase(10, STOPS, num_beams=4, num_return_sequences=4, early_stopping=True),
    SearchCase(10, STOPS, num_beams=3, num_return_sequences=2, length_penalty=2.0, early_stopping="never"),
    SearchCase(10, STOPS, num_beams=4, num_return_sequences=2, length_penalty=-0.5),
]

pytestmark = pytest.mark.usefixtures("thread_ranks")


def load(family: str, folder: Path) -> tuple[Path, Any]:
    """A family's folder, and transformers' model of it."""
    if family in SEQ2SEQ:
        path = seq2seq.save(family, folder)
        return path, seq2seq.load(path)
    path = families.save(family, folder)
    return path, T.AutoModelForCausalLM.from_pretrained(path).eval()


def open_engine(path: Path, tp: int, **options: Any) -> LLM:
    defaults = {"block_size": 4, "num_gpu_blocks_override": 80, "max_num_batched_tokens": 64}
    return LLM(str(path), tensor_parallel_size=tp, **{**defaults, **options})


def hold(family: str, tp: int, folder: Path, cases: list[SearchCase]) -> None:
    path, model = load(family, folder)
    prompts = seq2seq.prompts([1, 4, 17])
    with open_engine(path, tp, enable_prefix_caching=tp == 1) as llm:
        for case in cases:
            for prompt, output in zip(prompts, llm.generate(prompts, case.params()), strict=True):
                assert_same_search(case, model, prompt, output)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_are_transformers(family: str, tp: int, families_path: Path) -> None:
    first = 10 * FAMILIES.index(family) + 5 * tp
    drawn = [draw_case(number, VOCABULARY, family in SEQ2SEQ) for number in range(first, first + 2)]
    hold(family, tp, families_path, FIXED[tp - 1 :: 2] + drawn)


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", [*FAMILIES, "m2m_100", "bloom"])
def test_any_search_is_transformers(family: str, tp: int, families_path: Path) -> None:
    drawn = [draw_case(number, VOCABULARY, family in SEQ2SEQ) for number in range(1000 * tp, 1000 * tp + 60)]
    hold(family, tp, families_path, FIXED + drawn)


def test_equal_scores_are_found_however_ties_fall(families_path: Path) -> None:
    """Every token has a twin of the same weights, so that each sequence ties with many."""
    path, model = load("llama", families_path / "twins")
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[51:101] = weight[1:51]
    model.save_pretrained(path)
    stop_ids = [7, 57, 20, 70]
    with open_engine(path, 1) as llm:
        for options in ({}, {"no_repeat_ngram_size": 2}, {"length_penalty": 0.0, "early_stopping": "never"}):
            case = SearchCase(8, stop_ids, num_beams=4, num_return_sequences=4, **options)
            for prompt in seq2seq.prompts([1, 6]):
                (output,) = llm.generate([prompt], case.params())
                assert_same_search(case, model, prompt, output, may_tie=True)


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a tokenizer of two-letter words."""
    config = T.LlamaConfig(**encoders.SHAPE, bos_token_id=2, eos_token_id=3)
    return encoders.save(tmp_path_factory.mktemp("spelling"), T.LlamaForCausalLM, config)


class Says(T.StoppingCriteria):
    """Ends a sequence with a word that holds one of some letters."""

    def __init__(self, letters: list[str], tokenizer: Any) -> None:
        self.letters = letters
        self.tokenizer = tokenizer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        words = [self.tokenizer.decode(row[-1:], skip_special_tokens=True) for row in input_ids]
        return torch.tensor([any(letter in word for letter in self.letters) for word in words])


@pytest.mark.parametrize("stop", [["j"], ["d", "f"]])
def test_stop_strings_end_beams_as_criteria_do_in_transformers(stop: list[str], spelling: Path) -> None:
    model = T.AutoModelForCausalLM.from_pretrained(spelling).eval()
    tokenizer = T.AutoTokenizer.from_pretrained(spelling)
    model.generation_config.eos_token_id = None
    params = SamplingParams(num_beams=4, n=4, max_tokens=8, stop=stop, ignore_eos=True, early_stopping=True)
    with LLM(str(spelling), num_threads=1, kv_cache_memory_bytes=1 << 22) as llm:
        outputs = llm.generate(encoders.TEXTS[:3], params)
    reasons = set()
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=4, num_return_sequences=4, max_new_tokens=8,
            pad_token_id=0, do_sample=False, early_stopping=True, stopping_criteria=[Says(stop, tokenizer)],
        )  # fmt: skip
        for branch, row in zip(output.outputs, found[:, ids.shape[1] :].tolist(), strict=True):
            assert branch.token_ids == row[: len(branch.token_ids)]
            assert all(token <= 0 for token in row[len(branch.token_ids) :]), (
                "behind the end there is padding"
            )
            whole = tokenizer.decode(branch.token_ids, skip_special_tokens=True)
            at, letter = min(((whole.find(one) % 1000, one) for one in stop), default=(999, ""))
            is_stopped = at < 999
            assert branch.finish_reason == ("stop" if is_stopped else "length")
            assert branch.stop_reason == (letter if is_stopped else None)
            assert branch.text == whole[:at]
            reasons.add(branch.finish_reason)
    assert "stop" in reasons


def test_beam_search_has_vllms_form(spelling: Path) -> None:
    text = encoders.TEXTS[0]
    with LLM(str(spelling), num_threads=1, kv_cache_memory_bytes=1 << 22) as llm:
        (found,) = llm.beam_search([text], BeamSearchParams(beam_width=3, max_tokens=6))
        same = SamplingParams(n=3, num_beams=3, max_tokens=6, early_stopping="never", logprobs=6)
        (output,) = llm.generate(text, same)
        for sequence, branch in zip(found.sequences, output.outputs, strict=True):
            assert sequence.tokens == output.prompt_token_ids + branch.token_ids
            assert sequence.text == encoders.tokenizer().decode(sequence.tokens)
            assert sequence.cum_logprob == branch.cumulative_logprob
            chosen = [
                entry[token].logprob for entry, token in zip(sequence.logprobs, branch.token_ids, strict=True)
            ]
            assert sum(chosen) == pytest.approx(sequence.cum_logprob)
            assert all(len(entry) == 6 for entry in sequence.logprobs)
            assert (sequence.finish_reason, sequence.stop_reason) == (
                branch.finish_reason,
                branch.stop_reason,
            )
        (greedy,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=6))
        (one,) = llm.beam_search(text, BeamSearchParams(1, 6))
        assert one.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids
        for field, wrong in (("beam_width", {"beam_width": 0}), ("temperature", {"temperature": 0.5})):
            with pytest.raises(RequestError) as caught:
                llm.beam_search(text, BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **wrong}))
            assert caught.value.field == field
