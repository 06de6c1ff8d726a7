"""Every rank's part of every kind of checkpoint equals that part of the model from_pretrained loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.checkpoint.load import load_weights
from shoal.checkpoint.reader import CheckpointReader
from shoal.plan.types import TensorSlice

RANKS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "num_experts_per_tok": 2}

MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: T.MixtralForCausalLM(T.MixtralConfig(**MOE, num_local_experts=12)),
    "qwen2_moe": lambda: T.Qwen2MoeForCausalLM(
        T.Qwen2MoeConfig(**MOE, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=40)
    ),
    "gpt_oss": lambda: T.GptOssForCausalLM(T.GptOssConfig(**MOE, num_local_experts=4, head_dim=8)),
    "deepseek_v3": lambda: T.DeepseekV3ForCausalLM(
        T.DeepseekV3Config(
            **{**MOE, "num_key_value_heads": 4}, n_routed_experts=8, moe_intermediate_size=24, n_group=2,
            topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8, n_shared_experts=1,
        )
    ),
    "xlnet": lambda: T.XLNetLMHeadModel(
        T.XLNetConfig(vocab_size=101, d_model=32, n_layer=2, n_head=4, d_inner=48)
    ),
    "t5": lambda: T.T5ForConditionalGeneration(
        T.T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**SHAPE)),
    "gpt2": lambda: T.GPT2LMHeadModel(T.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4)),
    "mamba": lambda: T.MambaForCausalLM(T.MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2)),
}  # fmt: skip


def _as_saved(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def _in_shards(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="20KB")


def _under_the_models_own_names(model: Any, folder: Path) -> None:
    """transformers stores experts one by one, under older names, though its modules hold them stacked."""
    model.save_pretrained(folder)
    tied = model.all_tied_weights_keys
    save_file(
        {name: value.clone() for name, value in model.state_dict().items() if name not in tied},
        folder / "model.safetensors",
    )


def _pickled(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def _with_gamma_and_beta(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed: dict[str, torch.Tensor] = {}
    for name, value in load_file(path).items():
        end = ".".join(name.split(".")[-2:])
        renamed[name.removesuffix(end) + old.get(end, end)] = value
    save_file(renamed, path)


WAYS: dict[str, Callable[[Any, Path], None]] = {
    "saved": _as_saved,
    "shards": _in_shards,
    "own names": _under_the_models_own_names,
    "pickled": _pickled,
    "gamma and beta": _with_gamma_and_beta,
}
CASES = [(name, "saved") for name in MODELS]
CASES += [(name, "own names") for name in ("mixtral", "qwen2_moe", "deepseek_v3")]
CASES += [("mixtral", "shards"), ("gpt2", "shards"), ("t5", "pickled"), ("gpt2", "pickled")]
CASES += [("bert", "gamma and beta")]


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():  # zero biases and unit norms would hide a tensor that was not loaded
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def parts_of(model: Any, rank: int) -> dict[str, TensorSlice]:
    """Two ranges of every tensor of some size, along one dimension after the other; ties alike."""
    parts: dict[int, TensorSlice] = {}
    found: dict[str, TensorSlice] = {}
    for index, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
        if tensor.dim() == 0 or tensor.numel() < 64:
            continue
        order = [(index + turn) % tensor.dim() for turn in range(tensor.dim())]
        dim = next(dim for dim in order if tensor.shape[dim] >= 4)
        bounds = [tensor.shape[dim] * part // 4 for part in range(5)]
        ranges = tuple((bounds[part], bounds[part + 1]) for part in (rank, rank + 2))
        part = parts.setdefault(id(tensor), TensorSlice(dim, ranges, tensor.shape[dim]))
        found[name] = part
    return found


def cut(whole: torch.Tensor, part: TensorSlice | None) -> torch.Tensor:
    if part is None:
        return whole
    return torch.cat([whole.narrow(part.dim, start, stop - start) for start, stop in part.ranges], part.dim)


def empty_part(name: str, parts: dict[str, TensorSlice]) -> Any:
    """A rank's model before loading: shapes cut, weights on meta, ties kept, other buffers real."""
    local = MODELS[name]()
    holders: dict[int, nn.Parameter] = {}
    for key, tensor in list(local.state_dict(keep_vars=True).items()):
        path, _, attribute = key.rpartition(".")
        module = local.get_submodule(path)
        meta = cut(tensor.detach().to("meta"), parts.get(key))
        if attribute in module._parameters:
            module._parameters[attribute] = holders.setdefault(id(tensor), nn.Parameter(meta, False))
        else:
            module._buffers[attribute] = meta
    return local.eval()


@pytest.mark.parametrize(("name", "way"), CASES)
def test_each_ranks_tensors_are_its_slices_and_cost_their_own_bytes(
    tmp_path: Path, name: str, way: str
) -> None:
    WAYS[way](random_model(name), tmp_path)
    whole, info = type(random_model(name)).from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    expected = whole.state_dict()
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in expected.values()}
    for rank in range(RANKS):
        parts = parts_of(whole, rank)
        local = empty_part(name, parts)
        with CheckpointReader(tmp_path) as reader:
            report = load_weights(local, reader, parts, "cpu", torch.float32)
        state = local.state_dict()
        different = [
            key for key in expected if not torch.equal(state[key], cut(expected[key], parts.get(key)))
        ]
        assert different == []
        assert (set(report.missing), set(report.unexpected)) == (
            set(info["missing_keys"]), set(info["unexpected_keys"]),
        )  # fmt: skip
        assert report.converted_whole == ()
        assert report.bytes_read < 0.6 * sum(sizes.values())
        assert report.checkpoint_bytes >= sum(sizes.values())
