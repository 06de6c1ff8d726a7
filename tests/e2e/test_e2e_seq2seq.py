"""Encoder-decoders through the engine give transformers' own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.errors import RequestError
from support import seq2seq
from support.zoo.seq2seq import SEQ2SEQ

TOKENS = 10
SHORT = [
    1,
    2,
    3,
    4,
    5,
    17,
    31,
    60,
]  # encoder tokens: around a block of 4, and as many as the zoo's models take
LONG = [300, 1, 40, 299, 2, 7, 128, 64]

pytestmark = pytest.mark.usefixtures("thread_ranks")


def engine(path: Path, tp: int, **options: Any) -> LLM:
    defaults = {"block_size": 4, "kv_cache_memory_bytes": 1 << 22, "max_num_batched_tokens": 64}
    return LLM(str(path), tensor_parallel_size=tp, **{**defaults, **options})


def greedy(llm: LLM, prompts: list[Any], **fields: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, ignore_eos=True, **{"max_tokens": TOKENS, **fields})
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]


def check_family(family: str, tp: int, folder: Path) -> None:
    path = seq2seq.save(family, folder)
    model = seq2seq.load(path)
    model.generation_config.forced_eos_token_id = None  # as the zoo's generation configs have it
    prompts = seq2seq.prompts(SHORT)
    expected = [seq2seq.answers(model, prompt, TOKENS)[0] for prompt in prompts]
    with engine(path, tp) as llm:
        assert greedy(llm, prompts) == expected


@pytest.mark.parametrize("family", sorted(SEQ2SEQ))
def test_a_family_at_one_rank(family: str, families_path: Path) -> None:
    check_family(family, 1, families_path)


@pytest.mark.full
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("family", sorted(SEQ2SEQ))
def test_a_family_at_several_ranks(family: str, tp: int, families_path: Path) -> None:
    check_family(family, tp, families_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_inputs_of_all_lengths_in_a_tight_pool(tp: int, families_path: Path) -> None:
    path = seq2seq.save("t5", families_path)
    model = seq2seq.load(path)
    prompts = seq2seq.prompts(LONG)
    expected = [seq2seq.answers(model, prompt, 14)[0] for prompt in prompts]
    with engine(path, tp, num_gpu_blocks_override=84, max_num_batched_tokens=320) as llm:
        assert greedy(llm, prompts, max_tokens=14) == expected
        assert llm.stats().preemptions_total > 0
        # Branches of one request read what its first one encoded.
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=14, n=3)
        (out,) = llm.generate([prompts[2]], params)
        assert [branch.token_ids for branch in out.outputs] == [expected[2]] * 3


def test_decoders_begin_and_end_as_the_model_or_the_caller_says(families_path: Path) -> None:
    path = seq2seq.save("m2m_100", families_path / "forced")
    model = seq2seq.load(path)
    model.generation_config.forced_eos_token_id = 2
    model.generation_config.save_pretrained(path)
    (prompt,) = seq2seq.prompts([9])
    with engine(path, 1) as llm:
        expected = seq2seq.answers(model, prompt, TOKENS, forced_bos_token_id=55)[0]
        assert greedy(llm, [prompt], forced_bos_token_id=55) == [expected]
        assert expected[0] == 55 and expected[-1] == 2
        both = {"encoder_prompt": {"prompt_token_ids": prompt}, "decoder_prompt": [55, 44]}
        begun = seq2seq.answers(model, prompt, TOKENS, decoder_input_ids=torch.tensor([[2, 55, 44]]))[0]
        assert [55, 44, *greedy(llm, [both])[0]] == begun
        with pytest.raises(RequestError, match="the encoder takes 63"):
            greedy(llm, [prompt * 8])
        with pytest.raises(RequestError, match=r"chat template|tokenizer"):
            llm.chat([{"role": "user", "content": "hello"}])
