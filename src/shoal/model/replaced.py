"""What may stand in the place of a model's own modules, and whether it stays: results must be the model's on
every rank, or all of it is put back. Knows no way of serving, and not what results are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from shoal.model.trial import Trials

__all__ = ["Fused", "Judge", "Pack", "Packed", "fuse_if_right", "pack_if_right"]


class Replaced(Protocol):
    """Parts of a model that compute in our kernels, and can be put back."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was replaced and what not."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that are held packed."""
        ...

    @property
    def is_rounded(self) -> bool:
        """Whether its weights are, or will be, other ones on purpose: what differs then is reported, not held
        to."""
        ...

    def restore(self) -> None:
        """Put the model's own code back."""
        ...


class Fused(Replaced, Protocol):
    """Layers; their weights are rounded already, where they are to be."""

    @property
    def num_fused(self) -> int:
        """How many layers, the same on every rank."""
        ...


class Packed(Replaced, Protocol):
    """Modules outside fused layers."""

    @property
    def num_linears(self) -> int:
        """How many linears, the same on every rank."""
        ...

    def round(self) -> None:
        """Hold the weights, whole until now, in as few bits as is wanted."""
        ...


Pack = Callable[[PreTrainedModel, Callable[[], object]], Packed]
"""Given a model, and what runs it; which is done once, before anything is replaced, or not at all."""


@dataclass(frozen=True, slots=True)
class Judge:
    """What decides on a model's results."""

    trials: Trials
    problem: Callable[[], str | None]  # tries the model with whole weights: why it must not be used, or None
    gap: Callable[[], float]  # with rounded ones: the largest relative difference to what whole ones give
    results: str = "logits"  # what they are called

    def of_whole(self) -> str | None:
        """Why some rank must not use it, or None."""
        return self.trials.problem(self.problem)

    def of_rounded(self) -> tuple[str | None, str]:
        """The same with rounded weights, which give other results; and how they differ."""
        gaps: list[float] = []

        def measure() -> str | None:
            gaps.append(self.gap())
            is_finite = gaps[0] < float("inf")
            return None if is_finite else f"with rounded weights its {self.results} are not finite"

        problem = self.trials.problem(measure)
        return (
            problem,
            f"{self.results} differ by {gaps[0]:.1e} from those of unrounded weights" if gaps else "",
        )


def fuse_if_right(fused: Fused, judge: Judge) -> tuple[bool, tuple[str, ...]]:
    """Whether layers stay fused, and what is said of them."""
    if not fused.num_fused:
        fused.restore()
        return False, fused.notes
    said: tuple[str, ...] = ()
    if fused.is_rounded:
        problem, difference = judge.of_rounded()
        said = (difference,)
    else:
        problem = judge.of_whole()
    if problem is None:
        return True, (*fused.notes, *said)
    fused.restore()
    return False, (f"not fused: {problem}",)


def pack_if_right(packed: Packed, judge: Judge) -> tuple[int, tuple[str, ...]]:
    """Bytes of the modules that stay packed, rounded if they are to be, and what is said of them."""
    if not packed.num_linears:
        packed.restore()
        return 0, packed.notes
    said: tuple[str, ...] = ()
    problem = judge.of_whole()
    if problem is None and packed.is_rounded:
        packed.round()
        problem, difference = judge.of_rounded()
        said = (f"with them, {difference}",)
    if problem is None:
        return packed.num_bytes, (*packed.notes, *said)
    packed.restore()
    return 0, (f"no linear packed: {problem}",)
