"""Contenders take turns on the same prompts, rows say what they were, and engines are shared and closed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from shoal.bench.contender import Ran, Setting
from shoal.bench.offline import Order, Subject, measure
from shoal.bench.rows import Row
from shoal.bench.workloads import Scale, Workload, named
from shoal.errors import EngineError, UsageError
from support.toy import Toys, ToyTokenizer, table

ONE_AND_TWO = tuple(Setting(f"-tp {size}", {"tensor_parallel_size": size}) for size in (1, 2))


def rows(toys: Toys, names: Sequence[str] | Sequence[Workload], says: str = "", **changes: Any) -> list[Row]:
    workloads = [w for n in names for w in ([n] if isinstance(n, Workload) else named([n]))]
    order = Order(
        **{
            "workloads": workloads,
            "settings": ONE_AND_TWO,
            "options": {"model": "toy"},
            "scale": Scale.parse("ci"),
            "repeats": 2,
            **changes,
        }
    )
    return list(measure(order, Subject(ToyTokenizer(says), 4096), toys))


def alike() -> Toys:
    return Toys({1: table(), 2: table()})


def test_every_workload_of_the_source_makes_a_coherent_row() -> None:
    found = rows(alike(), ["all"])
    assert len(found) == 13
    assert all(row.is_coherent for row in found)
    for row in found:
        json.dumps(row.to_dict(), allow_nan=False)
        assert [entry.ratio > 0 for entry in row.entries] == [True, True]


def test_contenders_take_turns_and_every_other_round_is_backwards() -> None:
    toys = alike()
    rows(toys, ["rollouts_1024"], repeats=2)
    warm, first, second = toys.calls[:2], toys.calls[2:4], toys.calls[4:6]
    assert (warm, first, second) == (["-tp 1", "-tp 2"], ["-tp 1", "-tp 2"], ["-tp 2", "-tp 1"])


def test_a_rank_count_that_computes_something_else_makes_the_row_incoherent() -> None:
    (row,) = rows(Toys({1: table(), 2: table(1)}), ["rollouts_1024"])
    assert not row.is_coherent
    assert row.entries[0].is_coherent, "the reference is held against nothing"
    difference = row.to_dict()["entries"][1]["agreement"]["first_difference"]
    assert difference["gap"] > 1e-3
    assert difference["wanted"] != difference["got"]


def test_rows_with_equal_options_share_engines_and_all_are_shut_down() -> None:
    toys = alike()
    rows(toys, ["gsm8k_default", "gsm8k_sampling", "gsm8k_bare_bones"])
    assert len(toys.opened) == 4
    bare = toys.opened[2]
    assert (bare.cpu_kernels, bare.enable_prefix_caching, bare.attn_implementation) == ("off", False, "sdpa")
    assert bare.async_scheduling is False
    assert all(engine.is_shut_down for engine in toys.engines)


def test_engines_are_shut_down_where_a_run_fails() -> None:
    toys = alike()

    def failing(config: Any) -> Any:
        engine = toys(config)
        if config.tensor_parallel_size == 2:
            engine.generate = broken
        return engine

    def broken(*_: Any) -> Any:
        raise EngineError("a rank died")

    order = Order(named(["few_blocks"]), ONE_AND_TWO, {"model": "toy"}, Scale.parse("ci"), 1)
    with pytest.raises(EngineError, match="a rank died"):
        list(measure(order, Subject(ToyTokenizer(), 4096), failing))
    assert [engine.is_shut_down for engine in toys.engines] == [True, True]


def test_what_came_of_compiling_is_said() -> None:
    toys = alike()
    toys.notes = ("dtype as asked", "not compiled: there is nothing left")
    (row,) = rows(toys, ["gsm8k_compile"])
    assert [config.compile for config in toys.opened] == [True, True]
    assert row.notes == tuple(f"-tp {size} not compiled: there is nothing left" for size in (1, 2))


def test_a_settings_own_option_wins_over_the_rows_and_it_is_said() -> None:
    toys = alike()
    kernels = [Setting(name, {"attn_implementation": name}) for name in ("cpu_paged", "eager")]
    (row,) = rows(toys, ["gsm8k_no_fast_decode"], settings=kernels)
    assert [config.attn_implementation for config in toys.opened] == ["cpu_paged", "eager"]
    assert row.notes == ("attn_implementation is as asked, not the row's sdpa",)


def test_the_share_of_right_answers_is_of_all_rounds() -> None:
    (none,) = rows(alike(), ["gsm8k_default"], says="no number")
    assert [entry.accuracy for entry in none.entries] == [0.0, 0.0]
    (other,) = rows(alike(), ["rollouts_1024"])
    assert [entry.accuracy for entry in other.entries] == [None, None]


def test_time_to_first_token_and_decoding_are_told_apart() -> None:
    (row,) = rows(alike(), ["one_request"], scale=Scale.parse("full"))
    for entry in row.entries:
        assert entry.first_token_s is not None and 0 < entry.first_token_s < max(entry.seconds)
        assert entry.output_tokens == (64, 64)


class Peer:
    """Another program, which gives the same token for ever."""

    name = "peer"
    is_closed = False

    def run(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> Ran:
        return Ran(2.0, [[[1] * one.max_tokens for _ in range(one.n)] for one in params])

    def close(self) -> None:
        self.is_closed = True


def test_another_program_is_compared_and_not_judged() -> None:
    peer = Peer()
    (row,) = rows(alike(), ["rollouts_1024"], peers={"peer": lambda: peer})
    entry = row.entries[2]
    assert (entry.name, entry.is_ours, entry.tokens_per_s) == ("peer", False, 4 * 32 / 2.0)
    assert not entry.is_coherent
    assert row.is_coherent
    assert peer.is_closed


def test_another_programs_ids_are_not_compared_where_they_are_drawn() -> None:
    (row,) = rows(alike(), ["multi_return_seq"], peers={"peer": Peer})
    assert [entry.agreement is None for entry in row.entries] == [True, False, True]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"workloads": []}, "workload"),
        ({"settings": []}, "tensor_parallel_size"),
        ({"settings": ONE_AND_TWO[:1] * 2}, "tensor_parallel_size"),
        ({"repeats": 0}, "repeats"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_by_its_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        rows(alike(), ["few_blocks"], **wrong)
    assert caught.value.field == field
