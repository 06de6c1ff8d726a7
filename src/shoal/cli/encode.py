"""``shoal generate --task embed|classify|fill-mask|score``: texts in; vectors, classes, words or scores out,
as JSONL or for people. Knows ``shoal.LLM`` by what it asks of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from shoal.cli.output import print_json, print_lines, to_jsonl, write_whole
from shoal.cli.prompts import read_json_lines
from shoal.errors import RequestError, UsageError

__all__ = ["TASKS", "EncodeOptions", "Task", "encode", "gather_inputs"]

Task = Literal["embed", "classify", "fill-mask", "score"]
TASKS: tuple[Task, ...] = ("embed", "classify", "fill-mask", "score")
_FIELDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    task: (("text_1", "text_2"),) if task == "score" else (("prompt",), ("prompt_token_ids",))
    for task in TASKS
}


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How it is done, and what is printed."""

    task: Task
    pooling: str | None = None
    truncate_prompt_tokens: int | None = None
    top_k: int | None = None  # words for a mask
    output: Path | None = None
    as_json: bool = False
    is_text: bool = False  # for people


def gather_inputs(
    task: Task, texts: Sequence[str], file: Path | None, stdin: TextIO | None
) -> list[dict[str, Any]]:
    """What is to be encoded, an object each, as a line of the file has it.

    Args:
        texts: given with ``-p``; to score, the first goes with each of the others.
        file: JSONL; a line has ``prompt`` or ``prompt_token_ids``, to score ``text_1`` and ``text_2``.
        stdin: a text a line if there is neither; None if it is a terminal.

    Raises:
        UsageError: there is none, or a wrong one.
    """
    if not texts and file is None and stdin is not None and task != "score":
        texts = [line for line in stdin.read().split("\n") if line]
    if task == "score":
        if len(texts) == 1:
            raise UsageError("--task score: takes two texts: -p TEXT -p TEXT, the first goes with each other")
        inputs: list[dict[str, Any]] = [{"text_1": texts[0], "text_2": other} for other in texts[1:]]
    else:
        inputs = [{"prompt": text} for text in texts]
    if file is not None:
        inputs += read_json_lines(file, lambda entry: _checked(task, entry))
    if not inputs:
        raise UsageError("no text: give -p TEXT, --input FILE.jsonl, or lines on stdin")
    return inputs


def encode(engine: Any, inputs: Sequence[Mapping[str, Any]], options: EncodeOptions) -> None:
    """Do the task, and print or write what it gives: a row for each input."""
    outputs = _RUN[options.task](engine, inputs, options)
    if not outputs:
        return  # on a rank that serves another process
    rows = [
        {
            "index": index,
            **given,
            **_result(options.task, output),
            "prompt_tokens": len(output.prompt_token_ids),
        }
        for index, (given, output) in enumerate(zip(inputs, outputs, strict=True))
    ]
    if options.output is not None:
        write_whole(options.output, to_jsonl(rows))
    elif options.as_json:
        print_json(rows)
    else:
        print_lines(_for_people(rows) if options.is_text else to_jsonl(rows))


def _checked(task: Task, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise RequestError("must be a JSON object")
    kinds = _FIELDS[task]
    if tuple(sorted(entry)) not in kinds:
        raise RequestError(f"must have {' or '.join(' and '.join(kind) for kind in kinds)}, and nothing else")
    return entry


def _prompts(inputs: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [one.get("prompt", one.get("prompt_token_ids")) for one in inputs]


def _embed(engine: Any, inputs: Sequence[Mapping[str, Any]], options: EncodeOptions) -> Any:
    truncate = options.truncate_prompt_tokens
    return engine.embed(_prompts(inputs), pooling=options.pooling, truncate_prompt_tokens=truncate)


def _classify(engine: Any, inputs: Sequence[Mapping[str, Any]], options: EncodeOptions) -> Any:
    return engine.classify(_prompts(inputs), truncate_prompt_tokens=options.truncate_prompt_tokens)


def _fill_mask(engine: Any, inputs: Sequence[Mapping[str, Any]], options: EncodeOptions) -> Any:
    top_k = {} if options.top_k is None else {"top_k": options.top_k}
    truncate = options.truncate_prompt_tokens
    return engine.fill_mask(_prompts(inputs), truncate_prompt_tokens=truncate, **top_k)


def _score(engine: Any, inputs: Sequence[Mapping[str, Any]], options: EncodeOptions) -> Any:
    first, second = ([one[name] for one in inputs] for name in ("text_1", "text_2"))
    return engine.score(first, second, truncate_prompt_tokens=options.truncate_prompt_tokens)


_RUN: Mapping[Task, Callable[[Any, Sequence[Mapping[str, Any]], EncodeOptions], Any]] = {
    "embed": _embed,
    "classify": _classify,
    "fill-mask": _fill_mask,
    "score": _score,
}


def _result(task: Task, output: Any) -> dict[str, Any]:
    if task == "fill-mask":
        return {"masks": [[asdict(word) for word in words] for words in output.outputs]}
    return asdict(output.outputs)


def _for_people(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if "embedding" in row:
            lines.append(json.dumps(row["embedding"]))
        elif "masks" in row:
            best = [" ".join(f"{w['token_str'].strip()} {w['score']:.3f}" for w in m) for m in row["masks"]]
            lines.append(" | ".join(best))
        elif "score" in row:
            lines.append(f"{row['score']:.4f}")
        elif "labels" in row:
            lines.append(" ".join(row["labels"]))
        else:
            lines.append(f"{row['label']} {max(row['probs']):.4f}")
    return lines
