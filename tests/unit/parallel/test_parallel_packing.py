"""Arguments arrive as they were sent, and what the others have is not sent again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.parallel.packing import Known, pack, tensor_view, unpack
from shoal.parallel.parts import Journal, make_part

CPU = torch.device("cpu")
BIG = 1 << 16  # values, so more bytes than are sent twice


class Wire:
    """Both ends of a conversation."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.known = Known(self.journal)
        self.store: dict[int, torch.Tensor] = {}

    def send(self, message: Any, most: int = 1 << 30) -> Any:
        data = pack(message, CPU, self.known)
        self.known.settle(True)
        assert len(data) < most
        return unpack(data, CPU, self.store)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(True),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(2, dtype=torch.complex64),
        torch.empty(0, 4),
        torch.ones(1).expand(5),
        torch.eye(3).to_sparse(),
    ],
)
def test_every_kind_of_tensor_arrives(tensor: torch.Tensor) -> None:
    sent = Wire().send({"x": tensor})["x"]
    assert sent.dtype == tensor.dtype
    torch.testing.assert_close(sent, tensor)


def test_one_tensor_in_two_places_stays_one() -> None:
    x = torch.ones(3)
    first, second = Wire().send([x, x])
    assert first is second


def test_a_large_tensor_is_sent_once_until_it_changes() -> None:
    wire, x = Wire(), torch.randn(BIG)
    assert torch.equal(wire.send(x), x)
    assert torch.equal(wire.send(x, most=1000), x)
    x[0] = 5
    assert torch.equal(wire.send(x), x)


def test_a_tensor_that_shares_memory_with_numpy_is_sent_each_time() -> None:
    """Changes through numpy are not seen by torch."""
    wire, values = Wire(), np.zeros(BIG, dtype=np.float32)
    x = torch.from_numpy(values)
    wire.send(x)
    values[0] = 3
    assert wire.send(x)[0] == 3
    own = torch.zeros(BIG)
    wire.send(own)
    own.numpy()[0] = 4
    assert wire.send(own)[0] == 4


def test_a_tensor_of_inference_mode_is_sent_each_time() -> None:
    wire = Wire()
    with torch.inference_mode():
        x = torch.zeros(BIG)
        wire.send(x)
        x[0] = 3
        assert wire.send(x)[0] == 3


def test_what_did_not_arrive_is_sent_again() -> None:
    wire, x = Wire(), torch.randn(BIG)
    pack(x, CPU, wire.known)
    wire.known.settle(False)
    assert torch.equal(wire.send(x), x)


def test_a_known_tensor_is_forgotten_with_its_end() -> None:
    wire = Wire()
    x = torch.randn(BIG)
    wire.send(x)
    assert len(wire.store) == 1
    del x
    (drop,) = wire.journal.take()
    assert drop.number in wire.store


def test_a_part_is_the_others_own() -> None:
    wire = Wire()
    part = make_part(torch.zeros(2), wire.journal.new_handle())
    wire.store[part.handle.number] = torch.ones(2)
    assert wire.send({"cache": [part]})["cache"][0] is wire.store[part.handle.number]


def test_modules_of_the_model_and_devices_go_by_name() -> None:
    layer = nn.Linear(2, 2)
    data = pack((layer, CPU), CPU, None, {id(layer): "a.b"})
    other = nn.Linear(2, 2)
    assert unpack(data, torch.device("meta"), {}, {"a.b": other}) == (other, torch.device("meta"))


def test_a_class_of_the_program_itself_arrives() -> None:
    class Own:
        def __init__(self) -> None:
            self.x = torch.ones(2)

    Own.__module__ = "__main__"
    assert torch.equal(Wire().send(Own()).x, torch.ones(2))


def test_a_view_of_a_tensor_is_its_bytes_row_by_row() -> None:
    x = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert bytes(tensor_view(x.t())) == x.t().contiguous().numpy().tobytes()
    tensor_view(x)[:4] = (9).to_bytes(4, "little")
    assert x[0, 0] == 9
