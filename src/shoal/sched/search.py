"""What becomes of beams once their group has chosen. Knows no scores and no budget."""

from __future__ import annotations

import logging

from shoal.sched.beams import BeamGroup
from shoal.sched.request import BranchUpdate, Request, Status
from shoal.sched.roster import Roster

__all__ = ["go_on"]

_log = logging.getLogger("shoal.engine")


def go_on(roster: Roster, group: BeamGroup, shares_blocks: bool, keeps_kv: bool) -> list[BranchUpdate]:
    """All beams of a group have their candidates: let those chosen go on, or end the search.

    The first that goes on from a beam is that branch itself. For others a branch that nothing goes on from
    gives up what it has, and waits to share the beam's full blocks and compute the rest.

    Args:
        shares_blocks: whether one sequence can go on from what another has computed.
        keeps_kv: whether ranks keep what was computed.

    Returns:
        the sequences found, when the search is over.
    """
    chosen = _chosen(group)
    if not chosen:
        return _end(roster, group)
    keepers = dict.fromkeys(parent for parent, _ in chosen)
    spare = [request for request in group.branches if request not in keepers]
    for request in spare:
        if request.status is Status.RUNNING:
            roster.running.remove(request)
            roster.cache.free(request.blocks)
            roster.requeue(request)
    unclaimed, appended, beams = set(keepers), [], []
    for parent, token_id in chosen:
        if parent in unclaimed:
            unclaimed.remove(parent)
            appended.append((parent, token_id))
            beams.append(parent)
        else:
            heir = spare.pop()
            heir.become(parent, token_id, shares_blocks, roster.cache.block_size)
            beams.append(heir)
    for parent, token_id in appended:  # only now: its heirs have its tokens as they were
        parent.token_ids.append(token_id)
        parent.leader, parent.is_parked = None, False
        if not keeps_kv:
            parent.num_computed = parent.num_scheduled = 0
    group.go_on(beams)
    return []


def _chosen(group: BeamGroup) -> list[tuple[Request, int]]:
    """What the group chooses; nothing if it fails, which is this request's matter alone."""
    if group.error:
        return []
    try:
        return group.choose()
    except Exception as error:  # a stop string's text is made by a tokenizer's own code; scores may overflow
        _log.exception("the search of request %s cannot go on", group.branches[0].request_id)
        group.error = f"{type(error).__name__}: {error}"
        return []


def _end(roster: Roster, group: BeamGroup) -> list[BranchUpdate]:
    for request in group.branches:
        roster.withdraw(request, "error" if group.error else "stop", None)
    if group.error:
        answered = group.branches[: group.spec.num_returned]
        return [BranchUpdate(request, None, "error", None, group.error) for request in answered]
    updates = []
    for request, sequence in zip(group.branches, group.finished, strict=False):
        updates += [BranchUpdate(request, token) for token in sequence.tokens(request.sequence_id)]
        reasons = sequence.end(request.eos_ids)
        request.finish_reason, request.stop_reason = reasons
        updates[-1].finish_reason, updates[-1].stop_reason = reasons
    return updates
