"""A family of the zoo as an encoder, through ranks that are threads if they can be, against transformers one
text at a time. Knows no way by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.config import make_config
from shoal.messages import AllocateKV, Encode, StepResult, pack_ids
from shoal.model.build import load_config
from shoal.model.encoder import AloneEncoder, Texts
from shoal.model.pooling import end_token, served_class, tasks_of
from shoal.prove.prove import plan_and_prove
from shoal.worker.executor import Executor, ProcessExecutor
from shoal.worker.load import Load
from support.threads import ThreadExecutor
from support.zoo.build import build
from support.zoo.family import Family

__all__ = ["LENGTHS", "Encoded", "encode", "texts_of"]

LENGTHS = (12, 3, 9, 4, 12, 7, 11, 5)  # of the texts that are encoded at once
_FIRST_ID = 5  # those below are mostly special


@dataclass(frozen=True)
class Encoded:
    """How a family is served over some ranks, and how far off it is."""

    way: str
    error: float  # largest relative error of vectors, and of scores of words and classes where it gives them


def texts_of(vocabulary: int, seed: int = 5, end: int | None = None) -> list[list[int]]:
    """Random ids of :data:`LENGTHS`; ``end`` is each text's last, and like in a pair of texts, the first
    one's middle."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(_FIRST_ID, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    if end is not None:
        texts[0][LENGTHS[0] // 2] = end
        texts = [[*text[:-1], end] for text in texts]
    return texts


def encode(family: Family, folder: Path, ranks: int) -> Encoded:
    """Serve a family that is saved in ``folder`` over ``ranks`` ranks.

    Raises:
        UnsupportedError: it cannot be served.
    """
    load = _load(folder, ranks, family.is_custom)
    executor: Executor = ProcessExecutor(load) if family.seeds and ranks > 1 else ThreadExecutor(load)
    try:
        reports = executor.load(lambda done, total: None)
        executor.allocate(AllocateKV(num_blocks=0, block_size=1))
        way = reports[0].notes[-1].removeprefix("served the ").removesuffix(" way")
        config = load_config(folder, family.is_custom)
        texts = texts_of(getattr(config, "vocab_size", 101), end=end_token(config))
        model_class = served_class(config, folder, family.is_custom, "pooling")
        plain = AloneEncoder(build(family, "eager", torch.float32))
        together = Texts(torch.tensor([token for text in texts for token in text]), LENGTHS)
        tasks, error = tasks_of(model_class), 0.0
        if reports[0].makes_vectors:
            with torch.inference_mode():
                hidden = plain.hidden(together).split(LENGTHS)
            want = torch.stack([rows.mean(0) for rows in hidden])
            error = _error(_rows(_ask(executor, texts, "mean")), want)
        else:
            way = f"{way}, no vectors"
        if "fill_mask" in tasks:
            error = max(error, _word_error(executor, texts, plain, together))
        if "classify" in tasks:
            with torch.inference_mode():
                scores = plain.class_logits(together)
            error = max(error, _error(_rows(_ask(executor, texts, "classes")), scores))
    finally:
        executor.shutdown()
    return Encoded(way, error)


def _load(folder: Path, ranks: int, is_custom: bool) -> Load:
    config = make_config(
        model=str(folder),
        tensor_parallel_size=ranks,
        runner="pooling",
        num_threads=1,
        dtype="float32",
        trust_remote_code=is_custom,
    )
    hf_config = load_config(folder, is_custom)
    plan = plan_and_prove(served_class(hf_config, folder, is_custom, "pooling"), hf_config, ranks)
    return Load(
        config=config.model_dump(),
        model_path=str(folder),
        plan=plan.to_dict(),
        world_size=ranks,
        load_timeout_s=config.load_timeout,
        step_timeout_s=config.least_step_timeout_s,
    )


def _ask(
    executor: Executor, texts: Sequence[Sequence[int]], output: str, wanted: Sequence[int] = ()
) -> StepResult:
    executor.submit(
        Encode(
            step_id=1,
            token_ids=b"".join(map(pack_ids, texts)),
            lengths=pack_ids(map(len, texts)),
            output=output,
            wanted=pack_ids(wanted),
            top_k=4,
        )
    )
    return executor.collect()


def _rows(result: StepResult) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(result.rows, np.float32).reshape(-1, result.width).copy())


def _word_error(
    executor: Executor, texts: Sequence[Sequence[int]], plain: AloneEncoder, together: Texts
) -> float:
    """Of the log probabilities of the likeliest words at some tokens."""
    wanted = [1, 13, 30]
    with torch.inference_mode():
        logits = plain.word_logits(together, torch.tensor(wanted))
    want = logits.log_softmax(-1).topk(4).values
    return _error(_rows(_ask(executor, texts, "words", wanted)), want)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())
