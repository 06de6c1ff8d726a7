"""Only the outermost call goes to the group, whichever door it comes through."""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from shoal.errors import UnsupportedError, UsageError
from shoal.parallel.entry import Calls, adopt, hook_keys, state_names
from shoal.parallel.guard import guard
from shoal.parallel.request import check_model, read_request
from shoal.plan.types import Plan, Region, Split
from shoal.shard import shard

LATE = "model.layers.*.mlp.down_proj.weight"
EARLY = ("model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight")
HALVES = (((0, 6),), ((6, 12),))
PLAN = Plan(
    2,
    "LlamaForCausalLM",
    params={LATE: Split("row", 1, 12, HALVES)} | {name: Split("column", 0, 12, HALVES) for name in EARLY},
    regions=(Region(LATE, EARLY, 12, (6, 6), 12, (12,)),),
)


class Recorder:
    """A group of one rank that notes what it is asked to run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def run(self, name: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(name)
        return forward(*args, **kwargs)


class Alone:
    """The other rank's end answers nothing: sums are this rank's own."""

    rank, size = 0, 2

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def build() -> PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


def adopted() -> tuple[PreTrainedModel, Recorder, Calls]:
    model, recorder, calls = build(), Recorder(), Calls()
    hooks = hook_keys(model)
    shard(model, PLAN, 0, Alone())  # type: ignore[arg-type]
    adopt(model, PLAN, calls, hooks)
    calls.group = recorder
    return model, recorder, calls


def test_calls_inside_a_call_are_not_announced() -> None:
    model, recorder, _ = adopted()
    ids = torch.tensor([[1, 2]])
    model(ids)
    model.forward(ids)
    model.model(ids)
    model.model.layers[0].mlp(torch.ones(1, 2, 8))
    model.model.norm(torch.ones(1, 2, 8))
    assert recorder.names == ["", "", "model", "model.layers.0.mlp"]


def test_a_partial_module_is_refused_outside_and_used_inside() -> None:
    model, recorder, _ = adopted()
    with pytest.raises(UsageError, match=r"call model\.layers\.0\.mlp around it"):
        model.model.layers[0].mlp.up_proj(torch.ones(1, 8))
    assert recorder.names == []


def test_a_forward_keeps_its_signature() -> None:
    model, _, _ = adopted()
    assert inspect.signature(model.forward) == inspect.signature(build().forward)
    assert "attention_mask" in state_names(model)


def test_hooks_of_sharding_run_inside_and_the_programs_own_outside() -> None:
    model, order = build(), []
    mlp = model.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda module, args: order.append("own"))
    hooks, calls = hook_keys(model), Calls()
    mlp.register_forward_pre_hook(lambda module, args, kwargs: order.append("cut"), with_kwargs=True)
    mlp.register_forward_hook(lambda module, args, output: order.append("sum") or output * 2)
    adopt(model, PLAN, calls, hooks)
    calls.group = Recorder()
    plain = build().model.layers[0].mlp
    plain.load_state_dict(mlp.state_dict())
    x = torch.ones(1, 2, 8)
    torch.testing.assert_close(mlp(x), plain(x) * 2)
    torch.testing.assert_close(mlp.forward(x), plain(x) * 2)
    assert order == ["own", "cut", "sum", "cut", "sum"]


def test_threads_take_turns() -> None:
    model, recorder, _ = adopted()
    threads = [threading.Thread(target=model, args=(torch.tensor([[1, 2]]),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.names == [""] * 4


def test_a_dropped_model_goes_at_once() -> None:
    model, _, _ = adopted()
    guard(model)
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_what_would_touch_one_rank_only_is_refused() -> None:
    model, _, _ = adopted()
    guard(model)
    assert model.to("cpu") is model and model.to(torch.float32) is model
    for act in (model.double, lambda: model.to("meta"), lambda: model.resize_token_embeddings(20)):
        with pytest.raises(UnsupportedError):
            act()


def test_a_request_is_read_and_its_field_named_where_it_is_wrong() -> None:
    model = build()
    request = read_request(model, None, 2, None, "bfloat16")
    assert (request.tp, request.device.kind, request.dtype) == (2, "cpu", torch.bfloat16)
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((0, None, None, None), "tp"),
        ((True, None, None, None), "tp"),
        ((2, 3, None, None), "mp_size"),
        ((2, None, "gpu", None), "device"),
        ((2, None, None, "int8"), "dtype"),
    ]
    for options, field in wrong:
        with pytest.raises(UsageError) as caught:
            read_request(model, *options)
        assert caught.value.field == field


def test_models_that_cannot_be_parallelized_are_refused() -> None:
    with pytest.raises(UsageError, match=r"pipe\.model = shoal\.parallelize"):
        check_model(type("Pipe", (), {"model": build()})())
    with pytest.raises(UsageError, match="on meta"):
        check_model(build().to("meta"))
    packed = build()
    packed.lm_head.weight = torch.nn.Parameter(torch.zeros(11, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match="lm_head is quantised"):
        check_model(packed)
