"""Decoders are served the way that gives their own logits, and refused where none does."""

from __future__ import annotations

import pytest
import torch
import transformers

from shoal.attention.sdpa import paged_sdpa
from shoal.errors import UnsupportedError
from shoal.model.choose import serve_causal
from support import families
from support.disagreeing import forgetful
from support.zoo.encoders import ENCODERS
from support.zoo.seq2seq import SEQ2SEQ

WAYS = {name: "padded" if name == "bloom" else "paged" for name in families.CONFIGS}
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", sorted(WAYS))
@torch.inference_mode()
def test_each_family_goes_its_way(family: str) -> None:
    chosen = serve_causal(families.build(family), paged_sdpa, CPU)
    assert chosen.model.way == WAYS[family]
    assert len(chosen.model.kv_shapes) == 2


@torch.inference_mode()
def test_a_kernel_that_ignores_the_past_is_not_taken() -> None:
    """A kernel that sees only the newest position gives wrong numbers; the padded way is taken instead."""

    chosen = serve_causal(families.build("llama"), forgetful(), CPU)
    assert chosen.model.way == "padded"
    assert any("differ" in note for note in chosen.notes)


@torch.inference_mode()
def test_a_model_that_counts_columns_decodes_sequences_of_equal_length_together() -> None:
    _, config = SEQ2SEQ["plbart"].load()
    config.is_encoder_decoder, config._attn_implementation = False, "eager"
    chosen = serve_causal(transformers.PLBartForCausalLM(config).eval(), paged_sdpa, CPU)
    assert chosen.model.way == "padded" and chosen.model.keeps_kv
    assert any("sequences of equal length" in note for note in chosen.notes), chosen.notes


@torch.inference_mode()
def test_positions_are_those_of_generate_even_where_a_model_would_count_others() -> None:
    """RoBERTa counts from behind padding's position by itself; generate gives it positions from 0."""
    _, config = ENCODERS["roberta"].load()
    config.is_decoder, config._attn_implementation = True, "eager"
    model = transformers.RobertaForCausalLM(config).eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    asked = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **asked).logits[0]
    chosen = serve_causal(model, paged_sdpa, CPU)
    assert chosen.model.way == "paged", chosen.notes
    torch.testing.assert_close(chosen.model.plain(ids[0], torch.tensor([3])), want, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_model_whose_cache_stays_empty_is_computed_anew_every_step() -> None:
    model = families.build("bloom")
    inner = model.transformer.forward

    def no_cache(
        *args: object, cache: object = None, past_key_values: object = None, **kwargs: object
    ) -> object:
        return inner(*args, **{**kwargs, "use_cache": False})

    model.transformer.forward = no_cache
    chosen = serve_causal(model, paged_sdpa, CPU)
    assert chosen.model.way == "recompute" and not chosen.model.keeps_kv
    assert any("every token costs a pass over its whole sequence" in note for note in chosen.notes)


@torch.inference_mode()
def test_a_model_that_no_way_serves_is_refused_by_name() -> None:
    """One that answers otherwise each time it is called."""
    model = families.build("bloom")
    inner, calls = model.transformer.forward, iter(range(1, 1000))

    def moody(*args: object, **kwargs: object) -> object:
        output = inner(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.roll(next(calls), -1)
        return output

    model.transformer.forward = moody
    with pytest.raises(UnsupportedError, match=r"BloomForCausalLM cannot be served.*not recompute"):
        serve_causal(model, paged_sdpa, CPU)


@torch.inference_mode()
def test_a_model_of_very_few_positions_is_served() -> None:
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    assert serve_causal(model, paged_sdpa, CPU).model.way == "paged"


@torch.inference_mode()
def test_weights_that_are_not_numbers_are_said_to_be() -> None:
    model = families.build("llama")
    model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedError, match="not finite"):
        serve_causal(model, paged_sdpa, CPU)


def test_models_built_by_several_threads_leave_torch_as_it_was() -> None:
    """transformers' constructors replace global functions for a while; here one model is built at a time."""
    from concurrent.futures import ThreadPoolExecutor

    from shoal.model.build import build_empty

    config = families.CONFIGS["llama"]()
    functions = dict(vars(torch.nn.init))
    with ThreadPoolExecutor(8) as pool:
        built = [
            pool.submit(build_empty, transformers.LlamaForCausalLM, config, torch.float32) for _ in range(40)
        ]
    assert all(future.result().device.type in ("meta", "cpu") for future in built)
    assert dict(vars(torch.nn.init)) == functions
    assert torch.get_default_dtype() is torch.float32


@torch.inference_mode()
def test_what_does_not_compile_is_put_back_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(module: torch.nn.Module, dynamic: bool) -> None:
        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("no C++ compiler here")

        module._compiled_call_impl = broken

    monkeypatch.setattr(torch.nn.Module, "compile", failing)
    model = families.build("llama")
    chosen = serve_causal(model, paged_sdpa, CPU, compiles=True)
    assert "not compiled: RuntimeError: no C++ compiler here" in chosen.notes
    prompt = torch.tensor([3, 5, 7])
    again = chosen.model.plain(prompt, torch.arange(3))
    assert torch.allclose(again, model(prompt[None]).logits[0], atol=1e-5)


@torch.inference_mode()
def test_only_the_paged_way_is_compiled() -> None:
    chosen = serve_causal(families.build("bloom"), paged_sdpa, CPU, compiles=True)
    assert "not compiled: only what is served the paged way is, this goes the padded way" in chosen.notes
