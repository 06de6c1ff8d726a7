"""What ranks sum over is the caller's to say, and a wrong word is refused by its name."""

from __future__ import annotations

import pytest
from torch import nn

from shoal.errors import UsageError
from shoal.parallel.request import read_request


@pytest.mark.parametrize("comm", ["auto", "shm", "gloo"])
def test_the_transport_asked_for_is_passed_on(comm: str) -> None:
    assert read_request(nn.Linear(1, 1), 2, None, "cpu", None, comm).comm == comm


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(UsageError, match="comm: 'pigeon' is none of") as caught:
        read_request(nn.Linear(1, 1), 2, None, "cpu", None, "pigeon")
    assert caught.value.field == "comm"
