"""Takes modules over in place: a module's class becomes one of ours mixed with its own. Knows no layer.

The module stays the same object, so that its name, parameters, hooks and further attributes stay. Mixed
classes are made at run time; a module of one is copied and pickled by naming the two it is mixed of.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from shoal.errors import PlanError
from shoal.shard.link import Link, Linked

__all__ = ["Mixed", "computes_around", "take_over"]


class Mixed(Linked):
    """Base of every class that is mixed into another."""

    keeps_name: ClassVar[bool] = True  # the mixed class is called as the module's own

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind, own = getattr(type(self), "mixed_of", (None, None))
        if kind is None or type(self) is not _mixed(own, kind):
            return super().__reduce_ex__(protocol)  # somebody derived a class of their own from it
        return _bare, (own, kind), self.__dict__


def take_over(module: nn.Module, kind: type[Mixed], link: Link, **attributes: Any) -> None:
    """Give ``module`` the behaviour of ``kind``, and ``attributes``.

    Raises:
        PlanError: the module has been taken over before.
    """
    own = type(module)
    if issubclass(own, Mixed):
        raise PlanError(f"a {own.__name__} is sharded already")
    module.__class__ = _mixed(own, kind)
    for name, value in {**attributes, "link": link}.items():
        setattr(module, name, value)


def _mix(own: Any, kind: Any) -> type[nn.Module]:
    """Class ``kind`` mixed into class ``own``.

    What computes around ``super().forward()`` (an embedding's or a head's scale) gets ``kind`` behind it;
    elsewhere ``kind`` comes first.
    """
    bases: tuple[type, ...] = (kind, own)
    name = own.__name__ if kind.keeps_name else kind.__name__
    if issubclass(own, nn.Embedding) and own is not nn.Embedding:
        bases, name = (own, kind, nn.Embedding), own.__name__
    elif issubclass(own, nn.Linear) and computes_around(own):
        bases, name = (own, kind, nn.Linear), own.__name__
    return type(name, bases, {"mixed_of": (kind, own)})


def computes_around(own: Any) -> bool:
    """Whether the forward of a class calls the one it would have inherited, and does something more."""
    code = getattr(inspect.unwrap(own.forward), "__code__", None)
    return code is not None and "__class__" in code.co_freevars  # which super() is compiled to


_mixed: Callable[[Any, Any], type[nn.Module]] = functools.cache(_mix)


def _bare(own: type[nn.Module], kind: type[Mixed]) -> nn.Module:
    """An object of the mixed class without any state, for copy and pickle to fill."""
    mixed = _mixed(own, kind)
    return mixed.__new__(mixed)
