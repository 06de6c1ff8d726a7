"""Another program as a contender: a process of the interpreter it is installed in, which runs
``drive.py`` and is told over a pipe what to serve. Knows none of the programs.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.bench.contender import Ran
from shoal.errors import EngineError, UsageError
from shoal.sampling_params import SamplingParams

__all__ = ["PEERS", "PeerContender", "PeerOrder"]

PEERS = ("transformers", "generate", "vllm", "llama.cpp", "openvino")
_DRIVER = Path(__file__).parent / "drive.py"
_STOP_S = 30.0
_ANSWER_S = 7200.0  # a whole workload, on a slow machine


@dataclass(frozen=True, slots=True)
class PeerOrder:
    """Which program, where, and on what."""

    program: str  # one of PEERS
    python: str  # the interpreter it is installed in
    model: str  # a folder, or what else the program reads
    threads: int  # in all
    dtype: str = "float32"
    max_model_len: int = 2048
    device: str = "cpu"  # as torch calls it

    def check(self) -> None:
        """Refuse a program that is not known.

        Raises:
            UsageError: no such program.
        """
        if self.program not in PEERS:
            raise UsageError(f"compare: {self.program!r} is none of {', '.join(PEERS)}", field="compare")


class PeerContender:
    """A program that is loaded and waits for prompts."""

    def __init__(self, order: PeerOrder) -> None:
        """Start it and have it load the model.

        Raises:
            UsageError: the interpreter or the program is not there, or cannot serve the model.
        """
        order.check()
        self.name = order.program
        environment = {**os.environ, "OMP_NUM_THREADS": str(order.threads)}
        try:
            self._process = subprocess.Popen(
                [order.python, str(_DRIVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # what is waited for by select may not hide in a buffer
                env=environment,
            )
        except OSError as error:
            raise UsageError(
                f"compare_python: {order.python} does not start: {error}", field="compare_python"
            ) from error
        try:
            told = asdict(order)
            del told["python"]
            self.name = f"{order.program} {self._ask(told)['version']}"
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Ran:
        """Serve all prompts together.

        Raises:
            UsageError: it cannot do what is asked.
            EngineError: it failed.
        """
        asked = [
            {
                "prompt": prompt,
                "max_tokens": one.max_tokens,
                "temperature": one.temperature or 0.0,
                "top_p": one.top_p or 1.0,
                "n": one.n,
                "seed": one.seed or 0,
                "ignore_eos": one.ignore_eos,
            }
            for prompt, one in zip(prompts, params, strict=True)
        ]
        answer = self._ask({"requests": asked})
        return Ran(answer["seconds"], answer["ids"])

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            if not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # what it did not take in is of no interest any more
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._send(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            line = b""
        else:
            line = self._line()
        if not line:
            raise EngineError(
                f"{self.name} ended with status {self._process.wait()}; its own words are on stderr"
            )
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise UsageError(f"compare: {self.name}: {answer['refused']}", field="compare")
        if "failed" in answer:
            raise EngineError(f"{self.name}: {answer['failed']}")
        return answer

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        while data:
            data = data[self._process.stdin.write(data) :]

    def _line(self) -> bytes:
        """The next line; empty at the end of the stream."""
        assert self._process.stdout is not None
        pieces = b""
        while not pieces.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
                raise EngineError(f"{self.name} did not answer within {_ANSWER_S:g} s")
            piece = self._process.stdout.read(1 << 20)
            if not piece:
                return b""
            pieces += piece
        return pieces
