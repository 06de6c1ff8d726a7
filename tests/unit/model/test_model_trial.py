"""What one rank cannot do none does, and nobody waits for one that has given up."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

from shoal.attention.sdpa import paged_sdpa
from shoal.comm.base import Comm
from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import UnsupportedError
from shoal.model.choose import serve_causal
from shoal.model.choose_encoder import serve_encoder
from shoal.model.choose_seq2seq import serve_seq2seq
from shoal.model.trial import Trials
from shoal.prove import plan_and_prove
from shoal.shard import shard
from shoal.shard.link import Link
from support.disagreeing import FAULTS, chosen_with_a_fault, failing, forgetful
from support.zoo.build import build
from support.zoo.catalogue import family_of

CPU = torch.device("cpu")
Trial = Callable[[Link, int], str | None]


def sums(link: Link, count: int) -> None:
    for step in range(count):
        total = link.comm.all_reduce(torch.tensor([link.comm.rank + step]))
        assert int(total) == sum(rank + step for rank in range(link.comm.size))


def tried(trial: Trial, ranks: int = 3) -> list[str | None]:
    """What each rank is told; the group is of use afterwards, through its own end."""

    def rank(comm: SimulatedComm) -> str | None:
        link = Link(comm)
        problem = Trials(link, CPU).problem(lambda: trial(link, comm.rank))
        assert link.comm is comm
        sums(link, 2)
        return problem

    return run_ranks(ranks, rank, timeout_s=10)


def test_what_goes_well_on_all_ranks_has_no_problem() -> None:
    assert tried(lambda link, rank: sums(link, 4)) == [None] * 3


@pytest.mark.parametrize("before", [0, 2, 4])
def test_a_rank_that_fails_alone_ends_the_trial_of_all(before: int) -> None:
    def trial(link: Link, rank: int) -> None:
        sums(link, before if rank == 1 else 4)
        if rank == 1:
            raise RuntimeError("not enough memory")

    assert tried(trial) == ["on rank 1: RuntimeError: not enough memory"] * 3


def test_of_two_that_fail_the_first_is_named() -> None:
    def trial(link: Link, rank: int) -> str | None:
        sums(link, 3)
        return f"numbers differ by {rank}" if rank else None

    assert tried(trial) == ["on rank 1: numbers differ by 1"] * 3


def test_what_all_ranks_find_names_none() -> None:
    def trial(link: Link, rank: int) -> str:
        sums(link, 1)
        return f"numbers differ by {rank}"

    assert tried(trial) == ["numbers differ by 0"] * 3


def test_ranks_that_go_different_ways_are_told() -> None:
    found = tried(lambda link, rank: sums(link, 5 - rank))
    assert found == ["its code meets the other ranks more often on some ranks than on others"] * 3


def test_an_answer_longer_than_what_is_sent_is_cut() -> None:
    (own, *others) = tried(lambda link, rank: "é" * 1000 if rank == 0 else None)
    assert own is not None and own.startswith("on rank 0: éé") and others == [own] * 2


def test_what_no_model_raises_is_no_problem_of_the_model() -> None:
    def trial() -> str | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trials().problem(trial)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_decoders_take_the_deepest_way_that_all_ranks_pass(fault: str) -> None:
    plan = plan_and_prove(*family_of("llama").load(), 2)
    ids, every = torch.arange(3, 20), torch.arange(17)

    def rank(comm: SimulatedComm) -> tuple[str, tuple[str, ...], torch.Tensor]:
        chosen = chosen_with_a_fault(comm, "llama", plan, fault, 1)
        with torch.inference_mode():
            return chosen.model.way, chosen.notes, chosen.model.plain(ids, every)

    found = run_ranks(2, rank, timeout_s=60)
    with torch.inference_mode():
        expected = build(family_of("llama"), "eager", torch.float32)(ids[None]).logits[0]
    for way, notes, logits in found:
        assert way == "padded"
        assert any(note.startswith(f"not paged: {FAULTS[fault].said.format(1)}") for note in notes), notes
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_model_that_one_rank_cannot_serve_is_refused_by_all() -> None:
    plan = plan_and_prove(*family_of("llama").load(), 2)

    def rank(comm: SimulatedComm) -> str:
        model = build(family_of("llama"), "eager", torch.float32)
        trials = Trials(shard(model, plan, comm.rank, comm), CPU)
        if comm.rank == 1:
            model.model.norm.weight.data.fill_(float("nan"))
        with pytest.raises(UnsupportedError) as caught:
            serve_causal(model, forgetful(), CPU, trials=trials)
        return str(caught.value)

    found = run_ranks(2, rank, timeout_s=60)
    assert found[0] == found[1] and "not finite" in found[0]


def test_encoders_take_the_deepest_way_that_all_ranks_pass() -> None:
    plan = plan_and_prove(*family_of("bert").load(), 2)

    def rank(comm: SimulatedComm) -> tuple[str, tuple[str, ...]]:
        model = build(family_of("bert"), "eager", torch.float32)
        trials = Trials(shard(model, plan, comm.rank, comm), CPU)
        chosen = (
            serve_encoder(model, failing(), CPU, trials=trials)
            if comm.rank
            else (serve_encoder(model, forgetful(), CPU, trials=trials))
        )
        return chosen.model.way, chosen.notes

    for way, notes in run_ranks(2, rank, timeout_s=60):
        assert way == "padded", notes


def test_encoder_decoders_take_the_freest_manner_that_all_ranks_pass() -> None:
    plan = plan_and_prove(*family_of("t5").load(), 2)

    def rank(comm: SimulatedComm) -> str:
        model = build(family_of("t5"), "eager", torch.float32)
        trials = Trials(shard(model, plan, comm.rank, comm), CPU)
        if comm.rank == 1:
            _refuse_chunks(model)
        return serve_seq2seq(model, CPU, trials=trials).notes[-1]

    assert run_ranks(2, rank, timeout_s=60) == ["served the seq2seq way: their tokens one by one"] * 2


def _refuse_chunks(model: torch.nn.Module) -> None:
    """As code does that takes one token a call once there is a cache."""
    inner = model.forward

    def forward(*args: object, **kwargs: object) -> object:
        ids = kwargs["decoder_input_ids"]
        assert isinstance(ids, torch.Tensor)
        has_cache = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        if has_cache and ids.shape[1] > 1:
            raise NotImplementedError("one token at a time")
        return inner(*args, **kwargs)

    forward.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
    model.forward = forward


class Doubtful:
    """Stands for fused layers that are right but on one rank."""

    num_fused, num_bytes, is_rounded, notes = 2, 7, False, ("2 of 2 layers fused",)
    way, keeps_kv = "fused", True

    def __init__(self, paged: object, is_right: bool) -> None:
        self._paged, self._is_right, self.is_restored = paged, is_right, False

    def restore(self) -> None:
        self.is_restored = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._paged, name)

    def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._paged.plain(ids, wanted)  # type: ignore[attr-defined]
        return logits if self._is_right else logits + 1


def test_layers_are_fused_on_all_ranks_or_on_none() -> None:
    plan = plan_and_prove(*family_of("llama").load(), 2)

    def rank(comm: Comm) -> tuple[str, tuple[str, ...], bool]:
        model = build(family_of("llama"), "eager", torch.float32)
        trials = Trials(shard(model, plan, comm.rank, comm), CPU)
        made: list[Doubtful] = []

        def fuse(_: object, paged: object) -> Doubtful:
            made.append(Doubtful(paged, is_right=comm.rank == 0))
            return made[0]

        with torch.inference_mode():
            chosen = serve_causal(model, paged_sdpa, CPU, fuse, trials=trials)  # type: ignore[arg-type]
        return chosen.model.way, chosen.notes, made[0].is_restored

    for way, notes, is_restored in run_ranks(2, rank, timeout_s=60):
        assert (way, is_restored) == ("paged", True)
        assert any(note.startswith("not fused: on rank 1: logits without a cache differ") for note in notes)
