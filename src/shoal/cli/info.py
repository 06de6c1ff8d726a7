"""``shoal info``: what this machine offers and what shoal would use of it. Loads no model."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from shoal.cli.flags import taking
from shoal.cli.options import COMMON, DEVICE, JSON, set_up_logs
from shoal.cli.output import human_bytes, print_json, print_lines

__all__ = ["app", "describe", "info"]

app = typer.Typer(add_completion=False)

_PACKAGES = ("shoal", "torch", "transformers", "kernels")


@app.command()
@taking(DEVICE, JSON, COMMON)
def info(*, options: Mapping[str, Any]) -> None:
    """Show devices, memory, the attention kernel and why, versions."""
    set_up_logs(options, default_level="warning")
    facts = describe(options.get("device", "auto"), options.get("attn_implementation"))
    if options.get("json"):
        print_json(facts)
    else:
        print_lines(_as_text(facts))


def describe(device: str, attn_implementation: str | None) -> dict[str, Any]:
    """Facts about this machine as plain data; bytes are numbers.

    Args:
        device: the device that would be used, as for an engine.
        attn_implementation: the kernel asked for, if any.

    Raises:
        ConfigError: no such device or kernel here.
    """
    from shoal.attention.resolve import resolve
    from shoal.device.base import available_devices, resolve_device
    from shoal.device.cpu import usable_cores

    chosen = resolve_device(device)
    choice = resolve(attn_implementation, chosen)
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "device": chosen.name,
        "devices": [_device(resolve_device(name)) for name in available_devices()],
        "attention": {
            "kernel": choice.name,
            "reason": choice.reason,
            "rejected": [{"kernel": name, "reason": reason} for name, reason in choice.rejected],
        },
    }


def _device(device: Any) -> dict[str, Any]:
    memory = device.memory()
    return {
        "name": device.name,
        "description": device.description(),
        "total_bytes": memory.total,
        "allocated_bytes": memory.allocated,
        "reserved_bytes": memory.reserved,
        "free_bytes": memory.free,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _as_text(facts: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    lines = [f"versions   {versions}", f"system     {facts['system']}, {facts['cores']} cores usable"]
    for device in facts["devices"]:
        used = "  <- used" if device["name"] == facts["device"] else ""
        free, total = human_bytes(device["free_bytes"]), human_bytes(device["total_bytes"])
        lines.append(f"device     {device['name']}: {device['description']}, {free} of {total} free{used}")
    attention = facts["attention"]
    lines.append(f"attention  {attention['kernel']}: {attention['reason']}")
    lines += [f"           not {other['kernel']}: {other['reason']}" for other in attention["rejected"]]
    return lines
