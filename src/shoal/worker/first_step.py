"""The step that a rank runs before any request's. Knows no model."""

from __future__ import annotations

from shoal.messages import AllocateKV, SamplingSpec, SequenceStep, Step, pack_ids

__all__ = ["first_step"]


def first_step(message: AllocateKV, has_encoder: bool) -> Step:
    """A prompt of up to three tokens in block 0, one token sampled; nobody owns the block yet. Where there is
    an encoder, it reads them too, and its block is the last.
    """
    tokens = range(min(3, message.block_size))
    sequence = SequenceStep(
        sequence_id=0,
        start=0,
        token_ids=pack_ids(tokens),
        block_ids=pack_ids([0]),
        window_block_ids=pack_ids([0]) if message.num_window_blocks else b"",
        slot=0 if message.num_slots else -1,
        sampling=SamplingSpec(temperature=0.0),
        num_encoder=len(tokens) if has_encoder else 0,
        cross_block_ids=pack_ids([message.num_blocks - 1]) if has_encoder else b"",
        encoder_ids=pack_ids(tokens) if has_encoder else b"",
    )
    return Step(step_id=0, sequences=(sequence,))
