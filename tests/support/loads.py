"""What an executor needs to load a tiny model, and steps to try it with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.config import make_config
from shoal.messages import SamplingSpec, SequenceStep, Step, StepResult, pack_ids
from shoal.model.build import causal_class, load_config
from shoal.prove.prove import plan_and_prove
from shoal.worker.executor import Executor
from shoal.worker.load import Load

GREEDY = SamplingSpec(temperature=0.0)


def make_load(folder: Path, ranks: int, plans: Path | None = None, **options: Any) -> Load:
    """A proved plan for ``folder`` over ``ranks`` ranks; KV pages take what the test allocates.

    Plans are kept in ``plans``, or beside the folder.
    """
    options = {"kv_cache_memory_bytes": 1 << 20, "num_threads": 1, **options}
    config = make_config(model=str(folder), tensor_parallel_size=ranks, **options)
    hf_config = load_config(folder)
    plan = plan_and_prove(causal_class(hf_config), hf_config, ranks, plans or folder.parent / "plans")
    return Load(
        config=config.model_dump(),
        model_path=str(folder),
        plan=plan.to_dict(),
        world_size=ranks,
        load_timeout_s=config.load_timeout,
        step_timeout_s=config.least_step_timeout_s,
    )


def make_step(step_id: int, *sequences: tuple[int, Sequence[int]], block_size: int = 4) -> Step:
    """A step of (start, token ids) sequences, each in blocks of its own, every one sampled greedily."""
    return Step(
        step_id=step_id,
        sequences=tuple(
            SequenceStep(
                sequence_id=index,
                start=start,
                token_ids=pack_ids(ids),
                block_ids=pack_ids(range(8 * index, 8 * index + -(-(start + len(ids)) // block_size))),
                sampling=GREEDY,
            )
            for index, (start, ids) in enumerate(sequences)
        ),
    )


def execute(executor: Executor, step: Step) -> StepResult:
    """One step, waited for."""
    executor.submit(step)
    return executor.collect()
