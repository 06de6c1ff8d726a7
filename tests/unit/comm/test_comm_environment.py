"""The environment of process groups, without any group."""

from __future__ import annotations

import logging

import pytest

from shoal.comm.environment import prepare_process_group_environment

NAME = "NCCL_GRAPH_MIXING_SUPPORT"


@pytest.mark.parametrize(
    ("own", "group_exists", "value", "warnings"),
    [
        (None, False, "0", 0),
        ("0", False, "0", 0),
        ("0", True, "0", 0),
        (None, True, "0", 1),
        ("1", False, "1", 1),
        ("1", True, "1", 1),
    ],
)
def test_mixing_is_off_before_groups_and_warned_of_where_that_is_too_late_or_unwanted(
    caplog: pytest.LogCaptureFixture, own: str | None, group_exists: bool, value: str, warnings: int
) -> None:
    environ = {} if own is None else {NAME: own}
    with caplog.at_level(logging.WARNING):
        prepare_process_group_environment(environ, group_exists)
    assert environ == {NAME: value}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert all(NAME in record.getMessage() for record in caplog.records)


def test_by_default_this_process_and_torch_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(NAME, "0")
    monkeypatch.delenv(NAME)
    prepare_process_group_environment()
    assert os.environ[NAME] == "0"
