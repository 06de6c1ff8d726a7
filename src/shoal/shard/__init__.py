"""A plan carried out: the layers of which a rank holds a slice, and how they come into a model."""

from shoal.shard.apply import shard

__all__ = ["shard"]
