"""Reading tensors and parts of tensors out of a folder's files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.checkpoint import reader as module
from shoal.checkpoint.reader import CheckpointReader, sliced_shape
from shoal.errors import CheckpointError, ModelNotFoundError


@dataclass(frozen=True)
class Part:
    dim: int
    ranges: tuple[tuple[int, int], ...]


TENSORS = {
    "a": torch.arange(48, dtype=torch.float32).reshape(6, 8),
    "b": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
    "ids": torch.arange(5),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
}


def save(folder: Path, kind: str) -> Path:
    """The tensors in one of the four layouts a folder may have."""
    halves = [dict(list(TENSORS.items())[:2]), dict(list(TENSORS.items())[2:])]
    if kind == "safetensors":
        save_file(TENSORS, folder / "model.safetensors")
    elif kind == "bin":
        torch.save(TENSORS, folder / "pytorch_model.bin")
    elif kind == "old bin":
        torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        suffix, stem = ("safetensors", "model") if kind == "shards" else ("bin", "pytorch_model")
        weight_map = {}
        for number, half in enumerate(halves, 1):
            shard = f"{stem}-0000{number}-of-00002.{suffix}"
            (save_file if kind == "shards" else torch.save)(half, folder / shard)
            weight_map |= dict.fromkeys(half, shard)
        index = folder / f"{stem}.{suffix}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(shoal_home: Path) -> None:
    """Old pickles are rewritten into the cache folder: not into the user's."""


KINDS = ["safetensors", "shards", "bin", "bin shards", "old bin"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_same_tensors(tmp_path: Path, kind: str) -> None:
    with CheckpointReader(save(tmp_path, kind)) as reader:
        assert sorted(reader.names()) == sorted(TENSORS)
        for name, expected in TENSORS.items():
            assert name in reader
            assert reader.shape(name) == tuple(expected.shape)
            assert reader.dtype(name) is expected.dtype
            assert torch.equal(reader.read(name), expected)
    assert reader.bytes_read == sum(value.numel() * value.element_size() for value in TENSORS.values())


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("name", "dim", "ranges"),
    [
        ("a", 0, ((1, 3),)),
        ("a", 1, ((0, 2), (5, 8))),
        ("a", 0, ((4, 6), (0, 1))),
        ("a", -1, ((3, 4),)),
        ("a", 0, ()),
        ("a", 1, ((2, 2),)),
        ("b", 1, ((0, 1), (2, 3))),
        ("ids", 0, ((1, 5),)),
    ],
)
def test_a_part_is_its_ranges_in_order_and_only_they_are_read(
    tmp_path: Path, kind: str, name: str, dim: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    whole = TENSORS[name]
    wanted = [i for start, stop in ranges for i in range(start, stop)]
    expected = whole.index_select(dim, torch.tensor(wanted, dtype=torch.int64))
    reader = CheckpointReader(save(tmp_path, kind))
    assert torch.equal(reader.read(name, Part(dim, ranges)), expected)
    assert reader.bytes_read == expected.numel() * expected.element_size()


def test_the_dtype_is_converted_on_the_way(tmp_path: Path) -> None:
    reader = CheckpointReader(save(tmp_path, "safetensors"))
    assert torch.equal(reader.read("b", dtype=torch.float64), TENSORS["b"].double())
    assert reader.bytes_read == 48


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_what_is_read_is_memory_of_its_own(tmp_path: Path, kind: str) -> None:
    """A tensor outlives its file, and writing to it changes no later reading."""
    reader = CheckpointReader(save(tmp_path, kind))
    reader.read("a").zero_()
    assert torch.equal(reader.read("a"), TENSORS["a"])


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_large_tensors_are_read_in_pieces_that_add_up(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAPPED_BYTES", 64)
    reader = CheckpointReader(save(tmp_path, kind))
    assert torch.equal(reader.read("a"), TENSORS["a"])
    assert torch.equal(reader.read("a", Part(0, ((1, 6),))), TENSORS["a"][1:6])
    assert torch.equal(reader.read("b", Part(2, ((1, 3),))), TENSORS["b"][:, :, 1:3])
    assert torch.equal(reader.read("scalar"), TENSORS["scalar"])


@pytest.mark.parametrize("ranges", [((0, 7),), ((-1, 2),), ((3, 2),)])
def test_ranges_outside_the_tensor_are_refused(tmp_path: Path, ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(CheckpointError, match="outside shape"):
        CheckpointReader(save(tmp_path, "safetensors")).read("a", Part(0, ranges))


def test_an_unknown_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'nowhere'"):
        CheckpointReader(save(tmp_path, "safetensors")).read("nowhere")


def test_a_folder_without_weights_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no weights"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("damage", ["cut short", "garbage", "empty"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, damage: str) -> None:
    path = save(tmp_path, "safetensors" if name.endswith("safetensors") else "bin") / name
    data = path.read_bytes()
    path.write_bytes(
        {"cut short": data[: len(data) * 2 // 3], "garbage": b"\xff" * 200, "empty": b""}[damage]
    )
    with pytest.raises(CheckpointError, match=name):
        CheckpointReader(tmp_path)


def test_a_git_lfs_pointer_is_told_from_damage(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        CheckpointReader(tmp_path)


def test_a_missing_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    (save(tmp_path, "shards") / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: this shard is missing"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../model-00001-of-00002.safetensors", "/model-00001-of-00002.safetensors"]
)
def test_an_index_that_leads_out_of_its_folder_is_an_error(tmp_path: Path, shard: str) -> None:
    index = save(tmp_path, "shards") / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is outside its folder"):
        CheckpointReader(tmp_path)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_an_error(tmp_path: Path) -> None:
    index = save(tmp_path, "shards") / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="no tensor 'ghost'"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="not an index"):
        CheckpointReader(tmp_path)


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("code in the pickle ran",))


def test_code_in_a_pickle_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": _Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        CheckpointReader(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_pickle_that_holds_no_names_is_an_error(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a list"):
        CheckpointReader(tmp_path)


def test_the_sliced_shape_counts_what_is_kept() -> None:
    assert sliced_shape((6, 8), {1: ((0, 2), (5, 8))}) == (6, 5)
    assert sliced_shape((), {}) == ()
