"""Workloads run by several contenders in turn, warm, on the same prompts; the figure is the ratio, beside a
verdict whether they computed the same thing. Prints nothing.

The first setting is the reference: ratios are over it, and its ids are what the others are held against.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.bench.contender import Contender, EngineContender, OpenEngine, Ran, Setting, open_engine
from shoal.bench.cost import Ceiling, Share
from shoal.bench.prompts import PromptTokenizer, is_right, make_prompts
from shoal.bench.rows import Entry, Row
from shoal.bench.verdict import Round, agreement, likelihood
from shoal.bench.workloads import Scale, Workload, fitted
from shoal.config import EngineConfig
from shoal.errors import UsageError

__all__ = ["OpenPeer", "Order", "Subject", "measure"]

_log = logging.getLogger("shoal.bench")

_WARM_TOKENS = 16
_FIRST_TOKEN_ROUND = 1000  # rounds of prompts only for times to first token

OpenPeer = Callable[[], Contender]


@dataclass(frozen=True, slots=True)
class Subject:
    """The model, as far as prompts need it."""

    tokenizer: PromptTokenizer
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure."""

    workloads: Sequence[Workload]
    settings: Sequence[Setting]  # of our engine; at least one
    options: Mapping[str, Any]  # fields of EngineConfig, the same for all; a row's own flags win
    scale: Scale = field(default_factory=lambda: Scale.parse("ci"))
    repeats: int = 3
    peers: Mapping[str, OpenPeer] = field(default_factory=dict)
    ceiling: Ceiling | None = None  # what the machine could do; None: shares of it are not told

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            UsageError: nothing to measure, or a number out of range.
        """
        if not self.workloads:
            raise UsageError("workload: name at least one", field="workload")
        if not self.settings:
            raise UsageError("tensor_parallel_size: at least one", field="tensor_parallel_size")
        if len({setting.name for setting in self.settings}) < len(self.settings):
            raise UsageError("tensor_parallel_size: one of them stands twice", field="tensor_parallel_size")
        if self.repeats < 1:
            raise UsageError(f"repeats: at least 1, got {self.repeats}", field="repeats")


def measure(order: Order, subject: Subject, open_engine: OpenEngine = open_engine) -> Iterator[Row]:
    """One row a workload, each as soon as it is measured.

    Args:
        order: what to measure.
        subject: the model's tokenizer and length.
        open_engine: makes an engine of a config.

    Raises:
        UsageError: the order cannot be carried out.
        EngineError: an engine failed.
    """
    order.check()
    with _Stage(order, open_engine) as stage:
        for workload in order.workloads:
            sized = order.scale.apply(workload)
            prompts = make_prompts(sized, subject.tokenizer, 1)
            sized, note = fitted(sized, max(map(len, prompts)), subject.max_model_len)
            options, notes = _row_options(order, sized, max(map(len, prompts)))
            if note is not None:
                notes.append(note)
            _log.info("%s: %d prompts, %d tokens each", sized.name, sized.count, sized.max_tokens)
            engines = stage.engines(options)
            notes += dict.fromkeys(f"{e.name} {said}" for e in engines for said in e.compiling)
            yield _measure_one(order, sized, subject, engines, [*engines, *stage.peers()], notes, options)


def _row_options(order: Order, workload: Workload, longest: int) -> tuple[dict[str, Any], list[str]]:
    """The engine options of a row that all settings share, and what must be said of them."""
    options = dict(order.options)
    block_size = int(options.get("block_size", EngineConfig.model_fields["block_size"].default))
    own = workload.options(block_size, longest)
    options.update(own)
    overridden = [name for setting in order.settings for name in setting.options if name in own]
    return options, [f"{n} is as asked, not the row's {own[n]}" for n in dict.fromkeys(overridden)]


class _Stage:
    """The engines and peers that are loaded. Rows with equal options share engines."""

    def __init__(self, order: Order, open_engine: OpenEngine) -> None:
        self._order = order
        self._open_engine = open_engine
        self._engines: list[EngineContender] = []
        self._options: Mapping[str, Any] | None = None
        self._peers: list[Contender] | None = None

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_engines()
        for peer in self._peers or ():
            peer.close()

    def engines(self, options: Mapping[str, Any]) -> list[EngineContender]:
        if self._options != options:
            self._close_engines()
            for setting in self._order.settings:
                own = {**options, **setting.options}
                self._engines.append(EngineContender(setting.name, own, self._open_engine))
            self._options = dict(options)
        return self._engines

    def peers(self) -> list[Contender]:
        if self._peers is None:
            self._peers = []
            for opened in self._order.peers.values():
                self._peers.append(opened())
        return self._peers

    def _close_engines(self) -> None:
        for engine in self._engines:
            engine.close()
        self._engines, self._options = [], None


@dataclass(slots=True)
class _Score:
    """What one contender did in a row."""

    runs: list[Ran] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


def _measure_one(
    order: Order,
    workload: Workload,
    subject: Subject,
    engines: Sequence[EngineContender],
    contenders: Sequence[Contender],
    notes: list[str],
    options: Mapping[str, Any],
) -> Row:
    params = [workload.params(index) for index in range(workload.count)]
    warm = make_prompts(workload, subject.tokenizer, 0)[:2]
    for contender in contenders:
        contender.run(warm, [_shortened(p, _WARM_TOKENS) for p in params[: len(warm)]])
    scores = {contender.name: _Score() for contender in contenders}
    rounds: list[Round] = []
    for number in range(1, order.repeats + 1):
        prompts = make_prompts(workload, subject.tokenizer, number)
        # Every other round backwards: whoever comes second meets what the first left of the machine.
        for contender in contenders if number % 2 else reversed(contenders):
            scores[contender.name].runs.append(contender.run(prompts, params))
        if workload.times_first_token:
            _time_first_token(workload, subject, contenders, params, scores, number)
        rounds.append(Round(prompts, params, scores[engines[0].name].runs[-1]))
    entries = _entries(order.ceiling, workload, subject, engines, contenders, scores, rounds)
    return Row(workload, dict(options), tuple(entries), tuple(notes))


def _shortened(params: Any, most: int) -> Any:
    return replace(params, max_tokens=min(most, params.max_tokens or most))


def _time_first_token(
    workload: Workload,
    subject: Subject,
    contenders: Sequence[Contender],
    params: Sequence[Any],
    scores: Mapping[str, _Score],
    number: int,
) -> None:
    """The time of one token each, on prompts that no cache has seen."""
    prompts = make_prompts(workload, subject.tokenizer, _FIRST_TOKEN_ROUND + number)
    for contender in contenders if number % 2 else reversed(contenders):
        ran = contender.run(prompts, [_shortened(p, 1) for p in params])
        scores[contender.name].first_token_s.append(ran.seconds)


def _entries(
    ceiling: Ceiling | None,
    workload: Workload,
    subject: Subject,
    engines: Sequence[EngineContender],
    contenders: Sequence[Contender],
    scores: Mapping[str, _Score],
    rounds: Sequence[Round],
) -> Iterator[Entry]:
    reference = engines[0]
    base = scores[reference.name].runs
    for contender in contenders:
        score = scores[contender.name]
        speeds = [run.num_tokens / run.seconds for run in score.runs]
        paired = [speed / (b.num_tokens / b.seconds) for speed, b in zip(speeds, base, strict=True)]
        is_other, is_ours = contender is not reference, contender in engines
        # Other programs draw by noise of their own: their ids say nothing where there is any.
        is_held = is_other and (is_ours or not workload.params(0).temperature)
        yield Entry(
            name=contender.name,
            is_ours=is_ours,
            seconds=tuple(run.seconds for run in score.runs),
            output_tokens=tuple(run.num_tokens for run in score.runs),
            tokens_per_s=statistics.median(speeds),
            ratio=statistics.median(paired),
            first_token_s=statistics.median(score.first_token_s) if score.first_token_s else None,
            accuracy=_accuracy(workload, subject, score.runs) if workload.kind == "gsm8k" else None,
            agreement=agreement(reference, contender, rounds, score.runs) if is_held else None,
            likelihood=(
                likelihood(reference, contender, rounds[0])
                if is_other and isinstance(contender, EngineContender)
                else None
            ),
            share=_share(ceiling, workload, contender, rounds[0], score),
        )


def _share(
    ceiling: Ceiling | None, workload: Workload, contender: Contender, asked: Round, score: _Score
) -> Share | None:
    """Of the machine's limits. Every round's lengths are those of the first."""
    if ceiling is None or not workload.is_bare or not isinstance(contender, EngineContender):
        return None
    if contender.threads is None:
        return None
    return ceiling.share(
        contender.threads,
        contender.traffic,
        [(len(prompt), workload.max_tokens) for prompt in asked.prompts],
        statistics.median(run.seconds for run in score.runs),
        statistics.median(score.first_token_s) if score.first_token_s else None,
    )


def _accuracy(workload: Workload, subject: Subject, runs: Sequence[Ran]) -> float:
    """The share of right answers over all rounds."""
    right = [
        is_right(workload, index, subject.tokenizer.decode(branches[0], True))
        for run in runs
        for index, branches in enumerate(run.ids)
    ]
    return sum(right) / len(right)
