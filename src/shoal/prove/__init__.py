"""The production shard layers on simulated ranks, against the unsharded model."""
