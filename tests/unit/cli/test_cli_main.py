"""The command line as a whole: quick to start, honest in its exit status."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from shoal.cli.main import COMMANDS, load_command
from shoal.errors import EngineDeadError, ModelNotFoundError, PlanError, QueueFullError, RankError

_HEAVY = "{'torch', 'transformers', 'fastapi', 'uvicorn', 'numba'}"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    done = python(
        "import sys\nfrom shoal.cli.main import main\n"
        f"status = main({arguments})\n"
        f"print('heavy:', sorted({_HEAVY} & sys.modules.keys()), 'status:', status)"
    )
    assert done.stdout.endswith("heavy: [] status: 0\n"), done.stderr


def test_the_overview_lists_every_command_without_importing_one():
    done = python(
        "import sys\nfrom shoal.cli.main import main\nmain(['--help'])\n"
        "print('pydantic' in sys.modules, [m for m in sys.modules if m.startswith('shoal.cli.')])"
    )
    assert all(f" {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.endswith("False ['shoal.cli.main']\n")


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"shoal {version('shoal')}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["swim"],
        ["serve", "demo", "--fins", "2"],
        ["generate"],
        ["serve", "demo", "-tp", "two"],
        ["serve", "demo", "-tp", "0"],
        ["serve", "demo", "--dtype", "int3"],
        ["serve", "demo", "--port", "99999"],
        ["serve", "demo", "--api-key", ""],
        ["serve", "demo", "--shutdown-timeout", "-1"],
        ["serve", "demo", "--log-level", "loud"],
        ["info", "--device", "abacus"],
    ],
)
def test_wrong_usage_is_status_2_without_a_traceback(run, arguments):
    ended = run(*arguments)
    assert ended.status == 2
    assert ended.err and "Traceback" not in ended.err and not ended.out


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelNotFoundError("no such model"), 2),
        (PlanError("does not prove"), 1),
        (RankError("rank 1 died"), 1),
        (EngineDeadError("gave up"), 1),
        (QueueFullError("full"), 1),
    ],
)
def test_errors_become_one_line_and_a_status(run, monkeypatch, error, status):
    def fail(*_):
        raise error

    monkeypatch.setattr("shoal.cli.pull._fetch", fail)
    ended = run("pull", "demo")
    assert (ended.status, ended.out, ended.err) == (status, "", f"error: {error}\n")


def test_every_flag_has_an_environment_twin():
    for name in COMMANDS:
        for parameter in load_command(name).params:
            if parameter.name in ("help", "prompt"):
                continue
            variables = parameter.envvar if isinstance(parameter.envvar, list) else [parameter.envvar]
            assert f"SHOAL_{parameter.name.upper()}" in variables, (name, parameter.name)


def test_serve_has_the_documented_flags():
    spellings = {
        s for parameter in load_command("serve").params for s in parameter.opts + parameter.secondary_opts
    }
    documented = (
        "--tensor-parallel-size", "-tp", "--executor", "--device", "--dtype", "--attn-implementation",
        "--comm", "--way", "--cpu-kernels", "--quantization", "--num-threads", "--cpu-pinning",
        "--async-scheduling",
        "--no-async-scheduling",
        "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens",
        "--gpu-memory-utilization", "--memory-utilization", "--kv-cache-memory-bytes",
        "--num-gpu-blocks-override", "--block-size", "--enable-prefix-caching", "--no-enable-prefix-caching",
        "--seed", "--trust-remote-code", "--revision", "--config", "--log-level", "--log-format", "--host",
        "--port", "--served-model-name", "--api-key", "--max-num-queued-requests", "--request-timeout",
        "--shutdown-timeout", "--step-timeout",
    )  # fmt: skip
    assert set(documented) <= spellings
