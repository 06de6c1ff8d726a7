"""``shoal generate``: complete prompts offline in one batch, or do another task with them. Knows
``shoal.LLM`` by what it asks of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import typer

from shoal.cli.encode import EncodeOptions, encode, gather_inputs
from shoal.cli.flags import taking
from shoal.cli.options import COMMON, ENGINE, JSON, SAMPLING, engine_options, set_up_logs
from shoal.cli.output import check_writable, print_json, print_lines, to_jsonl, write_whole
from shoal.cli.prompts import PromptLine, gather_prompts
from shoal.config import EngineConfig, make_config
from shoal.engine.outputs import RequestOutput
from shoal.errors import EngineError, RequestError, UsageError
from shoal.sampling_params import SamplingParams

__all__ = ["OfflineEngine", "app", "generate", "run_all"]

app = typer.Typer(add_completion=False)

_EARLY_STOPPING = {"on": True, "off": False, "never": "never"}
_DEFAULT_MAX_TOKENS = 128


class OfflineEngine(Protocol):
    """What is asked of ``shoal.LLM``."""

    def generate(
        self,
        prompts: Sequence[Any],
        sampling_params: Sequence[SamplingParams],
        on_finish: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Sequence[SamplingParams],
        on_finish: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]: ...


@app.command()
@taking(SAMPLING, ENGINE, JSON, COMMON)
def generate(
    model: Annotated[
        str, typer.Argument(help="Hub id, folder, .gguf file or demo.", envvar="SHOAL_MODEL", metavar="MODEL")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to complete; may be repeated.")
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file, a line each: prompt, prompt_token_ids or messages, and sampling fields.",
            envvar="SHOAL_INPUT",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write JSONL here instead of to stdout.", envvar="SHOAL_OUTPUT")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put text through the chat template.", envvar="SHOAL_CHAT")
    ] = False,
    format: Annotated[
        Literal["text", "jsonl"] | None, typer.Option(help="What to print.", envvar="SHOAL_FORMAT")
    ] = None,
    task: Annotated[
        Literal["generate", "embed", "classify", "fill-mask", "score"],
        typer.Option(help="What to do with the texts.", envvar="SHOAL_TASK"),
    ] = "generate",
    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        typer.Option(help="Of which tokens a vector is made.", envvar="SHOAL_POOLING"),
    ] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Cut longer texts of other tasks than generate; -1: to what the model takes.",
            envvar="SHOAL_TRUNCATE_PROMPT_TOKENS",
        ),
    ] = None,
    *,
    options: Mapping[str, Any],
) -> None:
    """Complete prompts offline: given with -p, in a JSONL file, or on stdin."""
    set_up_logs(options, default_level="warning")
    as_json = bool(options.get("json"))
    _check_output(output, format, as_json)
    if task != "generate":
        inputs = gather_inputs(task, prompt or [], input, _piped_stdin())
        config = make_config(model=model, **{"runner": "pooling", **engine_options(options)})
        top_k = options.get("top_k")
        how = EncodeOptions(task, pooling, truncate_prompt_tokens, top_k, output, as_json, format == "text")
        with _open(config) as engine:
            encode(engine, inputs, how)
        return
    lines = gather_prompts(prompt or [], input, _piped_stdin(), _sampling(options), chat)
    config = make_config(model=model, **engine_options(options))
    with _open(config) as engine:
        outputs = run_all(engine, lines)
    if not outputs:
        return
    rows = _rows(lines, outputs)
    if output is not None:
        write_whole(output, to_jsonl(rows))
    elif as_json:
        print_json(rows)
    else:
        print_lines(to_jsonl(rows) if format == "jsonl" else _as_text(lines, outputs))
    _raise_failures(outputs)


def run_all(engine: OfflineEngine, lines: Sequence[PromptLine]) -> list[RequestOutput]:
    """Serve all prompts, with a progress bar if stderr is a terminal.

    Returns:
        one output a prompt, in their order; none on a rank that serves another process (torchrun's).
    """
    outputs: dict[int, RequestOutput] = {}
    chats = [index for index, line in enumerate(lines) if line.is_chat]
    plain = [index for index, line in enumerate(lines) if not line.is_chat]
    with _progress(len(lines)) as show:
        for indices, is_chat in ((plain, False), (chats, True)):
            if not indices:
                continue
            params = [lines[index].params for index in indices]
            already = len(outputs)

            def on_finish(done: int, already: int = already) -> None:
                show(already + done)

            with _naming([lines[index] for index in indices]):
                if is_chat:
                    done = engine.chat([lines[index].messages for index in indices], params, on_finish)
                else:
                    done = engine.generate([_prompt(lines[index]) for index in indices], params, on_finish)
            if not done:
                return []
            outputs.update(zip(indices, done, strict=True))
    return [outputs[index] for index in range(len(lines))]


@contextmanager
def _naming(lines: Sequence[PromptLine]) -> Iterator[None]:
    """A refusal by the engine says where the prompt stands."""
    try:
        yield
    except RequestError as error:
        line = lines[error.index or 0]
        raise RequestError(f"{line.place}{error.__cause__ or error}", error.field) from None


def _open(config: EngineConfig) -> AbstractContextManager[OfflineEngine]:
    from shoal.engine.llm import LLM

    return LLM(config=config)


def _prompt(line: PromptLine) -> Any:
    return {"prompt": line.given} if isinstance(line.given, str) else {"prompt_token_ids": line.given}


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    fields = {flag.name: options[flag.name] for flag in SAMPLING if options.get(flag.name) not in (None, [])}
    if "early_stopping" in fields:
        fields["early_stopping"] = _EARLY_STOPPING[fields["early_stopping"]]
    return {"max_tokens": _DEFAULT_MAX_TOKENS, **fields}


def _piped_stdin() -> Any:
    return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin


def _check_output(output: Path | None, format: str | None, as_json: bool) -> None:
    if output is not None:
        check_writable(output)
        if format == "text" or as_json:
            raise UsageError("--output writes JSONL: leave out --format text and --json")
    if as_json and format is not None:
        raise UsageError("--json and --format exclude each other")


def _rows(lines: Sequence[PromptLine], outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    """One row a branch."""
    rows = []
    for index, (line, output) in enumerate(zip(lines, outputs, strict=True)):
        for branch in output.outputs:
            row = {
                "index": index,
                "prompt": line.given,
                "text": branch.text,
                "token_ids": branch.token_ids,
                "finish_reason": branch.finish_reason,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(branch.token_ids),
            }
            rows.append(row if line.params.n == 1 else {**row, "branch": branch.index})
    return rows


def _as_text(lines: Sequence[PromptLine], outputs: Sequence[RequestOutput]) -> Iterator[str]:
    alone = sum(len(output.outputs) for output in outputs) == 1
    for number, (line, output) in enumerate(zip(lines, outputs, strict=True), start=1):
        for branch in output.outputs:
            if not alone:
                place = f"{number}.{branch.index + 1}" if len(output.outputs) > 1 else str(number)
                yield f"=== {place}: {_shortened(line.given)}"
            yield branch.text


def _shortened(given: Any) -> str:
    shown = repr(given[-1]["content"] if given and isinstance(given[-1], dict) else given)
    return shown if len(shown) <= 70 else f"{shown[:67]}..."


def _raise_failures(outputs: Iterable[RequestOutput]) -> None:
    reasons = [branch.finish_reason for output in outputs for branch in output.outputs]
    failed = sum(reason in ("error", "abort") for reason in reasons)
    if failed:
        raise EngineError(f"{failed} of {len(reasons)} answers failed; their finish_reason says so")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda done: bar.update(task, completed=done)
