"""KV follows the plan: where a policy gathers keys or values, every rank keeps all heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, SamplingParams
from shoal.errors import PlanError, UsageError
from support import families

pytestmark = pytest.mark.usefixtures("thread_ranks")

PROMPTS = families.prompts(4, 20, seed=5)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def run(path: Path, tp: int, policy: Any = None) -> tuple[list[list[int]], list[int]]:
    """Tokens, and KV bytes per token of each rank."""
    with LLM(str(path), tensor_parallel_size=tp, kv_cache_memory_bytes=1 << 20, policy=policy) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        return tokens, [rank["kv_bytes_per_token"] for rank in llm.info.ranks]


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("family", ["llama", "llama_9_3"])
def test_a_gathered_key_or_value_projection_leaves_tokens_and_kv_bytes_as_with_one_rank(
    family: str, name: str, families_path: Path, tmp_path: Path
) -> None:
    path = families.save(family, families_path)
    tokens, (alone,) = run(path, 1)
    assert sum(run(path, 2)[1]) == alone  # without the policy the heads are dealt out
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({f"model.layers.*.self_attn.{name}": "gather"}))
    assert run(path, 2, policy) == (tokens, [alone, alone])


def test_a_policy_with_classes_as_keys_reaches_the_ranks(families_path: Path) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    path = families.save("llama", families_path)
    policy = {LlamaDecoderLayer: ("self_attn.o_proj", "mlp.down_proj")}
    assert run(path, 2, policy)[0] == run(path, 1)[0]


def test_a_wrong_policy_starts_no_engine(families_path: Path) -> None:
    path = families.save("llama", families_path)
    with pytest.raises(PlanError, match="down_proj as column: relative error"):
        run(path, 2, {"*.down_proj": "column"})
    with pytest.raises(UsageError, match="down_prj: nothing in the model"):
        run(path, 2, {"*.down_prj": "row"})
