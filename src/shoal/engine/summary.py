"""A running engine in a few lines, for people. Knows only :class:`EngineInfo`."""

from __future__ import annotations

from shoal.engine.protocol import EngineInfo

__all__ = ["describe"]


def describe(info: EngineInfo) -> str:
    """What is split how, and what each rank holds."""
    lines = [
        f"{info.architecture} over {info.tensor_parallel_size} rank(s), {info.dtype} on {info.device}, "
        f"attention: {info.attention}, served the {info.way} way"
    ]
    width = max((len(pattern) for pattern, _, _ in info.plan_summary), default=0)
    lines += [f"  {pattern:{width}}  {how:9}  {detail}" for pattern, how, detail in info.plan_summary]
    for rank in info.ranks:
        lines.append(
            f"rank {rank['rank']}: {rank['weight_bytes'] / 1e6:.1f} MB of weights "
            f"({rank['bytes_read'] / 1e6:.1f} MB read), {rank['kv_bytes'] / 1e6:.1f} MB of KV pages, "
            f"{rank['kv_bytes_per_token']} KV bytes a token"
        )
    return "\n".join(lines)
