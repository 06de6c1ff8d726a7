"""From logits to token ids."""

from shoal.sampling.sampler import sample

__all__ = ["sample"]
