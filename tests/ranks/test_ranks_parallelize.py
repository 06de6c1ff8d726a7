"""A parallelized model, over real processes, gives what the whole model gives, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, StaticCache

import shoal
import shoal.parallel
from shoal.errors import RankError, UnsupportedError, UsageError
from support import families
from support.programs import are_gone

IDS = torch.tensor([[5, 17, 3, 88, 41, 29, 7, 60], [9, 4, 77, 12, 5, 6, 31, 2]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
PROMPT: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK, "pad_token_id": 0, "eos_token_id": None}


def members() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "shoal.parallel.member" in " ".join(p.cmdline())]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made once for the module, and not looked up in the user's folder."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(scope="module")
def whole() -> PreTrainedModel:
    return families.build("llama_9_3")


@pytest.fixture(scope="module")
def parallel() -> Iterator[PreTrainedModel]:
    """Over two ranks; the tests share it, and the last one ends it."""
    model = shoal.parallelize(families.build("llama_9_3"), tp=2)
    yield model
    shoal.parallel.close(model)


def keys_of(cache: Any) -> str:
    """The argument that takes a cache, by transformers' version."""
    import inspect

    names = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@torch.no_grad()
def reuse_prompt(model: PreTrainedModel) -> torch.Tensor:
    """One prompt computed once, gone on from twice, on copies of its cache."""
    cache = DynamicCache(config=model.config)
    name = keys_of(cache)
    model(IDS[:, :5], **{name: cache})
    outs = []
    for start in (5, 6):
        ids = torch.cat([IDS[:, :5], IDS[:, start : start + 2]], 1)
        outs.append(model.generate(ids, max_new_tokens=4, do_sample=False, **{name: copy.deepcopy(cache)}))
    return torch.cat(outs)


@torch.no_grad()
def rearrange_cache(model: PreTrainedModel) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    name = keys_of(cache)
    model(IDS, **{name: cache})
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    return model(IDS[:, 5:], **{name: cache}).logits


@torch.no_grad()
def reset_static(model: PreTrainedModel) -> torch.Tensor:
    cache = StaticCache(config=model.config, max_cache_len=16)
    name = keys_of(cache)
    model(IDS, **{name: cache})
    kept = copy.deepcopy(cache)
    cache.reset()
    second = model(IDS + 1, **{name: cache}).logits
    return torch.cat([second, model(IDS[:, :2], **{name: kept}).logits], 1)


@torch.inference_mode()
def in_inference_mode(model: PreTrainedModel) -> torch.Tensor:
    return model.generate(**PROMPT, max_new_tokens=4, do_sample=False)


def halved(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def with_a_hook(model: PreTrainedModel) -> torch.Tensor:
    handle = model.model.layers[0].mlp.register_forward_hook(halved)
    hooked = model(IDS).logits
    handle.remove()
    return torch.cat([hooked, model(IDS).logits])


USES: dict[str, Callable[[Any], torch.Tensor]] = {
    "greedy": lambda m: m.generate(**PROMPT, max_new_tokens=8, do_sample=False),
    "beams": lambda m: m.generate(**PROMPT, max_new_tokens=8, do_sample=False, num_beams=3),
    "sampling": lambda m: m.generate(**PROMPT, max_new_tokens=8, do_sample=True, num_return_sequences=2),
    "static": lambda m: m.generate(
        **PROMPT, max_new_tokens=8, do_sample=False, cache_implementation="static"
    ),
    "no cache": lambda m: m.generate(**PROMPT, max_new_tokens=4, do_sample=False, use_cache=False),
    "logits": lambda m: m(IDS, attention_mask=MASK).logits,
    "forward itself": lambda m: m.forward(IDS).logits,
    "loss": lambda m: m(IDS, labels=IDS).loss,
    "hidden states": lambda m: torch.cat(m(IDS, output_hidden_states=True).hidden_states),
    "decoder": lambda m: m.model(IDS).last_hidden_state,
    "head": lambda m: m.lm_head(m.model(IDS).last_hidden_state[:, -1]),
    "embeddings": lambda m: m(inputs_embeds=m.get_input_embeddings()(IDS)).logits,
    "a layer's MLP": lambda m: m.model.layers[1].mlp(torch.ones(2, 3, 72)),
    "tuples": lambda m: m(IDS, return_dict=False)[0],
    "prompt reuse": reuse_prompt,
    "rearranged cache": rearrange_cache,
    "reset static cache": reset_static,
    "inference mode": in_inference_mode,
    "a hook": with_a_hook,
}


@pytest.mark.parametrize("use", USES)
def test_it_gives_what_the_whole_model_gives(
    whole: PreTrainedModel, parallel: PreTrainedModel, use: str
) -> None:
    torch.manual_seed(3)
    expected = USES[use](whole).detach()
    torch.manual_seed(3)
    got = USES[use](parallel)
    assert type(got) is type(expected) and got.shape == expected.shape
    if expected.dtype.is_floating_point:
        assert float((got - expected).abs().max() / expected.abs().max()) < 2e-4
    else:
        assert torch.equal(got, expected)


def test_what_cannot_be_done_is_refused_and_the_group_goes_on(
    whole: PreTrainedModel, parallel: PreTrainedModel, tmp_path: Path
) -> None:
    foreign = DynamicCache(config=whole.config)
    whole(IDS, **{keys_of(foreign): foreign})
    refused: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        "'odd' cannot be sent": (UsageError, lambda: parallel(IDS, odd=(n for n in []))),
        "before the model was parallelized": (UsageError, lambda: parallel(IDS, **{keys_of(0): foreign})),
        "call model.layers.0.self_attn around it": (
            UsageError,
            lambda: parallel.model.layers[0].self_attn.q_proj(torch.ones(1, 72)),
        ),
        "save_pretrained": (UnsupportedError, lambda: parallel.save_pretrained(tmp_path)),
        "stays on cpu in torch.float32": (UnsupportedError, lambda: parallel.half()),
        "cannot be copied": (UnsupportedError, lambda: copy.deepcopy(parallel)),
        "parallel already": (UsageError, lambda: shoal.parallelize(parallel, tp=2)),
    }
    for message, (kind, act) in refused.items():
        with pytest.raises(kind, match=message):
            act()
    assert parallel.to("cpu").float() is parallel, "nothing to do is done"
    with pytest.raises(UsageError, match="eval"):
        parallel.train()(IDS)
    parallel.eval()
    assert torch.equal(USES["greedy"](parallel), USES["greedy"](whole))


def fail(module: Any, args: Any) -> None:
    raise ZeroDivisionError("on every rank")


def test_what_the_models_code_raises_on_every_rank_is_raised(
    whole: PreTrainedModel, parallel: PreTrainedModel
) -> None:
    cache = DynamicCache(config=parallel.config)
    parallel(IDS, **{keys_of(cache): cache})
    with pytest.raises(ZeroDivisionError, match="on every rank"):
        handle = parallel.model.layers[1].register_forward_pre_hook(fail)
        try:
            parallel(IDS)
        finally:
            handle.remove()
    again = DynamicCache(config=whole.config)
    whole(IDS, **{keys_of(again): again})
    got = parallel(IDS[:, :1], **{keys_of(cache): cache}).logits
    torch.testing.assert_close(got, whole(IDS[:, :1], **{keys_of(again): again}).logits, rtol=1e-3, atol=1e-3)


def test_an_exception_in_a_streamer_and_a_ctrl_c_leave_it_usable(
    whole: PreTrainedModel, parallel: PreTrainedModel
) -> None:
    class Breaking(transformers.generation.streamers.BaseStreamer):
        def put(self, value: Any) -> None:
            raise OSError("the reader has gone")

        def end(self) -> None:
            """Never reached."""

    with pytest.raises(OSError, match="the reader has gone"):
        parallel.generate(IDS[:1], max_new_tokens=4, streamer=Breaking(), pad_token_id=0)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            parallel(IDS)
    assert torch.equal(USES["greedy"](parallel), USES["greedy"](whole))


def test_a_killed_member_is_named_and_what_to_do_is_said(parallel: PreTrainedModel) -> None:
    (member,) = members()
    member.kill()
    for _ in range(2):
        with pytest.raises(RankError, match=r"rank 1 was killed by signal 9.*load the model again"):
            parallel(IDS)
    assert are_gone([member])
    shoal.parallel.close(parallel)


def test_t5_generates_the_same_from_encoders_and_with_beams() -> None:
    config = transformers.T5Config(
        vocab_size=101, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    whole = transformers.T5ForConditionalGeneration(config).eval()
    uses: list[Callable[[Any], torch.Tensor]] = [
        lambda m: m.generate(**PROMPT, max_new_tokens=8, do_sample=False),
        lambda m: m.generate(**PROMPT, max_new_tokens=8, do_sample=False, num_beams=2),
        lambda m: m.generate(
            encoder_outputs=m.get_encoder()(IDS, attention_mask=MASK), max_new_tokens=4, do_sample=False
        ),
    ]
    expected = [use(whole) for use in uses]
    model = shoal.parallelize(copy.deepcopy(whole), mp_size=2)
    ranks = members()
    try:
        for use, tokens in zip(uses, expected, strict=True):
            assert torch.equal(use(model), tokens)
    finally:
        del model
        gc.collect()
    assert are_gone(ranks), "a model that is dropped takes its ranks along"


def test_a_fill_mask_pipeline_from_a_folder_gives_the_same(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fish", "swim", "in", "the", "sea"]
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=96,
        num_hidden_layers=2,
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    model.save_pretrained(tmp_path)
    pipe = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
    expected = [guess["token_str"] for guess in pipe("fish swim in the [MASK]")]
    with shoal.parallel.parallelized(str(tmp_path), tp=2) as pipe.model:
        assert type(pipe.model) is transformers.BertForMaskedLM
        assert [guess["token_str"] for guess in pipe("fish swim in the [MASK]")] == expected
        ranks = members()
    shoal.parallel.close(pipe.model)
    assert are_gone(ranks)


def test_impossible_numbers_of_ranks_are_refused_before_anything_starts() -> None:
    model = families.build("llama")
    for options, field in (({"tp": 0}, "tp"), ({"tp": 2, "mp_size": 3}, "mp_size"), ({"tp": 999_999}, "tp")):
        with pytest.raises(UsageError) as caught:
            shoal.parallelize(model, **options)
        assert caught.value.field == field
    assert not members()


def test_one_rank_is_the_model_itself() -> None:
    model = families.build("llama").train()
    same = shoal.parallelize(model, tp=1, dtype="bfloat16")
    assert same is model and not model.training and model.dtype is torch.bfloat16 and not members()
    shoal.parallel.close(model)
