"""Checkpoints and lengths that would give wrong numbers are refused, at any rank count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shoal import LLM, SamplingParams
from shoal.errors import CheckpointError, UnsupportedError
from support import families

pytestmark = pytest.mark.usefixtures("thread_ranks")

BIGGER = {
    "model.layers.0.self_attn.q_proj.weight": (6, 0),
    "model.layers.1.mlp.down_proj.weight": (0, 8),
    "model.embed_tokens.weight": (64, 0),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", sorted(BIGGER))
def test_a_tensor_larger_than_the_models_is_refused(name: str, tp: int, tmp_path: Path) -> None:
    """A rank reads only its slices; they must be slices of the right tensor."""
    folder = families.save("llama_9_3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    rows, columns = BIGGER[name]
    tensors[name] = torch.nn.functional.pad(tensors[name], (0, columns, 0, rows)).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        LLM(str(folder), tensor_parallel_size=tp, kv_cache_memory_bytes=1 << 20)


def test_longrope_is_served_as_far_as_the_batch_does_not_change_it(tmp_path: Path) -> None:
    config = families.CONFIGS["llama"]()
    factors = [1.0 + 0.1 * i for i in range(8)]
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [4 * f for f in factors],
        "original_max_position_embeddings": 64,
    }
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.info.max_model_len == 64
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == families.reference(
            model, [5, 6, 7], 6
        )
    with pytest.raises(UnsupportedError, match="longrope"):
        LLM(str(tmp_path), max_model_len=128, kv_cache_memory_bytes=1 << 20)
