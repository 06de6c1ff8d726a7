"""Encoders over processes: 3 heads over 2 and 3 ranks give what transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as T

from shoal.engine.llm import LLM
from support import encoders


@pytest.mark.parametrize("ranks", [2, 3])
def test_vectors_over_processes_equal_transformers(ranks: int, tmp_path: Path) -> None:
    folder = encoders.save(tmp_path / "bert")
    with LLM(str(folder), tensor_parallel_size=ranks, num_threads=1, max_num_batched_tokens=30) as llm:
        got = torch.tensor([output.outputs.embedding for output in llm.embed(encoders.TEXTS)])
        weights = [rank["weight_bytes"] for rank in llm.info.ranks]
    want = encoders.reference_vectors(folder, encoders.TEXTS)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    whole = sum(p.nbytes for p in T.BertModel(T.BertConfig(**encoders.SHAPE)).parameters())
    assert max(weights) < 0.8 * whole, (weights, whole)


def test_words_over_processes_equal_transformers(tmp_path: Path) -> None:
    folder = encoders.save(tmp_path / "masks", T.BertForMaskedLM)
    model, text = T.AutoModelForMaskedLM.from_pretrained(folder), "ab [MASK] ac aa"
    with LLM(str(folder), tensor_parallel_size=2, num_threads=1) as llm:
        [output] = llm.fill_mask([text], top_k=4)
    with torch.no_grad():
        logits = model(**encoders.tokenizer()(text, return_tensors="pt")).logits[0, 2]
    top = logits.softmax(0).topk(4)
    assert [word.token for word in output.outputs[0]] == top.indices.tolist()
    torch.testing.assert_close(torch.tensor([word.score for word in output.outputs[0]]), top.values)
