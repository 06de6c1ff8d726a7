"""Runs one of the programs that are compared, in the interpreter it is installed in: ``python drive.py``.

Stands alone: it imports nothing of shoal, which need not be installed there. Lines of JSON come on stdin, one
answer to each goes to what stdout was at the start; what programs print goes to stderr. The first line says
what to load (``program, model, threads, dtype, max_model_len, device``), each later one has ``requests``, a
list of ``{prompt, max_tokens, temperature, top_p, n, seed, ignore_eos}``; the answer has ``seconds`` and
``ids`` [request][branch][token].
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Served = tuple[list[list[list[int]]], float]
"""Ids [request][branch][token], and the seconds they took."""

Serve = Callable[[list[Request]], Served]

_CACHE_SHARE = 0.1  # of the memory, where a program would take it all: others are loaded beside it


class RefusedError(Exception):
    """The program is not there, or cannot do what is asked."""


def main() -> None:
    """Answer until stdin ends; then end, with all processes that the program has started."""
    os.setpgrp()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A script's own folder comes first, whose files are not what programs mean by their names.
    here = Path(__file__).parent.resolve()
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    serve: Serve | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if serve is None:
                serve, version = _load(message)
                answer: dict[str, Any] = {"version": version}
            else:
                ids, seconds = serve(message["requests"])
                answer = {"seconds": seconds, "ids": ids}
        except RefusedError as error:
            answer = {"refused": str(error)}
        except Exception as error:  # the process boundary: whoever started us says what happened
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    answers.flush()
    os.killpg(0, signal.SIGKILL)  # some leave processes behind, or abort in threads, if they may end as usual


def _timed(serve: Callable[[list[Request]], list[list[list[int]]]]) -> Serve:
    """With the seconds of the whole call."""

    def timed(requests: list[Request]) -> Served:
        started = time.perf_counter()
        ids = serve(requests)
        return ids, time.perf_counter() - started

    return timed


def _load(order: dict[str, Any]) -> tuple[Serve, str]:
    loaders = {
        "transformers": (_continuous_batching, "transformers"),
        "generate": (_generate, "transformers"),
        "vllm": (_vllm, "vllm"),
        "llama.cpp": (_llama_cpp, "llama_cpp"),
        "openvino": (_openvino, "openvino_genai"),
    }
    load, module = loaders[order["program"]]
    try:
        package = importlib.import_module(module)
    except ImportError as error:
        raise RefusedError(
            f"{module} cannot be imported by {sys.executable} ({error}); name an interpreter that has it "
            "by --compare-python"
        ) from error
    return load(package, order), str(getattr(package, "__version__", "unknown"))


def _same(requests: list[Request], *names: str) -> list[Any]:
    """Values that all requests of a call must share."""
    for name in names:
        if len({request[name] for request in requests}) > 1:
            raise RefusedError(f"this program takes one {name} for all requests of a call")
    return [requests[0][name] for name in names]


def _transformers_model(package: Any, order: dict[str, Any]) -> Any:
    torch = importlib.import_module("torch")
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()
    torch.set_num_threads(order["threads"])
    model = package.AutoModelForCausalLM.from_pretrained(
        order["model"], dtype=getattr(torch, order["dtype"]), attn_implementation="sdpa"
    )
    return model.to(order["device"]).eval()


def _generation_config(package: Any, model: Any, requests: list[Request]) -> Any:
    """The one config of a call. An end of sequence that no token is keeps a request going."""
    names = ("max_tokens", "temperature", "top_p", "n", "ignore_eos")
    max_tokens, temperature, top_p, count, ignore_eos = _same(requests, *names)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {}
    return package.GenerationConfig(
        max_new_tokens=max_tokens,
        num_return_sequences=count,
        eos_token_id=-1 if ignore_eos else model.generation_config.eos_token_id,
        pad_token_id=0,
        **{"do_sample": False, **sampling},
    )


def _continuous_batching(package: Any, order: dict[str, Any]) -> Serve:
    """transformers' ``generate_batch``. The seconds are those of its own benchmark: from the first request's
    creation to the last one's end, without setting up the cache, which it does at every call."""
    model = _transformers_model(package, order)
    batching = package.ContinuousBatchingConfig(max_memory_percent=_CACHE_SHARE)

    def serve(requests: list[Request]) -> Served:
        config = _generation_config(package, model, requests)
        outputs = model.generate_batch(
            inputs=[request["prompt"] for request in requests],
            generation_config=config,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        ordered = sorted(outputs.values(), key=lambda output: _place(output.request_id))
        ids = [list(output.generated_tokens) for output in ordered]
        count = len(ids) // len(requests)
        seconds = max(output.lifespan[1] for output in ordered) - min(o.created_time for o in ordered)
        return [ids[at * count : (at + 1) * count] for at in range(len(requests))], seconds

    return serve


def _place(request_id: str) -> tuple[int, int]:
    """``req_7`` is the eighth input's first branch, ``req_7__child#0`` its second."""
    request, _, child = request_id.partition("__child#")
    return int(request.rpartition("_")[2]), int(child) + 1 if child else 0


def _generate(package: Any, order: dict[str, Any]) -> Serve:
    """transformers' ``generate``, one request after the other."""
    torch = importlib.import_module("torch")
    model = _transformers_model(package, order)

    def serve(requests: list[Request]) -> list[list[list[int]]]:
        found = []
        for request in requests:
            config = _generation_config(package, model, [request])
            torch.manual_seed(request["seed"])
            prompt = torch.tensor([request["prompt"]], device=model.device)
            with torch.inference_mode():
                out = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=config,
                )
            found.append(out[:, prompt.shape[1] :].tolist())
        return found

    return _timed(serve)


def _vllm(package: Any, order: dict[str, Any]) -> Serve:
    """vLLM. On a CPU it binds threads by variables of its own, read when the engine is made."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, range(order["threads"]))))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
    llm = package.LLM(
        model=order["model"],
        dtype=order["dtype"],
        max_model_len=order["max_model_len"],
        enforce_eager=True,
    )

    def serve(requests: list[Request]) -> list[list[list[int]]]:
        params = [
            package.SamplingParams(
                n=request["n"],
                temperature=request["temperature"],
                top_p=request["top_p"],
                max_tokens=request["max_tokens"],
                ignore_eos=request["ignore_eos"],
                seed=request["seed"],
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[list(branch.token_ids) for branch in output.outputs] for output in outputs]

    return _timed(serve)


def _llama_cpp(package: Any, order: dict[str, Any]) -> Serve:
    """llama-cpp-python, one request after the other; reads a .gguf file."""
    if not order["model"].endswith(".gguf"):
        raise RefusedError("it reads .gguf files; name one by --compare-model")
    llm = package.Llama(
        model_path=order["model"],
        n_ctx=order["max_model_len"],
        n_threads=order["threads"],
        n_threads_batch=order["threads"],
        verbose=False,
    )

    def serve(requests: list[Request]) -> list[list[list[int]]]:
        found = []
        for request in requests:
            branches = []
            for branch in range(request["n"]):
                llm.reset()
                llm.set_seed(request["seed"] + branch)
                branches.append(_llama_branch(llm, request))
            found.append(branches)
        return found

    return _timed(serve)


def _llama_branch(llm: Any, request: Request) -> list[int]:
    ids: list[int] = []
    for token in llm.generate(
        request["prompt"],
        temp=request["temperature"],
        top_p=request["top_p"],
        top_k=0,
        min_p=0.0,
        repeat_penalty=1.0,
    ):
        ids.append(int(token))
        is_end = token == llm.token_eos() and not request["ignore_eos"]
        if len(ids) == request["max_tokens"] or is_end:
            break
    return ids


def _openvino(package: Any, order: dict[str, Any]) -> Serve:
    """OpenVINO GenAI's continuous batching; reads a folder that optimum-intel exported."""
    openvino = importlib.import_module("openvino")
    numpy = importlib.import_module("numpy")
    scheduler = package.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    # Else it computes in bfloat16 where the processor can, and keeps keys and values in 8 bits.
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[order["dtype"]]
    precision = {"INFERENCE_PRECISION_HINT": dtype, "KV_CACHE_PRECISION": dtype}
    pipe = package.ContinuousBatchingPipeline(
        order["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": order["threads"], **precision}
    )

    def serve(requests: list[Request]) -> list[list[list[int]]]:
        configs = []
        for request in requests:
            config = package.GenerationConfig()
            config.max_new_tokens = request["max_tokens"]
            config.ignore_eos = request["ignore_eos"]
            config.num_return_sequences = request["n"]
            config.do_sample = request["temperature"] > 0
            if config.do_sample:
                config.temperature, config.top_p = request["temperature"], request["top_p"]
                config.rng_seed = request["seed"]
            configs.append(config)
        prompts = [openvino.Tensor(numpy.array([request["prompt"]], dtype="int64")) for request in requests]
        results = pipe.generate(prompts, configs)
        return [[list(ids) for ids in result.m_generation_ids] for result in results]

    return _timed(serve)


if __name__ == "__main__":
    main()
