"""Steps handed out ahead to ranks that are processes: the answers of steps one after the other, also when the
ranks are killed with two steps in flight, or requests are aborted there.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shoal import LLM, SamplingParams
from shoal.worker.executor import ProcessExecutor
from support import families

PROMPTS = families.prompts(12, 20, seed=3)
PARAMS = [
    SamplingParams(
        temperature=0.0 if index % 3 == 0 else 1.0,
        seed=index,
        max_tokens=4 + 3 * index,
        ignore_eos=True,
        stop_token_ids=list(range(index, 100, 12)),  # ends come unforeseen
        n=2 if index % 4 == 1 else 1,
        repetition_penalty=1.3 if index % 2 else 1.0,
        frequency_penalty=0.4 if index % 5 == 2 else 0.0,
        min_tokens=index % 4,
        logprobs=2 if index % 3 == 1 else None,
    )
    for index in range(len(PROMPTS))
]
Answer = list[tuple[list[int], str | None, int | str | None, int]]


def engine(folder: Path, **options: object) -> LLM:
    path = str(families.save("llama_9_3", folder))
    return LLM(path, num_threads=1, block_size=4, kv_cache_memory_bytes=1 << 22, **options)


def answers(llm: LLM) -> list[Answer]:
    return [
        [
            (out.token_ids, out.finish_reason, out.stop_reason, len(out.logprobs or []))
            for out in request.outputs
        ]
        for request in llm.generate(PROMPTS, PARAMS)
    ]


def test_a_kill_and_an_abort_with_two_steps_in_flight_change_no_answer(families_path: Path) -> None:
    with engine(families_path) as llm:
        expected = answers(llm)
    reasons = {reason for request in expected for _ids, reason, _stop, _count in request}
    assert reasons == {"stop", "length"}
    with engine(families_path, tensor_parallel_size=2, async_scheduling=True) as llm:
        assert answers(llm) == expected
        core, executor = llm._running(), llm._running().executor
        assert isinstance(executor, ProcessExecutor)
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            core.submit(f"aborted {index}", prompt, params)
        for _ in range(3):
            core.step()
        for index in range(len(PROMPTS)):
            core.abort(f"aborted {index}")
        assert core.has_work, "a step is still in flight"
        assert answers(llm) == expected
        assert core.stats().kv_cache_usage == 0

        submit, num_submitted = executor.submit, 0

        def submit_and_kill(step: object) -> None:
            nonlocal num_submitted
            submit(step)  # type: ignore[arg-type]
            num_submitted += 1
            if num_submitted == 7:
                os.kill(executor._ranks[1].process.pid, signal.SIGKILL)

        executor.submit = submit_and_kill  # type: ignore[method-assign]
        assert answers(llm) == expected
        assert core.stats().restarts_total == 1
