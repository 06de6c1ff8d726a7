"""One rank builds, measures, allocates and computes what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from shoal.comm.local import LocalComm
from shoal.errors import EngineError, ModelNotFoundError, UnsupportedError
from shoal.fuse import rival
from shoal.fuse.rival import Race
from shoal.messages import AllocateKV, RankReport
from shoal.worker.load import make_starts
from shoal.worker.rank import RankWorker, weight_bytes
from support import families
from support.loads import make_load, make_step


@pytest.fixture
def started(families_path: Path) -> Iterator[tuple[RankWorker, RankReport]]:
    worker = RankWorker()
    load = make_load(families.save("llama_9_3", families_path), 1)
    yield worker, worker.start(make_starts(load, "")[0])
    worker.close()


def test_shared_weights_count_once() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert weight_bytes(nn.Sequential(first, second)) == 4 * (64 + 8)


def test_the_report_says_what_was_built(families_path: Path) -> None:
    worker = RankWorker()
    load = make_load(families.save("llama_9_3", families_path), 1, cpu_kernels="off")
    report = worker.start(make_starts(load, "")[0])
    worker.close()
    model = families.build("llama_9_3")
    unique = {p.data_ptr(): p.nbytes for p in model.parameters()}
    buffers = sum(b.nbytes for b in model.buffers())
    assert report.weight_bytes == sum(unique.values()) + buffers
    assert report.kv_bytes_per_token == 2 * 3 * (8 + 8) * 4, "layers, KV heads, key and value width, float32"
    assert report.kv_budget_bytes == 1 << 20
    assert (report.rank, report.dtype, report.attention) == (0, "float32", "cpu_paged")


def test_packed_weights_are_held_once_but_for_what_fills_up_their_panels(
    started: tuple[RankWorker, RankReport],
) -> None:
    _, report = started
    model = families.build("llama_9_3")
    whole = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    assert "2 of 2 layers fused, 1 call(s) a step" in report.notes
    # Of 101 tokens and of 72 features 112 and 80 are held.
    assert whole <= report.weight_bytes < 1.1 * whole


def test_torch_keeps_to_one_thread_while_all_that_is_large_runs_in_our_kernels(families_path: Path) -> None:
    path, before = families.save("llama_9_3", families_path), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for kernels, threads in (("auto", 1), ("off", 2)):
            worker = RankWorker()
            worker.start(make_starts(make_load(path, 1, cpu_kernels=kernels, num_threads=2), "")[0])
            assert torch.get_num_threads() == threads
            worker.close()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_torch_computes_where_it_is_faster_unless_weights_are_to_be_rounded(
    families_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rival, "race", lambda dtype, comm: Race({1: 0.5, 64: 0.5}))
    path = families.save("llama_9_3", families_path)
    for quantization in (None, "int8"):
        worker = RankWorker()
        report = worker.start(make_starts(make_load(path, 1, quantization=quantization), "")[0])
        worker.close()
        assert any("fused" in note for note in report.notes) == (quantization is not None)


def test_pages_hold_what_was_allocated(started: tuple[RankWorker, RankReport]) -> None:
    worker, report = started
    ready = worker.allocate(AllocateKV(num_blocks=5, block_size=7))
    assert ready.kv_bytes == 5 * 7 * report.kv_bytes_per_token


@pytest.mark.parametrize(("num_blocks", "block_size"), [(16, 4), (64, 1), (1, 64)])
def test_steps_continue_prompts_as_transformers_does(
    started: tuple[RankWorker, RankReport], num_blocks: int, block_size: int
) -> None:
    worker, _ = started
    worker.allocate(AllocateKV(num_blocks=num_blocks, block_size=block_size))
    prompt = families.prompts(1, 20)[0][:6]
    expected = families.reference(families.build("llama_9_3"), prompt, 2)
    first = worker.execute(make_step(1, (0, prompt), block_size=block_size)).tokens[0].token_id
    second = worker.execute(make_step(2, (len(prompt), [first]), block_size=block_size)).tokens[0].token_id
    assert [first, second] == expected


def test_only_rank_0_samples(families_path: Path) -> None:
    comm = LocalComm()
    load = make_load(families.save("llama_9_3", families_path), 1)
    worker = RankWorker(comm)
    worker.start(make_starts(load, "")[0])
    comm.rank = 1
    worker.allocate(AllocateKV(num_blocks=16, block_size=4))
    assert worker.execute(make_step(1, (0, [5, 6]))).tokens == ()


def test_a_step_before_the_pages_is_refused(started: tuple[RankWorker, RankReport]) -> None:
    with pytest.raises(EngineError, match="before its KV pages"):
        started[0].execute(make_step(1, (0, [5])))


def test_a_folder_without_a_model_is_wrong_input(families_path: Path, tmp_path: Path) -> None:
    load = make_load(families.save("llama_9_3", families_path), 1)
    start = make_starts(load, "")[0]
    worker = RankWorker()
    with pytest.raises(ModelNotFoundError):
        worker.start(type(start)(**{**_fields(start), "model_path": str(tmp_path)}))
    worker.close()
    worker.close()


def _fields(start: object) -> dict[str, object]:
    return {name: getattr(start, name) for name in start.__struct_fields__}  # type: ignore[attr-defined]


def test_a_closed_rank_lets_go_of_everything(started: tuple[RankWorker, RankReport]) -> None:
    """A closed rank holds neither model nor pages."""
    worker, _ = started
    worker.allocate(AllocateKV(num_blocks=2, block_size=4))
    worker.close()
    assert worker._model is None and worker._runner is None
    with pytest.raises(EngineError):
        worker.execute(make_step(1, (0, [5])))
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize(
    "options",
    [{"cpu_kernels": "off"}, {"attn_implementation": "sdpa"}, {"dtype": "float16"}],
    ids=["without our kernels", "with another attention kernel", "in a dtype they do not have"],
)
def test_rounded_weights_are_refused_where_our_kernels_do_not_compute(
    options: dict[str, str], families_path: Path
) -> None:
    load = make_load(families.save("llama_9_3", families_path), 1, quantization="int8", **options)
    worker = RankWorker()
    with pytest.raises(UnsupportedError, match="int8 weights are for our CPU kernels") as caught:
        worker.start(make_starts(load, "")[0])
    worker.close()
    assert caught.value.field == "quantization"


def test_rounded_weights_are_refused_where_nothing_can_be_packed(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=101, hidden_size=8, n_layer=2, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    load = make_load(tmp_path, 1, quantization="int4")
    worker = RankWorker()
    with pytest.raises(UnsupportedError, match=r"nothing can be held in int4: .*served the padded way"):
        worker.start(make_starts(load, "")[0])
    worker.close()


@pytest.mark.parametrize(("options", "is_packed"), [({}, True), ({"cpu_kernels": "off"}, False)])
def test_linears_of_a_model_that_is_not_fused_are_packed_unless_kernels_are_off(
    options: dict[str, str], is_packed: bool, families_path: Path
) -> None:
    load = make_load(families.save("bloom", families_path), 1, **options)
    worker = RankWorker()
    report = worker.start(make_starts(load, "")[0])
    worker.allocate(AllocateKV(num_blocks=16, block_size=4))
    model = families.build("bloom")
    whole = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    assert ("8 linears packed" in report.notes) == is_packed
    assert whole <= report.weight_bytes < (1.1 if is_packed else 1.01) * whole
    prompt = families.prompts(1, 20)[0][:6]
    expected = families.reference(model, prompt, 2)
    first = worker.execute(make_step(1, (0, prompt))).tokens[0].token_id
    second = worker.execute(make_step(2, (len(prompt), [first]))).tokens[0].token_id
    worker.close()
    assert [first, second] == expected


def test_rounded_weights_are_fewer_bytes_and_the_report_says_what_they_cost(families_path: Path) -> None:
    folder = families.save("llama_9_3", families_path)
    reports = {}
    for quantization in (None, "int8"):
        worker = RankWorker()
        reports[quantization] = worker.start(
            make_starts(make_load(folder, 1, quantization=quantization), "")[0]
        )
        worker.close()
    assert reports["int8"].weight_bytes < 0.4 * reports[None].weight_bytes
    assert any(note.startswith("logits differ by") for note in reports["int8"].notes)
    assert not any(note.startswith("logits differ by") for note in reports[None].notes)
