"""Encoders' ways: each is taken where it is right, and gives what the model gives one text at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers as T

from shoal.attention.cpu import CpuPaged
from shoal.attention.sdpa import paged_sdpa
from shoal.comm.local import LocalComm
from shoal.errors import UnsupportedError
from shoal.jit.team import Team
from shoal.model.choose_encoder import ChosenEncoder, serve_encoder
from shoal.model.encoder import AloneEncoder, Texts, pooled
from shoal.model.fused_encoder import FusedEncoder
from support.zoo.encoders import ENCODERS
from support.zoo.seq2seq import SEQ2SEQ
from support.zoo.unlisted_encoders import UNLISTED_ENCODERS

CPU = torch.device("cpu")
FAMILIES = {**ENCODERS, **UNLISTED_ENCODERS}
LENGTHS = (9, 1, 14, 3, 3, 30)


def build(family: str) -> T.PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class, config = FAMILIES[family].load()
        config._attn_implementation = "eager"
        model: T.PreTrainedModel = model_class(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.dim() <= 1:
                parameter.copy_(name.endswith("weight") + 0.2 * torch.randn(parameter.shape))
    return model


def texts(vocabulary: int = 101) -> Texts:
    generator = torch.Generator().manual_seed(1)
    return Texts(torch.randint(5, vocabulary, (sum(LENGTHS),), generator=generator), LENGTHS)


@pytest.fixture(scope="module")
def kernel() -> Iterator[CpuPaged]:
    yield CpuPaged(Team(2))


@torch.inference_mode()
def check(chosen: ChosenEncoder, family: str) -> None:
    """Its hidden states and words against a fresh model's."""
    given, wanted = texts(), torch.tensor([0, 20, 4])
    plain = AloneEncoder(build(family))
    torch.testing.assert_close(chosen.model.hidden(given), plain.hidden(given), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        chosen.model.word_logits(given, wanted), plain.word_logits(given, wanted), atol=2e-4, rtol=2e-4
    )


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("bert", "packed"),
        ("albert", "packed"),  # one layer, called twice
        ("roberta", "packed"),  # positions count from behind padding's
        ("modernbert", "packed"),  # windows to both sides, rotary
        ("deberta_v2", "padded"),
        ("mpnet", "padded"),
        ("convbert", "alone"),  # its convolutions see the padding
    ],
)
def test_the_way_is_found_by_trying_and_gives_the_models_own_numbers(family: str, way: str) -> None:
    chosen = serve_encoder(build(family), paged_sdpa, CPU)
    assert chosen.model.way == way, chosen.notes
    check(chosen, family)


@pytest.mark.parametrize(
    "family",
    ["bert", "roberta", "distilbert", "electra", "camembert", "modernbert", "nomic_bert", "eurobert"],
)
def test_layers_on_the_packed_way_are_fused_and_give_the_same(family: str, kernel: CpuPaged) -> None:
    chosen = serve_encoder(
        build(family),
        kernel,
        CPU,
        lambda module, packed: FusedEncoder(module, packed, kernel, LocalComm(), "float32"),
    )
    assert "2 of 2 layers fused, 1 call(s) a step" in chosen.notes
    assert chosen.computes_alone and chosen.packed_bytes > 0
    check(chosen, family)


def test_a_fused_layer_that_computes_something_else_is_put_back(kernel: CpuPaged) -> None:
    model = build("bert")
    chosen = serve_encoder(
        model,
        kernel,
        CPU,
        lambda module, packed: _shifted(FusedEncoder(module, packed, kernel, LocalComm(), "float32")),
    )
    assert any(note.startswith("not fused: vectors or scores differ") for note in chosen.notes), chosen.notes
    assert not chosen.computes_alone and chosen.packed_bytes == 0
    check(chosen, "bert")


def _shifted(fused: FusedEncoder) -> FusedEncoder:
    """Layers whose stack has one norm's weights doubled, as a fault of ours would."""
    for chain in fused.layers._chains:
        for ready in chain.ready:
            for operation in ready.draft.operations:
                for held in operation.holds:
                    if isinstance(held, torch.Tensor):
                        held.mul_(2.0)
    return fused


def test_rounded_weights_are_served_and_their_difference_is_reported(kernel: CpuPaged) -> None:
    chosen = serve_encoder(
        build("bert"),
        kernel,
        CPU,
        lambda module, packed: FusedEncoder(module, packed, kernel, LocalComm(), "int8"),
    )
    assert any("of unrounded weights" in note for note in chosen.notes), chosen.notes
    given = texts()
    with torch.inference_mode():
        want = pooled(AloneEncoder(build("bert")).hidden(given), given, "mean")
        got = pooled(chosen.model.hidden(given), given, "mean")
    assert not torch.equal(got, want)
    assert torch.nn.functional.cosine_similarity(got, want).min() > 0.99


@torch.inference_mode()
def test_what_makes_no_vectors_of_tokens_answers_by_its_head() -> None:
    chosen = serve_encoder(build("perceiver"), paged_sdpa, CPU)
    assert not chosen.model.makes_vectors
    assert any("makes no vector of each token" in note for note in chosen.notes), chosen.notes
    given = Texts(texts().ids[:16], (5, 11))
    got = chosen.model.word_logits(given, torch.tensor([4, 15, 0]))
    plain = build("perceiver")
    rows = [plain(ids[None]).logits[0] for ids in given.ids.split((5, 11))]
    torch.testing.assert_close(got, torch.stack([rows[0][4], rows[1][10], rows[0][0]]), atol=1e-4, rtol=1e-4)


def test_what_has_neither_vectors_of_tokens_nor_a_head_is_refused() -> None:
    _, config = FAMILIES["funnel"].load()
    with pytest.raises(UnsupportedError, match="FunnelBaseModel makes no vector of each token"):
        serve_encoder(T.FunnelBaseModel(config).eval(), paged_sdpa, CPU)


def test_a_text_that_more_padding_changes_goes_alone() -> None:
    """Chunks hide a little padding: only where it adds a chunk are results others."""
    chosen = serve_encoder(build("reformer:words"), paged_sdpa, CPU)
    assert chosen.model.way == "alone", chosen.notes


@torch.inference_mode()
def test_parts_with_a_config_of_their_own_get_their_attention_back() -> None:
    """T5's encoder and decoder have copies of the config; the packed way, tried first, changes them all."""
    _, config = SEQ2SEQ["t5"].load()
    model = T.T5ForSequenceClassification(config).eval()
    ids = torch.tensor([[7, 8, 9, 10, 11, 1]])
    want = model(ids).logits
    chosen = serve_encoder(model, paged_sdpa, CPU)
    torch.testing.assert_close(chosen.model.class_logits(Texts(ids[0], [6])), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling_is_by_text(pooling: str) -> None:
    rows = torch.arange(12.0).view(6, 2)
    given = Texts(torch.zeros(6, dtype=torch.int64), (1, 3, 2))
    parts = rows.split((1, 3, 2))
    want = {"mean": [p.mean(0) for p in parts], "cls": [p[0] for p in parts], "last": [p[-1] for p in parts]}
    torch.testing.assert_close(pooled(rows, given, pooling), torch.stack(want[pooling]))
