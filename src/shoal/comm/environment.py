"""What must stand in the environment before any process group exists. Creates no group itself."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

import torch.distributed

__all__ = ["prepare_process_group_environment"]

_logger = logging.getLogger("shoal.comm")

_GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"


def prepare_process_group_environment(
    environ: MutableMapping[str, str] | None = None, group_exists: bool | None = None
) -> None:
    """Set ``NCCL_GRAPH_MIXING_SUPPORT=0``: no rank mixes captured and eager collectives at one time.

    NCCL then leaves out the work that makes such mixing safe (NCCL's documentation of environment
    variables). It reads the variable when a communicator is made, so a group that is already there
    keeps what it was made with: one warning says so. The user's own value stays; ``1`` gets a warning.

    Args:
        environ: where to set it; None: this process's environment.
        group_exists: whether a process group is there; None: ask torch.distributed.
    """
    environ = os.environ if environ is None else environ
    if group_exists is None:
        group_exists = torch.distributed.is_available() and torch.distributed.is_initialized()
    own = environ.get(_GRAPH_MIXING)
    environ.setdefault(_GRAPH_MIXING, "0")
    if own == "1":
        _logger.warning("%s=1 is set: collectives in CUDA graphs are slower; unset it", _GRAPH_MIXING)
    elif own is None and group_exists:
        _logger.warning(
            "a process group exists already: it was made without %s=0, and its collectives in CUDA graphs "
            "are slower; set the variable before the first process group",
            _GRAPH_MIXING,
        )
