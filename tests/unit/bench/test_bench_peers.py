"""Other programs are run by an interpreter of their own; what is missing there is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shoal.bench.peers.client import PEERS, PeerContender, PeerOrder
from shoal.bench.peers.drive import _place
from shoal.errors import EngineError, UsageError
from shoal.sampling_params import SamplingParams
from support import families


def order(program: str, model: str = "none", python: str = sys.executable) -> PeerOrder:
    return PeerOrder(program=program, python=python, model=model, threads=1)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``fake(module, source)``: a package that a peer's interpreter will find."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(module: str, source: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)

    return write


def test_a_program_that_is_not_installed_is_refused_by_name(fake: Any) -> None:
    for program, module in (("vllm", "vllm"), ("llama.cpp", "llama_cpp"), ("openvino", "openvino_genai")):
        fake(module, "raise ImportError('it is not here')")
        with pytest.raises(UsageError, match=f"{program}: {module} cannot be imported by .*--compare-python"):
            PeerContender(order(program))


def test_unknown_programs_and_interpreters_are_refused() -> None:
    with pytest.raises(UsageError, match="none of transformers, generate, vllm"):
        PeerContender(order("sglang"))
    with pytest.raises(UsageError, match="/no/python does not start"):
        PeerContender(order("vllm", python="/no/python"))
    assert "llama.cpp" in PEERS


VLLM = """
print("noise on stdout")
__version__ = "0.1"
class SamplingParams:
    def __init__(self, **fields): self.fields = fields
class Branch:
    def __init__(self, ids): self.token_ids = tuple(ids)
class Output:
    def __init__(self, outputs): self.outputs = outputs
class LLM:
    def __init__(self, **fields): assert fields["model"] == "folder"
    def generate(self, prompts, params, use_tqdm):
        if prompts[0]["prompt_token_ids"] == [0]: raise RuntimeError("out of blocks")
        if prompts[0]["prompt_token_ids"] == [1]: import os; os._exit(3)
        return [
            Output([Branch([p["prompt_token_ids"][-1] + b] * one.fields["max_tokens"]) for b in range(one.fields["n"])])
            for p, one in zip(prompts, params)
        ]
"""  # noqa: E501


def test_prompts_go_over_and_ids_come_back_whatever_the_program_prints(fake: Any) -> None:
    fake("vllm", VLLM)
    peer = PeerContender(order("vllm", "folder"))
    assert peer.name == "vllm 0.1"
    ran = peer.run([[7, 8], [20] * 50_000], [SamplingParams(n=2, max_tokens=3, temperature=0.5)] * 2)
    assert ran.ids == [[[8] * 3, [9] * 3], [[20] * 3, [21] * 3]]
    assert ran.seconds > 0
    with pytest.raises(EngineError, match=r"vllm 0\.1: RuntimeError: out of blocks"):
        peer.run([[0]], [SamplingParams(max_tokens=1)])
    assert peer.run([[5]], [SamplingParams(max_tokens=1)]).ids == [[[5]]], "it goes on after a failure"
    with pytest.raises(EngineError, match=r"vllm 0\.1 ended with status 3"):
        peer.run([[1]], [SamplingParams(max_tokens=1)])
    peer.close()


def test_what_a_program_started_ends_with_it(fake: Any, tmp_path: Path) -> None:
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(300)']"
    noted = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    fake("vllm", f"import subprocess, sys\nchild = subprocess.Popen({sleeper})\n{noted}\n{VLLM}")
    peer = PeerContender(order("vllm", "folder"))
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    assert child.is_running()
    peer.close()
    gone, _ = psutil.wait_procs([child], timeout=20)
    assert gone == [child]


def test_branches_follow_their_request() -> None:
    """As transformers' continuous batching names them."""
    ids = ["req_10", "req_9__child#1", "req_9", "req_10__child#0", "req_9__child#0"]
    assert sorted(ids, key=_place) == [
        "req_9",
        "req_9__child#0",
        "req_9__child#1",
        "req_10",
        "req_10__child#0",
    ]


def test_transformers_generate_gives_the_models_greedy_ids(families_path: Path) -> None:
    path = families.save("llama", families_path)
    prompts = families.prompts(2, seed=1)
    peer = PeerContender(order("generate", str(path)))
    try:
        ran = peer.run(prompts, [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)] * 2)
    finally:
        peer.close()
    model = families.build("llama")
    with torch.no_grad():
        for prompt, (ids,) in zip(prompts, ran.ids, strict=True):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            assert ids == logits.argmax(-1).tolist()
