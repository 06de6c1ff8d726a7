"""The flags of ``shoal bench``, and what they ask for. Knows what can be measured, not how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shoal.bench.contender import Contender, Setting
from shoal.cli.flags import Flag
from shoal.cli.options import ENGINE, engine_options
from shoal.errors import UsageError

__all__ = [
    "COMM",
    "CONTEXT",
    "OFFLINE",
    "SERVE",
    "TP",
    "engine_arguments",
    "listed",
    "numbers",
    "peers",
    "settings",
    "shared_options",
]

COMM = (
    Flag(name="ranks", type=int, help="Processes that take part, 2 to 8.", default="2", metavar="N"),
    Flag(
        name="sizes",
        type=str,
        help="Bytes of the tensor that comes out, by commas.",
        default="4096,65536,1048576",
        metavar="N,...",
    ),
    Flag(name="backends", type=str, help="Transports, by commas.", default="shm,gloo", metavar="NAME,..."),
    Flag(
        name="operations",
        type=str,
        help="all_reduce, all_gather, broadcast, by commas.",
        default="all_reduce",
        metavar="NAME,...",
    ),
    Flag(name="repeats", type=int, help="Calls measured of each.", default="200", metavar="N"),
)

_LISTS = ("tensor_parallel_size", "attn_implementation")  # given by commas here, one each elsewhere
_ENGINE = tuple(flag for flag in ENGINE if flag.name not in _LISTS)


def _runs(scale: str) -> tuple[Flag, ...]:
    return (
        Flag(
            name="tensor_parallel_size",
            type=str,
            help="Rank counts, by commas; the first is the reference.",
            default="1,2",
            short=("-tp",),
            metavar="N,...",
        ),
        Flag(
            name="scale",
            type=str,
            help="How much of the workloads' size: ci, small, full, or a factor up to 1.",
            default=scale,
            metavar="SCALE",
        ),
        Flag(name="repeats", type=int, help="Rounds; the figure is their median.", default="3", metavar="N"),
        Flag(
            name="plot",
            type=Path,
            help="Draw the speeds into this file too; needs matplotlib.",
            metavar="FILE.png",
        ),
    )


OFFLINE = (
    Flag(
        name="workload",
        type=str,
        help="Names by commas; all is the source's thirteen.",
        default="all",
        metavar="NAME,...",
    ),
    *_runs("ci"),
    Flag(
        name="total_threads",
        type=int,
        help="CPU threads in all, dealt to the ranks; instead of --num-threads.",
        metavar="N",
    ),
    Flag(
        name="attn_implementation",
        type=str,
        help="Attention kernels, by commas: each is measured.",
        default="the device's best",
        metavar="NAME,...",
    ),
    Flag(
        name="compare",
        type=str,
        help="Other programs, by commas: transformers (its continuous batching), generate, vllm, llama.cpp, "
        "openvino.",
        metavar="NAME,...",
    ),
    Flag(
        name="compare_python",
        type=str,
        help="The Python that has them installed.",
        default="this one",
        metavar="PATH",
    ),
    Flag(
        name="compare_model",
        type=str,
        help="What they read, if not the same folder: a .gguf for llama.cpp, an export for openvino.",
        metavar="PATH",
    ),
    *_ENGINE,
)

TP = (
    Flag(
        name="workload",
        type=str,
        help="Names by commas.",
        default="mixed_32,one_request",
        metavar="NAME,...",
    ),
    *_runs("full"),
    *_ENGINE,
)

CONTEXT = (
    Flag(
        name="lengths",
        type=str,
        help="Tokens of context, by commas; those that the model is too short for are left out.",
        default="256,512,1024,2048,4096,8000",
        metavar="N,...",
    ),
    Flag(name="tokens", type=int, help="Tokens decoded at each length.", default="24", metavar="N"),
    Flag(name="repeats", type=int, help="Rounds; the figure is their median.", default="5", metavar="N"),
    Flag(
        name="chart",
        type=Path,
        help="Draw the times over the bytes into this file too.",
        metavar="FILE.svg",
    ),
    *ENGINE,
)

SERVE = (
    Flag(name="url", type=str, help="A server that runs, OpenAI-compatible.", metavar="URL"),
    Flag(name="model", type=str, help="Serve this model for the time it takes.", metavar="MODEL"),
    Flag(
        name="served_model_name",
        type=str,
        help="Name the server calls the model by.",
        default="the first it lists",
        metavar="NAME",
    ),
    Flag(name="api_key", type=str, help="Key the server wants; better given as SHOAL_API_KEY."),
    Flag(
        name="endpoint",
        type=Literal["completions", "chat"],
        help="What is called.",
        default="completions",
    ),
    Flag(name="num_prompts", type=int, help="Requests.", default="32", metavar="N"),
    Flag(name="max_tokens", type=int, help="Most tokens of an answer.", default="64", metavar="N"),
    Flag(
        name="ignore_eos",
        type=bool,
        help="Go on after an end-of-sequence token; not every server takes it.",
        default="off",
        negative=True,
    ),
    Flag(name="temperature", type=float, help="0 is greedy.", default="0"),
    Flag(
        name="concurrency",
        type=int,
        help="Closed loop: clients that wait for their answers.",
        default="1",
        metavar="N",
    ),
    Flag(
        name="request_rate",
        type=float,
        help="Open loop: requests a second, at Poisson arrivals; inf sends all at once.",
        metavar="R",
    ),
    Flag(
        name="goodput",
        type=list[str],
        help="Count requests that keep to this, in ms: ttft:500 itl:100 e2e:5000.",
        metavar="METRIC:MS",
    ),
    *ENGINE,
)


def listed(options: Mapping[str, Any], name: str, default: str) -> list[str]:
    """Names by commas."""
    return [part.strip() for part in str(options.get(name, default)).split(",") if part.strip()]


def numbers(text: str, field: str) -> tuple[int, ...]:
    """Whole numbers by commas.

    Raises:
        UsageError: something else is among them.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{field}: whole numbers by commas, got {text!r}", field=field) from error


def settings(options: Mapping[str, Any]) -> tuple[list[Setting], tuple[int, ...], int]:
    """Our engines of a measurement.

    Returns:
        one for each attention kernel and rank count, the rank counts, and the CPU threads in all (of the
        setting that has most).

    Raises:
        UsageError: options that exclude each other, or no whole numbers above 0.
    """
    from shoal.device.cpu import threads_per_rank  # imports torch

    ranks = numbers(str(options.get("tensor_parallel_size", "1,2")), "tensor_parallel_size")
    if min(ranks) < 1:
        raise UsageError("tensor_parallel_size: at least 1 each", field="tensor_parallel_size")
    total = options.get("total_threads")
    if total is not None and "num_threads" in options:
        raise UsageError("total_threads: excludes --num-threads; set one", field="total_threads")
    if total is not None and total < max(ranks):
        raise UsageError(f"total_threads: {total} for {max(ranks)} ranks", field="total_threads")
    each = options.get("num_threads") or threads_per_rank(max(ranks))
    threads = {size: each if total is None else total // size for size in ranks}
    kernels = listed(options, "attn_implementation", "")
    found = [
        Setting(
            f"{kernel} -tp {size}" if len(kernels) > 1 else f"-tp {size}",
            {
                "tensor_parallel_size": size,
                "num_threads": threads[size],
                **({"attn_implementation": kernel} if kernel else {}),
            },
        )
        for kernel in kernels or [""]
        for size in ranks
    ]
    return found, ranks, max(size * threads[size] for size in ranks)


def shared_options(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine options that all settings share."""
    own = (*_LISTS, "num_threads")
    return {"model": model, **{k: v for k, v in engine_options(options).items() if k not in own}}


def peers(
    options: Mapping[str, Any], model: Path, threads: int, max_model_len: int
) -> dict[str, Callable[[], Contender]]:
    """The other programs that are asked for, by name; each is started when it is called.

    Raises:
        UsageError: no program of a name.
    """
    from shoal.bench.peers.client import PeerContender, PeerOrder
    from shoal.device.base import resolve_device

    found: dict[str, Callable[[], Contender]] = {}
    for program in listed(options, "compare", ""):
        order = PeerOrder(
            program=program,
            python=options.get("compare_python", sys.executable),
            model=options.get("compare_model", str(model)),
            threads=threads,
            dtype=_peer_dtype(options),
            max_model_len=max_model_len,
            device=str(resolve_device(str(options.get("device", "auto"))).torch_device),
        )
        order.check()
        found[program] = lambda order=order: PeerContender(order)  # type: ignore[misc]
    return found


def _peer_dtype(options: Mapping[str, Any]) -> str:
    dtype = str(options.get("dtype", "auto"))
    return "float32" if dtype == "auto" else dtype


def engine_arguments(options: Mapping[str, Any]) -> list[str]:
    """The engine's options as a command line has them."""
    arguments: list[str] = []
    given: Sequence[Flag] = [flag for flag in ENGINE if flag.name in options]
    for flag in given:
        value = options[flag.name]
        if isinstance(value, bool):
            if value or flag.negative:
                arguments.append(flag.spelling if value else f"--no-{flag.spelling[2:]}")
        else:
            arguments += [flag.spelling, str(value)]
    return arguments
