"""Every conversion equals transformers' own, and reads of what is stored only what a part needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, core_model_loading
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from shoal.checkpoint.convert import Group, WholeModel, converted
from shoal.checkpoint.lazy import Computed, Lazy, Stored
from shoal.checkpoint.reader import CheckpointReader, sliced_shape

CONFIG = LlamaConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)


class _Doubles(ConversionOps):
    """Unknown here: it calculates."""

    def convert(self, input_dict: Any, target_patterns: Any, **_: Any) -> dict[str, torch.Tensor]:
        return {target_patterns[0]: 2 * next(iter(input_dict.values()))[0]}


# name: (source patterns, target patterns, operations, stored shapes, wanted shapes)
Shapes = dict[str, tuple[int, ...]]
CASES: dict[str, tuple[Any, Any, list[ConversionOps], Shapes, Shapes]] = {
    "stack": (
        "e.*.w",
        "e.all",
        [MergeModulelist(0)],
        {f"m.e.{i}.w": (6, 4) for i in range(3)},
        {"m.e.all": (3, 6, 4)},
    ),
    "stack last": (
        "e.*.w",
        "e.all",
        [MergeModulelist(1)],
        {f"m.e.{i}.w": (6, 4) for i in range(3)},
        {"m.e.all": (6, 3, 4)},
    ),
    "stack and join": (
        ["e.*.w1", "e.*.w3"],
        "e.both",
        [MergeModulelist(0), Concatenate(1)],
        {f"m.e.{i}.{w}": (6, 4) for i in range(3) for w in ("w1", "w3")},
        {"m.e.both": (3, 12, 4)},
    ),
    "join": (
        ["q.w", "k.w"],
        "qk.w",
        [Concatenate(0)],
        {"m.q.w": (6, 4), "m.k.w": (2, 4)},
        {"m.qk.w": (8, 4)},
    ),
    "chunk": (
        "qkv.w",
        ["q.w", "k.w", "v.w"],
        [Chunk(0)],
        {"m.qkv.w": (12, 4)},
        {f"m.{x}.w": (4, 4) for x in "qkv"},
    ),
    "transpose": ("old", "new", [Transpose(1, 2)], {"m.old": (2, 6, 4)}, {"m.new": (2, 4, 6)}),
    "transpose if needed": (
        "old",
        "new",
        [Transpose(0, 1, check_dims=True)],
        {"m.old": (6, 4)},
        {"m.new": (4, 6)},
    ),
    "no transpose needed": (
        "old",
        "new",
        [Transpose(0, 1, check_dims=True)],
        {"m.old": (6, 4)},
        {"m.new": (6, 4)},
    ),
    "interleave": ("old", "new", [Interleave(1)], {"m.old": (2, 8, 3)}, {"m.new": (2, 8, 3)}),
    "interleave back": (
        "old",
        "new",
        [Interleave(1, inverse=True)],
        {"m.old": (2, 8, 3)},
        {"m.new": (2, 8, 3)},
    ),
    "interleave and chunk": (
        "old",
        ["a.w", "b.w"],
        [Interleave(0), Chunk(0)],
        {"m.old": (8, 3)},
        {"m.a.w": (4, 3), "m.b.w": (4, 3)},
    ),
    "unknown": ("old", "new", [_Doubles()], {"m.old": (6, 4)}, {"m.new": (6, 4)}),
    "uneven chunk": (
        "old",
        ["a.w", "b.w"],
        [Chunk(0)],
        {"m.old": (5, 3)},
        {"m.a.w": (3, 3), "m.b.w": (2, 3)},
    ),
}
if hasattr(core_model_loading, "Split"):  # newer than the oldest transformers that is supported
    from transformers.core_model_loading import PermuteForRope, Split

    CASES |= {
        "split": (
            "qkv.w",
            ["q.w", "k.w", "v.w"],
            [Split(0)],
            {"m.qkv.w": (12, 4)},
            {"m.q.w": (8, 4), "m.k.w": (2, 4), "m.v.w": (2, 4)},
        ),
        "rope": ("old", "new", [PermuteForRope()], {"m.old": (8, 3)}, {"m.new": (8, 3)}),
        "chunk and rope": (
            "qkv.w",
            ["q.w", "k.w", "v.w"],
            [Chunk(0), PermuteForRope(permute_layer_names=["q.", "k."])],
            {"m.qkv.w": (24, 3)},
            {f"m.{x}.w": (8, 3) for x in "qkv"},
        ),
    }
READ_WHOLE = {"unknown", "uneven chunk"}


def setting(name: str, folder: Path) -> tuple[Group, WholeModel, dict[str, torch.Tensor]]:
    """A group as matching makes it, the model it is for, and what transformers makes of it."""
    sources, targets, operations, stored, wanted = CASES[name]
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    reader = CheckpointReader(folder)
    metas = {key: torch.empty(shape, device="meta") for key, shape in wanted.items()}
    model = WholeModel(SimpleNamespace(config=CONFIG), metas, {})
    theirs = WeightConverter(sources, targets, operations)
    group: Group | None = None
    for key, values in tensors.items():
        target, pattern = theirs.rename_source_key(key)
        group = group or Group(WeightConverter(sources, targets, operations), target)
        assert pattern is not None
        group.stored.setdefault(pattern, []).append(Stored(reader, key))
        theirs.add_tensor(target, key, pattern, values)
    assert group is not None
    made = theirs.convert(group.target, model=model, config=CONFIG)
    expected = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
    assert {key: tuple(value.shape) for key, value in expected.items()} == wanted
    return group, model, expected


def read(lazy: Lazy, ranges: dict[int, tuple[tuple[int, int], ...]]) -> torch.Tensor:
    out = torch.full(sliced_shape(lazy.shape, ranges), float("nan"), dtype=lazy.dtype)
    lazy.read_into(ranges, out)
    return out


@pytest.mark.parametrize("name", CASES)
def test_a_conversion_gives_what_transformers_gives_whole_and_in_part(tmp_path: Path, name: str) -> None:
    group, model, expected = setting(name, tmp_path)
    made = converted(group, model, list(expected))
    assert made.keys() == expected.keys()
    for key, whole in expected.items():
        assert torch.equal(read(made[key], {}), whole)
        for dim, size in enumerate(whole.shape):
            for kept in (((0, 1),), ((size - 1, size), (0, 1)), ((1, size),)):
                want = torch.cat([whole.narrow(dim, a, b - a) for a, b in kept], dim)
                assert torch.equal(read(made[key], {dim: kept}), want)


@pytest.mark.parametrize("name", sorted(CASES.keys() - READ_WHOLE))
def test_a_part_of_a_conversion_that_only_moves_values_costs_its_own_bytes(tmp_path: Path, name: str) -> None:
    group, model, expected = setting(name, tmp_path)
    made = converted(group, model, list(expected))
    reader = next(iter(group.stored.values()))[0].reader
    for key, whole in expected.items():
        for dim, size in enumerate(whole.shape):
            before = reader.bytes_read
            part = read(made[key], {dim: ((0, 1), (size - 1, size))})
            assert reader.bytes_read - before == part.nbytes


@pytest.mark.parametrize("name", sorted(READ_WHOLE))
def test_other_conversions_are_transformers_own_and_done_once_for_all_they_make(
    tmp_path: Path, name: str
) -> None:
    group, model, expected = setting(name, tmp_path)
    made = converted(group, model, list(expected))
    assert all(isinstance(lazy, Computed) for lazy in made.values())
    for lazy in made.values():
        read(lazy, {0: ((0, 1),)})
    reader = next(iter(group.stored.values()))[0].reader
    assert reader.bytes_read == sum(4 * torch.Size(shape).numel() for shape in CASES[name][3].values())


@pytest.mark.skipif("split" not in CASES, reason="this transformers has no such operation")
def test_pieces_are_as_large_as_the_whole_models_tensors_not_as_a_ranks_part(tmp_path: Path) -> None:
    """``Split`` and ``check_dims`` ask for the model's shapes; a rank's model has smaller ones."""
    group, whole, expected = setting("split", tmp_path)
    shapes = {key: tuple(value.shape) for key, value in expected.items()}
    local = {key: torch.empty(value.shape[0] // 2, 4, device="meta") for key, value in expected.items()}
    model = WholeModel(whole, local, shapes)
    made = converted(group, model, list(expected))
    assert torch.equal(read(made["m.k.w"], {0: ((1, 2),)}), expected["m.k.w"][1:2])


def test_an_operation_of_a_known_name_from_elsewhere_is_not_taken_for_transformers(tmp_path: Path) -> None:
    class Chunk(ConversionOps):
        def __init__(self) -> None:
            self.dim = 0

        def convert(self, input_dict: Any, target_patterns: Any, **_: Any) -> dict[str, torch.Tensor]:
            values = next(iter(input_dict.values()))[0]
            return {target_patterns[0]: values[1:], target_patterns[1]: values[:1]}

    group, model, _ = setting("uneven chunk", tmp_path)
    group.converter.operations = [Chunk()]
    made = converted(group, model, ["m.a.w", "m.b.w"])
    assert made["m.a.w"].shape == (4, 3)
