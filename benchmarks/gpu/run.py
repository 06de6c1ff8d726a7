"""Everything that only an accelerator can show, checked and timed in one call.

    python benchmarks/gpu/run.py [--out FOLDER] [--sections NAME,...] [--device cuda] [--model demo]

Each section runs in a process of its own within its time limit, all of them in under six minutes; what
cannot run here is skipped with the reason. ``summary.json`` in the folder, and a line a section on stdout,
say how it went; the exit status is 1 if any section failed. Without a CUDA device all are skipped;
``--device cpu`` runs the same code on the CPU, which shows that the script works and nothing else.

A model that cannot be had (no network) is replaced by a random one of the demo's shape, and that is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
TOTAL_S = 350.0
TINY = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
DEMO_SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip


class Skipped(Exception):
    """A section that says nothing here, and why."""


class Wrong(Exception):
    """A check that failed."""


def make_model(folder: Path, shape: dict[str, Any]) -> str:
    """A random llama as a checkpoint; made once."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(**shape, initializer_range=0.05, bos_token_id=1, eos_token_id=2)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def real_model(options: argparse.Namespace) -> tuple[str, str]:
    """The model's folder and what it is."""
    from shoal.checkpoint.source import resolve
    from shoal.errors import ShoalError

    try:
        return str(resolve(options.model, progress=False)), options.model
    except (ShoalError, OSError) as error:
        path = make_model(options.out / "random", DEMO_SHAPE)
        return path, f"random weights of the demo's shape ({options.model}: {str(error)[:100]})"


def engine(path: str, **options: Any) -> Any:
    """A loaded engine of ours, as benchmarks know it."""
    from shoal.bench.contender import EngineContender, open_engine

    return EngineContender(str(options), {"model": path, **options}, open_engine)


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    return [[(7 * i + 13 * n + 3) % vocabulary for i in range(length + n)] for n in range(count)]


def compare(path: str, count: int, tokens: int, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two settings on the same prompts: whether the tokens are the same, and the speed of each."""
    from shoal.bench.verdict import Round, agreement
    from shoal.sampling_params import SamplingParams

    prompts = prompts_of(count, 20, 101)
    params = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)] * count
    contenders = []
    try:
        for setting in (one, other):
            contenders.append(engine(path, **setting))
            contenders[-1].run(prompts[:1], params[:1])
        runs = [contender.run(prompts, params) for contender in contenders]
        found = agreement(*contenders, [Round(prompts, params, runs[0])], runs[1:])
    finally:
        for contender in contenders:
            contender.close()
    result = {
        "settings": [one, other],
        "tokens_per_s": [run.num_tokens / run.seconds for run in runs],
        "answers": found.requests,
        "differing": found.differing,
    }
    if not found.is_equal:
        raise Wrong(f"not the same tokens: {result}, first {found.first}")
    return result


def device(options: argparse.Namespace) -> dict[str, Any]:
    """What there is, and how much memory."""
    import dataclasses
    from importlib.metadata import version

    from shoal.device.base import available_devices, resolve_device

    chosen = resolve_device(options.device)
    return {
        "available": available_devices(),
        "auto": resolve_device("auto").name,
        "description": chosen.description(),
        "visible": chosen.visible_count,
        "memory": dataclasses.asdict(chosen.memory()),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def attention(options: argparse.Namespace) -> dict[str, Any]:
    """The kernel that is chosen, and its numbers on the device beside the reference's on the CPU."""
    import torch

    from shoal.attention.base import KVShape, Variant
    from shoal.attention.kernels import KernelMaker
    from shoal.attention.pages import allocate
    from shoal.attention.resolve import resolve
    from shoal.attention.sdpa import paged_eager
    from shoal.device.base import resolve_device

    here, there = torch.device("cpu"), resolve_device(options.device).torch_device
    generator, plain = torch.Generator().manual_seed(0), Variant(0.125)
    found: dict[str, Any] = {}
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        maker = KernelMaker(dtype, num_threads=1)
        choice = resolve(None, resolve_device(options.device), maker.problem)
        query = torch.randn(8, 6, 64, generator=generator).to(dtype)
        pages = allocate([KVShape(2, 64, 64)], 12, 16, dtype, here)[0]
        for pool in (pages.keys, pages.values):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        want = paged_eager(query.float(), _moved(pages, torch.float32), _batch(here), plain, None)
        got = maker.make(choice.name)(query.to(there), _moved(pages, there), _batch(there), plain, None)
        error = float((got.float().cpu() - want).abs().max())
        if not error <= most:
            raise Wrong(f"{choice.name} in {dtype} differs from the reference by {error:.1e}")
        found[str(dtype)] = {"kernel": choice.name, "rejected": choice.rejected, "largest_error": error}
    return found


def _batch(where: Any) -> Any:
    """Two decodes and a chunk of a prompt over scattered blocks."""
    import torch

    from shoal.attention.base import AttentionBatch, DecodeGroup, Prefill

    def numbers(*values: Any) -> torch.Tensor:
        return torch.tensor(values, device=where)

    decode = DecodeGroup(numbers([3, 1, 7], [2, 0, 0]), numbers(40, 9))
    return AttentionBatch(numbers(*[0] * 8), decode, [Prefill(2, 8, numbers(5, 9), 25)])


def _moved(pages: Any, to: Any) -> Any:
    from shoal.attention.base import LayerPages

    return LayerPages(pages.keys.to(to), pages.values.to(to))


def tokens_tiny(options: argparse.Namespace) -> dict[str, Any]:
    """A tiny model gives the same tokens on the device as on the CPU."""
    path = make_model(options.out / "tiny", TINY)
    return compare(path, 8, 24, _setting("cpu"), _setting(options.device))


def tokens_model(options: argparse.Namespace) -> dict[str, Any]:
    """So does the demo."""
    path, what = real_model(options)
    return {"model": what, **compare(path, 8, 32, _setting("cpu"), _setting(options.device))}


def executors(options: argparse.Namespace) -> dict[str, Any]:
    """One rank in this process or in its own: the same tokens, and what the way between costs."""
    path, what = real_model(options)
    inline, apart = (_setting(options.device, executor=name) for name in ("inline", "processes"))
    return {"model": what, **compare(path, 8, 64, inline, apart)}


def several(options: argparse.Namespace) -> dict[str, Any]:
    """Two devices give the tokens of one."""
    from shoal.device.base import resolve_device

    count = resolve_device(options.device).visible_count
    if options.device != "cpu" and count < 2:
        raise Skipped(f"it takes two devices, there is {count}")
    path, what = real_model(options)
    one, two = (_setting(options.device, tensor_parallel_size=size) for size in (1, 2))
    return {"model": what, **compare(path, 8, 64, one, two)}


def compiled(options: argparse.Namespace) -> dict[str, Any]:
    """What torch.compile makes of it: the same tokens, and the speed."""
    path, what = real_model(options)
    plain, other = (_setting(options.device, compile=value, cpu_kernels="off") for value in (False, True))
    return {"model": what, **compare(path, 8, 64, plain, other)}


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """What the engine says that it holds is what the device says is gone, within 10%."""
    from shoal.device.base import resolve_device

    path, what = real_model(options)
    chosen = resolve_device(options.device)
    before = chosen.memory().allocated
    kv_bytes = 1 << 28
    contender = engine(path, **_setting(options.device, executor="inline", kv_cache_memory_bytes=kv_bytes))
    try:
        info = contender._engine.info
        ranks = [dict(rank) for rank in info.ranks]
        growth = chosen.memory().allocated - before
    finally:
        contender.close()
    said = sum(rank["weight_bytes"] + rank["kv_bytes"] for rank in ranks)
    found = {"model": what, "said_bytes": said, "device_bytes": growth, "ranks": ranks}
    if options.device != "cpu" and abs(growth - said) > 0.1 * said:
        raise Wrong(f"the device holds {growth} bytes, the engine says {said}: {found}")
    return found


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Many requests at once, beside transformers' continuous batching."""
    path, what = real_model(options)
    command = [
        sys.executable, "-m", "shoal", "bench", "offline", path, "--device", options.device, "--workload",
        "rollouts_1024", "--scale", options.scale, "-tp", "1", "--repeats", "2", "--compare", "transformers",
        "--dtype", "float32", "--json",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Wrong(f"status {ran.returncode}: {ran.stderr[-1500:]}")
    return {"model": what, **json.loads(ran.stdout)}


def tests(options: argparse.Namespace) -> dict[str, Any]:
    """The unit tests of devices and attention, on this machine."""
    folders = ["tests/unit/device", "tests/unit/attention"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "No module named pytest" in ran.stderr:
        raise Skipped("pytest is not installed")
    if ran.returncode:
        raise Wrong(f"status {ran.returncode}: {ran.stdout[-1500:]}")
    return {"said": ran.stdout.strip().splitlines()[-1]}


def _setting(device: str, **further: Any) -> dict[str, Any]:
    return {"device": device, "dtype": "float32", "kv_cache_memory_bytes": 1 << 27, **further}


Section = Callable[[argparse.Namespace], dict[str, Any]]
SECTIONS: dict[str, tuple[Section, float]] = {  # with its limit in seconds
    "device": (device, 30.0),
    "attention": (attention, 40.0),
    "tokens_tiny": (tokens_tiny, 45.0),
    "tokens_model": (tokens_model, 60.0),
    "executors": (executors, 60.0),
    "several": (several, 60.0),
    "memory": (memory, 40.0),
    "throughput": (throughput, 90.0),
    "compiled": (compiled, 90.0),
    "tests": (tests, 90.0),
}


def run_here(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One section, in this process."""
    from shoal.device.base import resolve_device
    from shoal.errors import ShoalError

    try:
        try:
            resolve_device(options.device)
        except ShoalError as error:
            raise Skipped(str(error)) from error
        return {"status": "passed", **SECTIONS[name][0](options)}
    except Skipped as skipped:
        return {"status": "skipped", "reason": str(skipped)}
    except Exception as error:  # the section's end: whatever it was is the result
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def run_apart(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """One section in a process of its own, killed with all it started at the limit."""
    answer = options.out / f"{name}.json"
    answer.unlink(missing_ok=True)
    further = ["--out", str(options.out), "--device", options.device, "--model", options.model]
    command = [sys.executable, str(HERE), "--only", name, "--scale", options.scale, *further]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started = time.monotonic()
    with (options.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            process.wait(limit_s)
            found = json.loads(answer.read_text()) if answer.exists() else None
        except subprocess.TimeoutExpired:
            found = {"status": "failed", "reason": f"not done within {limit_s:.0f} s"}
        finally:
            _end(process)
    if found is None:
        found = {"status": "failed", "reason": f"ended with status {process.returncode}; see {name}.log"}
    return {**found, "seconds": time.monotonic() - started}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the section's process and what is left of its group."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="What only an accelerator can show.")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")), help="a folder"
    )
    parser.add_argument("--sections", default=",".join(SECTIONS), help="by commas (default: all)")
    parser.add_argument("--device", default="cuda", help="cuda, xpu, mps, or cpu to try the script")
    parser.add_argument("--model", default="demo", help="of the sections that take a real one")
    parser.add_argument("--scale", default="small", help="of the throughput workload")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # this section, in this process
    options = parser.parse_args()
    names = [options.only] if options.only else options.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--sections: {', '.join(unknown)}: there are {', '.join(SECTIONS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    if options.only:
        found = run_here(options.only, options)
        (options.out / f"{options.only}.json").write_text(json.dumps(found, default=str))
        return 0
    deadline = time.monotonic() + TOTAL_S
    summary: dict[str, Any] = {}
    for name in names:
        left = deadline - time.monotonic()
        if left < 5:
            summary[name] = {"status": "failed", "reason": f"no time left of {TOTAL_S:.0f} s"}
        else:
            summary[name] = run_apart(name, options, min(SECTIONS[name][1], left))
        told = {key: summary[name][key] for key in ("reason", "tokens_per_s") if key in summary[name]}
        print(f"{name}: {summary[name]['status']} {json.dumps(told) if told else ''}", flush=True)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2))
    return int(any(found["status"] == "failed" for found in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
