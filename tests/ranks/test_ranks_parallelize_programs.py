"""Programs that parallelize a model, by stdin, killed, under torchrun; their ranks end with them."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from support.programs import are_gone, wait_until

pytestmark = pytest.mark.slow

CUSTOM = textwrap.dedent("""
    import sys
    import time
    import torch
    import transformers
    import shoal

    SCALE = 3.0

    class Scorer(transformers.LlamaPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.model = transformers.LlamaModel(config)
            self.score = torch.nn.Linear(config.hidden_size, 5)
            self.offsets = torch.arange(5.0)
            self.post_init()

        def forward(self, input_ids, attention_mask=None):
            hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
            return self.score(hidden * SCALE) + self.offsets

        def best(self, ids):
            return self(ids).argmax(-1)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model, ids = Scorer(config).eval(), torch.arange(24).reshape(2, 12)
    expected = model.best(ids)
    model = shoal.parallelize(model, tp=2)
    print("same" if torch.equal(model.best(ids), expected) else "different", flush=True)
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
""")


def children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made once for the module, and not looked up in the user's folder."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_class_of_the_program_itself_from_stdin_and_no_rank_outlives_it(end: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        [sys.executable, "-", "0" if end == "exit" else "600"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert program.stdin is not None and program.stdout is not None
    try:
        program.stdin.write(CUSTOM)
        program.stdin.close()
        ranks: list[psutil.Process] = []
        wait_until(lambda: bool(ranks.extend(children(program.pid)) or ranks), 120, "its rank has started")
        assert program.stdout.readline() == "same\n"
        if end == "kill":
            program.kill()
        assert program.wait(60) == (0 if end == "exit" else -signal.SIGKILL)
        wait_until(lambda: are_gone(ranks), 5, "its rank is gone")
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_under_torchrun_every_rank_samples_the_same_and_wrong_calls_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import os
            import pathlib
            import sys
            import torch
            import transformers
            import shoal
            from shoal.errors import UsageError

            rank, said = int(os.environ["RANK"]), []
            config = transformers.LlamaConfig(
                vocab_size=101,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
            try:
                torch.manual_seed(rank)
                shoal.parallelize(transformers.LlamaForCausalLM(config))
            except UsageError as error:
                said.append("other weights" in str(error))
            torch.manual_seed(0)
            model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(3, 12)[None]
            settings = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
            greedy = model.generate(ids, do_sample=False, num_beams=2, **settings)
            model = shoal.parallelize(model, tp=2)
            said.append(torch.equal(model.generate(ids, do_sample=False, num_beams=2, **settings), greedy))
            torch.manual_seed(rank)
            said.append(model.generate(ids, do_sample=True, **settings).tolist())
            try:
                model(ids + rank)
            except UsageError as error:
                said.append("other arguments" in str(error))
            pathlib.Path(sys.argv[1], str(rank)).write_text(repr(said))
        """)
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(program), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / str(rank)).read_text() for rank in (0, 1))
    assert first == second, "sampling included"
    weights, greedy, _, arguments = ast.literal_eval(first)
    assert (weights, greedy, arguments) == (True, True, True)
