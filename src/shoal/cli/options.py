"""The flags of shoal's commands, each declared once. Knows no command.

Types and defaults of the engine's options are read off ``EngineConfig``; what is added here is the help.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.cli.config_file import read_config_file
from shoal.cli.flags import Flag
from shoal.config import EngineConfig
from shoal.logs import configure

__all__ = [
    "COMMON",
    "DEVICE",
    "ENGINE",
    "JSON",
    "MODEL_FILES",
    "QUEUE",
    "SAMPLING",
    "SERVER",
    "TENSOR_PARALLEL",
    "engine_options",
    "set_up_logs",
]


def _engine(name: str, help: str, **further: Any) -> Flag:
    """A flag with the type and default of ``EngineConfig``'s field of that name."""
    field = EngineConfig.model_fields[name]
    default = None if field.default is None else str(field.default)
    if isinstance(field.default, bool):
        further = {"negative": True, **further}
        default = "on" if field.default else "off"
    kind = further.pop("type", field.annotation)
    return Flag(name=name, type=kind, help=help, default=further.pop("default", default), **further)


_COMPUTE = "How it computes"
_AMOUNT = "How much at once"
_SERVER = "The server"

QUEUE: Mapping[str, int] = {"max_num_queued_requests": 2048, "max_num_queued_tokens": 1 << 20}
"""A server's queue, unless told otherwise: the most prompts that one request may bring find room in it.
(Offline, prompts wait in the caller's hands anyway.)"""

MODEL_FILES = (
    _engine("revision", "Branch, tag or commit of a model on the hub."),
    _engine("trust_remote_code", "Run Python code that comes with the model.", negative=False),
)

TENSOR_PARALLEL = (
    _engine("tensor_parallel_size", "Ranks the model is split over.", short=("-tp",), metavar="N"),
    _engine(
        "policy",
        "JSON or YAML file that says how to split which linears; it is proved like any plan.",
        type=str,
        default="measured",
        metavar="FILE",
    ),
)

DEVICE = (
    _engine("device", "auto, cpu, cuda, mps or xpu; an index may follow: cuda:1.", panel=_COMPUTE),
    _engine("attn_implementation", "Attention kernel.", default="the device's best", panel=_COMPUTE),
)

_ENGINE_ONLY = (
    _engine("runner", "generate text, pooling: vectors and scores; auto as the model is made for."),
    _engine("executor", "What carries the ranks.", panel=_COMPUTE),
    _engine("dtype", "What is computed in; auto takes what is fast on the device.", panel=_COMPUTE),
    _engine(
        "quantization",
        "Weights of fused layers in so many bits, on CPUs.",
        default="none",
        panel=_COMPUTE,
    ),
    _engine(
        "cpu_kernels",
        "Our CPU kernels in the place of torch's: auto where they prove equal, off.",
        panel=_COMPUTE,
    ),
    _engine("compile", "torch.compile of what no kernel of ours computes.", panel=_COMPUTE),
    _engine(
        "way",
        "How the model is served; auto: the fastest that proves. Decoders: paged, padded, state, recompute; "
        "encoders: packed, padded, alone. For debugging.",
        panel=_COMPUTE,
    ),
    _engine(
        "comm", "What ranks on CPUs sum over: shared memory, gloo; auto shares where it can.", panel=_COMPUTE
    ),
    _engine("num_threads", "CPU threads per rank.", default="cores / ranks", panel=_COMPUTE),
    _engine(
        "cpu_pinning",
        "Keep CPU ranks that are processes to cores of their own: auto where there are enough, off.",
        panel=_COMPUTE,
    ),
    _engine(
        "async_scheduling",
        "Hand the next step out while the last one is computed.",
        type=bool,
        negative=True,
        default="where a core is free for it",
        panel=_COMPUTE,
    ),
    _engine(
        "max_model_len", "Most tokens of a request, prompt and output.", default="the model's", panel=_AMOUNT
    ),
    _engine("max_num_seqs", "Most sequences that run at once.", panel=_AMOUNT),
    _engine("max_num_batched_tokens", "Most tokens in one step.", panel=_AMOUNT),
    _engine(
        "gpu_memory_utilization",
        "Share of the device's memory to use, 0 to 1.",
        short=("--memory-utilization",),
        default="by device",
        panel=_AMOUNT,
    ),
    _engine("kv_cache_memory_bytes", "Bytes of KV cache per rank, instead of a share.", panel=_AMOUNT),
    _engine("num_gpu_blocks_override", "KV blocks, instead of as many as fit.", panel=_AMOUNT),
    _engine("block_size", "Tokens in a KV block.", panel=_AMOUNT),
    _engine("enable_prefix_caching", "Share the KV blocks of equal beginnings.", panel=_AMOUNT),
    _engine("seed", "Seed of requests that have none."),
)

ENGINE = (*TENSOR_PARALLEL, *DEVICE, *_ENGINE_ONLY, *MODEL_FILES)

SERVER = (
    Flag(name="host", type=str, help="Address to listen on.", default="127.0.0.1", panel=_SERVER),
    Flag(name="port", type=int, help="Port to listen on; 0 takes a free one.", default="8000", panel=_SERVER),
    Flag(
        name="served_model_name",
        type=list[str],
        help="Name clients call the model by; may be repeated.",
        default="MODEL",
        panel=_SERVER,
    ),
    Flag(
        name="api_key",
        type=str,
        help="Key that clients must send; better given as SHOAL_API_KEY, which 'ps' does not show.",
        panel=_SERVER,
    ),
    _engine(
        "max_num_queued_requests",
        "Waiting requests beyond which 429 is answered.",
        default=str(QUEUE["max_num_queued_requests"]),
        panel=_SERVER,
    ),
    _engine(
        "max_num_queued_tokens",
        "Their prompt tokens beyond which 429 is answered.",
        default=str(QUEUE["max_num_queued_tokens"]),
        panel=_SERVER,
    ),
    Flag(
        name="request_timeout",
        type=float,
        help="Seconds a request may take.",
        default="no limit",
        panel=_SERVER,
    ),
    Flag(
        name="max_connections",
        type=int,
        help="Connections beyond which requests are answered 503.",
        default="1024",
        panel=_SERVER,
    ),
    Flag(
        name="max_body_bytes",
        type=int,
        help="Bytes of a request beyond which 413 is answered.",
        default="16777216",
        panel=_SERVER,
    ),
    Flag(
        name="shutdown_timeout",
        type=float,
        help="Seconds running requests have to finish after SIGTERM.",
        default="30",
        panel=_SERVER,
    ),
    _engine(
        "step_timeout",
        "Seconds a step may take before a rank counts as hung.",
        type=float,
        default="30, or five times the largest step's if that is more",
        panel=_SERVER,
    ),
    _engine(
        "max_restarts", "Failures of ranks that are borne within --restart-window seconds.", panel=_SERVER
    ),
    _engine("restart_window", "Seconds that --max-restarts is about.", panel=_SERVER),
    _engine(
        "standby_ranks",
        "Keep a process ready for each rank that may fail: 270 MiB each for a sooner restart.",
        negative=True,
        panel=_SERVER,
    ),
    Flag(
        name="keep_alive_on_failure",
        type=bool,
        help="Stay, with /health at 503, when the ranks have failed too often.",
        default="off",
        negative=True,
        panel=_SERVER,
    ),
)


def _sampling(name: str, type: Any, help: str, default: str | None = None, **further: Any) -> Flag:
    return Flag(name=name, type=type, help=help, default=default, panel="Sampling", **further)


SAMPLING = (
    _sampling("n", int, "Answers per prompt.", "1"),
    _sampling("max_tokens", int, "Most tokens of an answer.", "128"),
    _sampling("min_tokens", int, "Fewest tokens of an answer.", "0"),
    _sampling("temperature", float, "0 is greedy.", "the model's"),
    _sampling("top_p", float, "Sample among the fewest tokens of this total probability.", "the model's"),
    _sampling("top_k", int, "Sample among so many of the most likely tokens; 0 is all.", "the model's"),
    _sampling("min_p", float, "Least probability, as a share of the most likely token's.", "the model's"),
    _sampling("repetition_penalty", float, "Above 1: against tokens that occurred.", "the model's"),
    _sampling("no_repeat_ngram_size", int, "No run of so many tokens twice; 0: off.", "the model's"),
    _sampling("presence_penalty", float, "Against tokens of the answer so far.", "0"),
    _sampling("frequency_penalty", float, "The same, per occurrence.", "0"),
    _sampling("stop", list[str], "Text that ends an answer; may be repeated."),
    _sampling("stop_token_ids", list[int], "Token that ends an answer; may be repeated."),
    _sampling("include_stop_str_in_output", bool, "Keep the text that ended it.", "off", negative=True),
    _sampling("ignore_eos", bool, "Go on after an end-of-sequence token.", "off", negative=True),
    _sampling(
        "forced_bos_token_id", int, "Of encoder-decoders: the first token, often a language.", "the model's"
    ),
    _sampling("num_beams", int, "Above 1: beam search, for so many beams; n of them are answers.", "1"),
    _sampling("length_penalty", float, "Of beams: above 0 favours long answers.", "the model's"),
    _sampling(
        "early_stopping",
        Literal["on", "off", "never"],
        "Of beams: on ends with enough answers.",
        "the model's",
    ),
    _sampling("skip_special_tokens", bool, "Leave special tokens out of the text.", "on", negative=True),
)

JSON = (Flag(name="json", type=bool, help="Print one JSON document on stdout."),)

COMMON = (
    Flag(
        name="config",
        type=Path,
        help="YAML file of options, by their long names; environment and command line win over it.",
        metavar="FILE.yaml",
        callback=read_config_file,
        eager=True,
    ),
    Flag(
        name="log_level",
        type=Literal["debug", "info", "warning", "error"],
        help="Least important log line shown.",
        default="info",
    ),
    Flag(
        name="log_format", type=Literal["text", "json"], help="Form of log lines, on stderr.", default="text"
    ),
)

_ENGINE_NAMES = frozenset(flag.name for flag in (*ENGINE, *SERVER)) & EngineConfig.model_fields.keys()


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that are ``EngineConfig``'s."""
    return {name: value for name, value in options.items() if name in _ENGINE_NAMES}


def set_up_logs(options: Mapping[str, Any], default_level: str = "info") -> None:
    """Send log lines to stderr as ``options`` ask."""
    configure(options.get("log_level", default_level), options.get("log_format", "text"))
