"""The README's five lines run however a program is started; engines live side by side and die cleanly."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import shoal
from support import families
from support.programs import are_gone, shared_memory, wait_until


@pytest.fixture
def script(families_path: Path) -> str:
    folder = families.save("llama_9_3", families_path)
    return textwrap.dedent(f"""
        import shoal

        with shoal.LLM({str(folder)!r}, tensor_parallel_size=2, kv_cache_memory_bytes=1 << 22) as llm:
            params = shoal.SamplingParams(max_tokens=8, seed=3)
            for out in llm.generate([{{"prompt_token_ids": [5, 6, 7]}}], params):
                print("ids", out.outputs[0].token_ids)
    """)


@pytest.fixture
def expected(families_path: Path) -> str:
    """What one rank in this process gives."""
    folder = families.save("llama_9_3", families_path)
    with shoal.LLM(str(folder), kv_cache_memory_bytes=1 << 22) as llm:
        out = llm.generate([[5, 6, 7]], shoal.SamplingParams(max_tokens=8, seed=3))[0]
    return f"ids {out.outputs[0].token_ids}"


def run(command: list[str], stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_as_an_unguarded_file(script: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(script)
    assert run([sys.executable, str(tmp_path / "program.py")]).splitlines() == [expected]


def test_by_dash_c(script: str, expected: str) -> None:
    assert run([sys.executable, "-c", script]).splitlines() == [expected]


def test_from_stdin(script: str, expected: str) -> None:
    assert run([sys.executable, "-"], stdin=script).splitlines() == [expected]


def test_under_torchrun_rank_0_drives(script: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run([*command, str(tmp_path / "program.py")]).splitlines() == [expected]


@pytest.mark.filterwarnings("default")  # the kernel's own libraries warn about each other
def test_in_a_jupyter_kernel(script: str, expected: str) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(script)])
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    shown = "".join(o.text for o in notebook.cells[0].outputs if o.get("name") == "stdout")
    assert shown.splitlines() == [expected]


@pytest.mark.slow
def test_two_engines_at_once_and_no_trace_after_kill(families_path: Path) -> None:
    """Two engines answer side by side; after SIGKILL of their parents nothing is left within 5 s."""
    folder = families.save("llama_9_3", families_path)
    program = textwrap.dedent(f"""
        import sys
        import shoal

        llm = shoal.LLM({str(folder)!r}, tensor_parallel_size=2, kv_cache_memory_bytes=1 << 22)
        for line in sys.stdin:
            out = llm.generate([[5, 6, 7]], shoal.SamplingParams(max_tokens=8, seed=int(line)))
            print("ids", out[0].outputs[0].token_ids, flush=True)
    """)
    before = shared_memory()
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]

    def ask(engine: subprocess.Popen[str]) -> str:
        assert engine.stdin is not None and engine.stdout is not None
        engine.stdin.write("3\n")
        engine.stdin.flush()
        return engine.stdout.readline()

    first = [ask(engine) for engine in engines]
    assert first[0] == first[1] and first[0].startswith("ids ")
    ranks = [psutil.Process(engine.pid).children(recursive=True) for engine in engines]
    assert all(len(processes) == 2 for processes in ranks)

    engines[0].send_signal(signal.SIGKILL)
    engines[0].wait()
    wait_until(lambda: are_gone(ranks[0]), 5, "the killed engine's ranks are gone")
    assert ask(engines[1]) == first[1], "the other engine goes on"
    engines[1].send_signal(signal.SIGKILL)
    engines[1].wait()
    wait_until(lambda: are_gone(ranks[1]), 5, "the killed engine's ranks are gone")
    assert shared_memory() <= before
    for engine in engines:
        for pipe in (engine.stdin, engine.stdout):
            assert pipe is not None
            pipe.close()
