"""What a rank remembers from one step to the next: the ids that were sampled, for the placeholders of the
step behind. Knows no model and no sampling rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from shoal.comm.base import Comm
from shoal.errors import EngineError
from shoal.messages import PLACEHOLDER_ID, SequenceStep, Step, TokenResult, pack_ids

__all__ = ["Placeholders"]

_PLACEHOLDER = pack_ids([PLACEHOLDER_ID])


class Placeholders:
    """The sampling rank knows the ids, and tells the others in steps that need them.

    Args:
        comm: of the ranks.
        samples: the rank that samples.
        device: what ``comm`` takes tensors on.
    """

    def __init__(self, comm: Comm, samples: int, device: torch.device) -> None:
        self._comm = comm
        self._samples = samples
        self._device = device
        self._sampled: dict[int, int] = {}

    def keep(self, tokens: Sequence[TokenResult]) -> None:
        """Remember what a step sampled, until the next one has been sampled."""
        self._sampled = {token.sequence_id: token.token_id for token in tokens}

    def ids(self, step: Step) -> list[int]:
        """What the step's placeholders stand for, sequence by sequence. A collective if it has any.

        A sequence whose sampling failed has ended: its row is computed with some id, and nobody will look at
        it.

        Raises:
            EngineError: the last step did not sample for a sequence.
        """
        waiting = [s.sequence_id for s in step.sequences if s.token_ids == _PLACEHOLDER]
        if not waiting:
            return waiting
        ids = torch.empty(len(waiting), dtype=torch.int32, device=self._device)
        if self._comm.rank == self._samples:
            ids = torch.tensor([self._id(n) for n in waiting], dtype=torch.int32, device=self._device)
        found: list[int] = self._comm.broadcast(ids, self._samples).tolist()
        return found

    def in_histories(self, sequences: Sequence[SequenceStep]) -> list[SequenceStep]:
        """The sequences with ids in the place of their histories' placeholders; on the sampling rank."""
        return [self._completed(s) if s.history.endswith(_PLACEHOLDER) else s for s in sequences]

    def _completed(self, sequence: SequenceStep) -> SequenceStep:
        known = sequence.history[: -len(_PLACEHOLDER)]
        return msgspec.structs.replace(sequence, history=known + pack_ids([self._id(sequence.sequence_id)]))

    def _id(self, sequence_id: int) -> int:
        token_id = self._sampled.get(sequence_id)
        if token_id is None:
            raise EngineError(
                f"a step continues sequence {sequence_id}, for which the last one sampled nothing"
            )
        return max(token_id, 0)
