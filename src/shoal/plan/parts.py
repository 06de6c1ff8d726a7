"""Replays a recording with only a part of some results: what becomes of parts that add up to the whole?
Knows no search.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from shoal.plan.glue import Glue
from shoal.plan.probe import Call, GlueError, Replay, replay
from shoal.plan.types import Reduction, pattern_of

__all__ = ["Frame", "NotLinearError", "PartReplay", "Sources"]

_RELATIVE = 1e-3  # of an element
_OF_LARGEST = 1e-4  # of the largest element: float32 rounding, and less than any term that counts


class NotLinearError(GlueError):
    """The outputs for parts do not add up to the output for the whole."""


class _SeenError(Exception):
    """The first call of a module has been seen, which is all that was wanted."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Whose results are partial: row-split weights (patterns), and modules that sum theirs already."""

    weights: frozenset[str]
    given: tuple[Reduction, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of one module in one recording."""

    name: str
    recording: int
    index: int  # how often the module was called before

    @property
    def pattern(self) -> str:
        return pattern_of(self.name)


@dataclass(slots=True)
class _Run:
    """One replay: what it answers, and which modules it watches."""

    part: Callable[[object, torch.Tensor], torch.Tensor]  # (source, its recorded result) -> what it gives now
    enters: Callable[[Frame], None] = lambda frame: None
    leaves: Callable[[Frame, Any], Any] = lambda frame, output: output  # -> the output to go on with
    used: Callable[[object], None] = lambda source: None
    watched: frozenset[str] = frozenset()  # full names of modules
    zeroed: frozenset[str] = frozenset()  # parameter patterns


@dataclass(slots=True)
class PartReplay:
    """Replays of one model.

    Args:
        glue: the probe model and its recordings.
        sources: whose results may be partial.
        split: parameter patterns that are no terms of a module's own.
    """

    glue: Glue
    sources: Sources
    split: Collection[str]
    _outputs: dict[Frame, Any] = field(default_factory=dict)  # of whole runs

    def uses(self, patterns: Collection[str]) -> list[frozenset[Frame]]:
        """For every use of a source, the calls of modules of these patterns that it happened in."""
        found: list[frozenset[Frame]] = []
        open_frames: list[Frame] = []

        def leave(frame: Frame, output: Any) -> Any:
            open_frames.remove(frame)
            self._outputs[frame] = _copied(output)
            return output

        run = _Run(
            part=lambda source, whole: whole,
            enters=open_frames.append,
            leaves=leave,
            used=lambda source: found.append(frozenset(open_frames)),
            watched=frozenset(
                name for name, _ in self.glue.model.named_modules() if pattern_of(name) in patterns
            ),
        )
        self._replay(run)
        return found

    def output_of_sum(self, module: str, once: frozenset[str]) -> tuple[int | None, type[GlueError] | None]:
        """The output of the modules of a pattern that adds up if the results of all sources in it do.

        Args:
            module: the pattern.
            once: parameters that all ranks but the first have zeros for.

        Returns:
            the output's position, or None and the kind of error: other things than that output change, or
            it does not add up.
        """
        first: dict[Frame, Any] = {}
        positions: set[int] = set()
        shares = _Shares()

        def keep(frame: Frame, output: Any) -> Any:
            first[frame] = _copied(output)
            return _copied(self._outputs[frame])

        def compare(frame: Frame, output: Any) -> Any:
            whole = self._outputs[frame]
            positions.add(_added_up(first[frame], output, whole))
            if len(positions) > 1:
                raise NotLinearError("several outputs depend on the results")
            return _copied(whole)

        watched = self._holders(module)
        try:
            self._replay(_Run(shares.first, leaves=keep, watched=watched))
            self._replay(_Run(shares.rest, leaves=compare, watched=watched, zeroed=once))
        except Exception as error:  # the model's own code may not bear other values
            return None, NotLinearError if isinstance(error, NotLinearError) else GlueError
        return (positions.pop(), None) if positions else (None, GlueError)

    def terms(self, module: str) -> frozenset[str]:
        """Parameters that the modules of a pattern add to their output, whatever the sources give; empty if
        they add anything else."""
        constant = self._constant(module, frozenset())
        if constant is None:
            return frozenset()
        candidates = sorted(
            {
                pattern_of(name)
                for name, parameter in self.glue.model.named_parameters(remove_duplicate=False)
                if pattern_of(name).startswith(f"{module}.") and parameter.is_floating_point()
            }
            - set(map(pattern_of, self.split))
        )
        found: set[str] = set()
        for pattern in candidates:
            without = self._constant(module, frozenset({pattern}))
            if without is not None and not _is_close(without, constant):
                found.add(pattern)
        rest = self._constant(module, frozenset(found)) if found else None
        return (
            frozenset(found)
            if rest is not None and _is_close(rest, constant, torch.zeros_like(rest))
            else frozenset()
        )

    def _constant(self, module: str, zeroed: frozenset[str]) -> torch.Tensor | None:
        """The output of the first call of such a module if all sources give zeros; None if anything else
        changes than that output."""
        seen: list[torch.Tensor] = []

        def look(frame: Frame, output: Any) -> Any:
            whole = self._outputs[frame]
            for mine, theirs in zip(_items(output), _items(whole), strict=True):
                if (
                    isinstance(mine, torch.Tensor)
                    and mine.is_floating_point()
                    and not _is_close(mine, theirs)
                ):
                    seen.append(mine.clone())
            raise _SeenError

        run = _Run(
            lambda source, whole: torch.zeros_like(whole),
            leaves=look, watched=self._holders(module), zeroed=zeroed,
        )  # fmt: skip
        try:
            self._replay(run)
        except _SeenError:
            return seen[0] if len(seen) == 1 else None
        except Exception:  # other values than recorded reached a weight, or code that does not bear them
            return None
        return None

    def _holders(self, module: str) -> frozenset[str]:
        """Modules of a pattern that hold a source."""
        names = [name for name, _ in self.glue.model.named_parameters(remove_duplicate=False)]
        held = [name for name in names if {name, pattern_of(name)} & self.sources.weights]
        given = {entry.module for entry in self.sources.given}
        held += [name for name, _ in self.glue.model.named_modules() if pattern_of(name) in given]
        return frozenset(
            name
            for name, _ in self.glue.model.named_modules()
            if pattern_of(name) == module and any(other.startswith(f"{name}.") for other in held)
        )

    # -------------------------------------------------------------- one replay

    def _replay(self, run: _Run) -> None:
        """Replay every recording.

        Raises:
            GlueError: a weight got something else than was recorded.
        """
        self.glue.num_checks += 1
        for number, recording in enumerate(self.glue.recordings):
            inside: list[str] = []
            with self._changed(run, number, inside):
                part = Replay(result=self._result(run, number, inside))
                replay(self.glue.model, recording, part, BaseTorchFunctionMode())

    def _result(self, run: _Run, number: int, inside: list[str]) -> Callable[[Call], torch.Tensor]:
        def result(call: Call) -> torch.Tensor:
            whole = call.output.detach()
            if not {call.weight, pattern_of(call.weight)} & self.sources.weights:
                return whole
            source = (number, call.weight, call.index)
            run.used(source)
            return run.part(source, whole) if _is_watched(call.weight, inside) else whole

        return result

    @contextmanager
    def _changed(self, run: _Run, number: int, inside: list[str]) -> Iterator[None]:
        """Hooks on what is watched and on modules that sum already; some parameters set to zero."""
        counts: dict[str, int] = {}
        given = {entry.module: entry.output for entry in self.sources.given}
        with ExitStack() as undo:
            for name, module in list(self.glue.model.named_modules()):
                if name in run.watched:
                    enter, leave = _watch(name, number, counts, run, inside)
                    undo.callback(module.register_forward_pre_hook(enter).remove)
                    undo.callback(module.register_forward_hook(leave).remove)
                if pattern_of(name) in given:
                    hook = _partial(name, number, given[pattern_of(name)], counts, run, inside)
                    undo.callback(module.register_forward_hook(hook, prepend=True).remove)
                for attribute, parameter in module._parameters.items():
                    full = f"{name}.{attribute}" if name else attribute
                    if parameter is not None and not parameter.is_meta and pattern_of(full) in run.zeroed:
                        undo.callback(module._parameters.__setitem__, attribute, parameter)
                        module._parameters[attribute] = nn.Parameter(torch.zeros_like(parameter), False)
            yield


def _is_watched(name: str, inside: list[str]) -> bool:
    """Whether a source is used in a watched module that holds it."""
    return any(name.startswith(f"{module}.") for module in inside)


def _watch(
    name: str, number: int, counts: dict[str, int], run: _Run, inside: list[str]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    def enter(*_: Any) -> None:
        counts[name] = counts.get(name, -1) + 1
        inside.append(name)
        run.enters(Frame(name, number, counts[name]))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        inside.remove(name)
        return run.leaves(Frame(name, number, counts[name]), output)

    return enter, leave


def _partial(
    name: str, number: int, position: int, counts: dict[str, int], run: _Run, inside: list[str]
) -> Callable[..., Any]:
    """A hook that takes the output of a module that sums already for a source."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        key = f"{name}:sum"
        counts[key] = counts.get(key, -1) + 1
        source = (number, name, counts[key])
        run.used(source)
        if not _is_watched(name, inside):
            return output
        items = list(_items(output))
        items[position] = run.part(source, items[position])
        return items[0] if isinstance(output, torch.Tensor) else type(output)(items)

    return hook


class _Shares:
    """Random parts of every source's result; two that add up to it."""

    def __init__(self) -> None:
        self._first: dict[object, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(17)

    def first(self, source: object, whole: torch.Tensor) -> torch.Tensor:
        if source not in self._first:
            noise = torch.empty(whole.shape, dtype=whole.dtype).normal_(generator=self._generator)
            self._first[source] = noise * whole.abs().mean().clamp(min=1e-6)
        return self._first[source].clone()

    def rest(self, source: object, whole: torch.Tensor) -> torch.Tensor:
        return whole - self.first(source, whole)


def _items(output: Any) -> tuple[Any, ...]:
    """A module's outputs, one or several."""
    if isinstance(output, torch.Tensor):
        return (output,)
    if type(output) in (tuple, list):
        return tuple(output)
    raise GlueError(f"a {type(output).__name__} is returned, of which no part can be summed")


def _added_up(first: Any, rest: Any, whole: Any) -> int:
    """Which one of a module's outputs is, in parts, what it is in whole; the others must not have changed."""
    positions = []
    for position, (a, b, both) in enumerate(zip(_items(first), _items(rest), _items(whole), strict=True)):
        if not isinstance(both, torch.Tensor):
            if any(isinstance(value, (tuple, list, dict)) for value in (a, b, both)):
                _check_same(a, both)
                _check_same(b, both)
        elif not both.is_floating_point():
            _check_same(a, both)
            _check_same(b, both)
        elif not (_is_close(a, both) and _is_close(b, both)):
            if a.shape != both.shape or not _is_close(a + b, both):
                raise NotLinearError("the outputs for parts do not add up")
            positions.append(position)
    if len(positions) != 1:
        raise NotLinearError(f"{len(positions)} outputs depend on the results")
    return positions[0]


def _check_same(value: Any, whole: Any) -> None:
    """Raise GlueError unless nested tensors are the same."""
    if isinstance(whole, torch.Tensor):
        if not isinstance(value, torch.Tensor) or value.shape != whole.shape or not _is_close(value, whole):
            raise GlueError("another output changes")
    elif isinstance(whole, (tuple, list)):
        for mine, theirs in zip(value, whole, strict=True):
            _check_same(mine, theirs)
    elif isinstance(whole, Mapping):
        for key in whole:
            _check_same(value[key], whole[key])


def _is_close(got: torch.Tensor, want: torch.Tensor, offset: torch.Tensor | None = None) -> bool:
    """Whether two tensors are the same up to rounding, measured by the largest element of ``want``.

    With ``offset``, whether ``got`` equals that, measured the same way.
    """
    goal = want if offset is None else offset
    if got.shape != goal.shape or got.dtype != goal.dtype:
        return False
    if not got.is_floating_point():
        return torch.equal(got, goal)
    if not got.numel():
        return True
    largest = float(want.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(got, goal, rtol=_RELATIVE, atol=_OF_LARGEST * largest, equal_nan=True)


def _copied(value: Any) -> Any:
    """The same with every tensor cloned: code may write into what a module gave."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return value
