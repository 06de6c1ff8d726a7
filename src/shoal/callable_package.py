"""Packages that can be called: ``shoal.plan(...)`` and ``shoal.prove(...)`` are functions for users and rooms
of the code at once. Knows neither.

Importing a submodule binds its package as an attribute of the parent, in place of any function of that
name; so the package itself forwards calls. What it forwards to is imported at the first call.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["make_callable"]


def make_callable(package: str, module: str, function: str) -> None:
    """Make an imported package callable.

    Args:
        package: its full name.
        module: full name of the module that has the function.
        function: what a call of the package calls.
    """

    class CallablePackage(ModuleType):
        """A package that forwards calls."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(module), function)(*args, **kwargs)

    sys.modules[package].__class__ = CallablePackage
