"""Collectives between ranks. The only room that names torch.distributed."""
