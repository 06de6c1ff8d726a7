"""A server is started for the time of a measurement, waited for, and stopped."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import pytest

from shoal.bench import server_process
from shoal.errors import EngineError

# Takes the place of the interpreter, and is called with ``-m shoal serve MODEL --port N ...``.
STAND_IN = """#!{python}
import http.server, signal, sys
from pathlib import Path

if sys.argv[4] == "broken":
    sys.exit(2)
asked = []

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200 if len(asked) > 2 else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *arguments):
        pass

def stop(*arguments):
    Path({record!r}).write_text(" ".join(sys.argv[1:4] + sys.argv[7:]) + " " + " ".join(asked))
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[6])), Answers).serve_forever()
"""


DIRECT = build_opener(ProxyHandler({}))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes what it was asked, once it is stopped."""
    script, record = tmp_path / "python", tmp_path / "record"
    script.write_text(STAND_IN.format(python=sys.executable, record=str(record)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return record


def test_it_is_there_once_it_says_that_it_is_ready_and_gone_afterwards(record: Path) -> None:
    with server_process.serving("model", ["-tp", "2"]) as url:
        with DIRECT.open(f"{url}/more", timeout=10) as answer:
            assert answer.status == 200
        assert not record.exists()
    assert record.read_text() == "-m shoal serve -tp 2 /ready /ready /ready /more"
    with pytest.raises(URLError):
        DIRECT.open(url, timeout=10)


def test_it_is_stopped_where_the_measurement_fails(record: Path) -> None:
    with pytest.raises(KeyError), server_process.serving("model", []):
        raise KeyError
    assert record.exists()


@pytest.mark.usefixtures("record")
def test_a_server_that_ends_at_once_is_said() -> None:
    with (
        pytest.raises(EngineError, match="ended with status 2 before it was ready"),
        server_process.serving("broken", []),
    ):
        raise AssertionError("it cannot be ready")
