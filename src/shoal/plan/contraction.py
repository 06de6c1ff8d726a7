"""What an operation does with a weight that a module's own code multiplies by: which dimensions of the
weight become dimensions of the result, and which are summed over with a dimension of the input. Knows no
function by name.

Shapes tell: the operation is run on meta with one dimension of the weight a little longer. If it still
runs, the dimension of the result that grew is where that one goes. If it fails, and runs again with a
dimension of another tensor longer as well, the two are summed over (the result is as before) or run along
together (it grew). What shapes suggest is then held against numbers, on a small case: parts along a summed
dimension must add up to the whole, parts along an output dimension must be the parts of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Analyser", "Contraction", "Operation", "tensors_in"]

_SMALL = 6  # length of dimensions in the numeric check
_TOKENS = 8
_LONGEST_PASSIVE = 64
_CONTAINERS = frozenset({tuple, list, dict})


@dataclass(frozen=True, slots=True)
class Contraction:
    """Roles of the weight's dimensions; pairs are (dimension of the weight, dimension of the other)."""

    outputs: tuple[tuple[int, int], ...]  # with the result
    summed: tuple[tuple[int, int], ...]  # with the input; empty: rows are looked up, there is no input
    batches: tuple[tuple[int, int], ...]  # with the input, and kept in the result
    input: int  # which of the operation's other floating-point tensors is the input; -1: none
    terms: tuple[int, ...]  # which of them are added to the result

    def fits(self, operation: Operation) -> bool:
        """Whether an operation of the same kind, at other sizes, has dimensions of these roles."""
        if max((self.input, *self.terms)) >= len(operation.floats):
            return False
        dims = operation.floats[self.input].dim() if self.input >= 0 else 0
        own = [dim for dim, _ in (*self.outputs, *self.summed, *self.batches)]
        theirs = [dim for _, dim in (*self.summed, *self.batches)]
        return max(own, default=-1) < operation.weight.dim() and max(theirs, default=-1) < dims


class Operation:
    """A call of a function with a weight among its arguments, to be run with other tensors in their place."""

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], weight: torch.Tensor
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.weight = weight
        distinct = {id(tensor): tensor for tensor in tensors_in((*args, *kwargs.values()))}
        self.others = [tensor for key, tensor in distinct.items() if key != id(weight)]
        self.floats = [tensor for tensor in self.others if tensor.is_floating_point()]

    def key(self) -> Any:
        """Equal for calls of which the shapes, and everything else but values, are equal."""
        numbers = {id(tensor): number for number, tensor in enumerate((self.weight, *self.others))}
        return self.func, _frozen((self.args, self.kwargs), numbers)

    def run(self, replaced: Mapping[int, torch.Tensor]) -> Any:
        """The function's result with tensors replaced, by their ``id``."""
        with torch._C.DisableTorchFunction():
            return self.func(*_replaced(self.args, replaced), **_replaced(self.kwargs, replaced))

    def shape(self, shapes: Mapping[int, Sequence[int]]) -> tuple[int, ...] | None:
        """The result's shape with other shapes of some tensors, by ``id``; None if that fails."""
        replaced = {
            id(tensor): _like(tensor, shapes.get(id(tensor), tensor.shape))
            for tensor in (self.weight, *self.others)
        }
        try:
            result = self.run(replaced)
        except Exception:  # functions refuse shapes in any way they like; that is the question
            return None
        return tuple(result.shape) if isinstance(result, torch.Tensor) else None

    def terms(self, how: Contraction) -> torch.Tensor | None:
        """What is added to the product, broadcast to the result's shape; None if nothing is."""
        if not how.terms:
            return None
        x = self.floats[how.input]
        weight_shape, input_shape = list(self.weight.shape), list(x.shape)
        for dim, input_dim in how.summed:
            weight_shape[dim] = input_shape[input_dim] = 1
        zeros = {id(self.weight): torch.zeros(weight_shape, dtype=self.weight.dtype)}
        result = self.run(zeros | {id(x): torch.zeros(input_shape, dtype=x.dtype)})
        assert isinstance(result, torch.Tensor)
        return result


@dataclass(frozen=True, slots=True)
class _Role:
    """What happens to one dimension of the weight."""

    dim: int
    other: int = -1  # which other tensor has a dimension of the same length
    other_dim: int = -1
    output: int | None = None  # dimension of the result that grows with it
    is_passive: bool = False  # the result changes in some other way


class Analyser:
    """Analyses operations, each shape once."""

    def __init__(self) -> None:
        self._known: dict[Any, Contraction | None] = {}

    def analyse(self, operation: Operation) -> Contraction | None:
        """The roles of the weight's dimensions; None if the operation is no plain product or look-up."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            key = operation.key()
            try:
                is_known = key in self._known
            except TypeError:  # an argument that has no hash
                return _analyse(operation)
            if not is_known:
                self._known[key] = _analyse(operation)
            return self._known[key]


def _analyse(operation: Operation) -> Contraction | None:
    base = operation.shape({})
    if base is None:
        return None
    roles = []
    for dim, size in enumerate(operation.weight.shape):
        role = _role(operation, base, dim) if size > 1 else _Role(dim, is_passive=True)
        if role is None:
            return None
        roles.append(role)
    how = _contraction(operation, roles)
    return how if how is not None and (not how.summed or _holds(operation, roles, how)) else None


def _role(operation: Operation, base: tuple[int, ...], dim: int) -> _Role | None:
    weight = operation.weight
    longer = {id(weight): _resized(weight.shape, dim, weight.shape[dim] + 1)}
    alone = operation.shape(longer)
    grown = None if alone is None else _grown(base, alone)
    for number, other in enumerate(operation.floats):
        for other_dim, size in enumerate(other.shape):
            if size != weight.shape[dim]:
                continue
            together = operation.shape({**longer, id(other): _resized(other.shape, other_dim, size + 1)})
            if together is None or (alone is not None and (grown is None or _grown(base, together) is None)):
                continue
            output = _grown(base, together)
            # Some functions do not check a bias on meta: then it is longer in both cases, and belongs to it.
            return _Role(dim, number, other_dim, output) if output is not None or together == base else None
    return None if alone is None else _Role(dim, output=grown, is_passive=grown is None)


def _grown(base: tuple[int, ...], longer: tuple[int, ...]) -> int | None:
    """The one dimension that is longer by one; None if something else changed."""
    if len(base) != len(longer):
        return None
    changed = [dim for dim, (a, b) in enumerate(zip(base, longer, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 and longer[changed[0]] == base[changed[0]] + 1 else None


def _contraction(operation: Operation, roles: Sequence[_Role]) -> Contraction | None:
    """The roles together; None where they are those of no product and no look-up."""
    summed = [role for role in roles if role.other >= 0 and role.output is None]
    inputs = {role.other for role in summed}
    if len(inputs) > 1:
        return None
    own_input = next(iter(inputs), -1)
    kept = [(role, role.output) for role in roles if role.output is not None]
    batches = [role for role, _ in kept if role.other == own_input != -1]
    outputs = tuple((role.dim, output) for role, output in kept if role not in batches)
    is_looked_up = any(role.is_passive and operation.weight.shape[role.dim] > 1 for role in roles)
    if own_input == -1 and (operation.floats or not outputs or not is_looked_up):
        return None
    return Contraction(
        outputs,
        tuple((role.dim, role.other_dim) for role in summed),
        tuple((role.dim, role.other_dim) for role in batches),
        own_input,
        tuple(number for number in range(len(operation.floats)) if number != own_input),
    )


# ------------------------------------------------------------------ the numeric check


def _holds(operation: Operation, roles: Sequence[_Role], how: Contraction) -> bool:
    """Whether parts make up the whole, in numbers, as the roles say."""
    small = _small_case(operation, roles, how)
    if small is None:
        return False
    weight, x = small[id(operation.weight)], small[id(operation.floats[how.input])]
    terms = {id(operation.floats[number]): small[id(operation.floats[number])] for number in how.terms}
    without = {key: torch.zeros_like(value) for key, value in terms.items()}

    def value(weight: torch.Tensor, x: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        replaced = {**small, id(operation.weight): weight, id(operation.floats[how.input]): x, **terms}
        result = operation.run(replaced)
        assert isinstance(result, torch.Tensor)
        return result

    try:
        whole, product = value(weight, x, terms), value(weight, x, without)
        sums = [
            value(_half(weight, dim, 0), _half(x, other, 0), without)
            + value(_half(weight, dim, 1), _half(x, other, 1), without)
            for dim, other in how.summed
        ]
        added = value(torch.zeros_like(weight), torch.zeros_like(x), terms)
        parts = [
            (value(_half(weight, dim, half), x, _halved(operation, roles, terms, dim, half)), out, half)
            for dim, out in how.outputs
            for half in (0, 1)
        ]
        return (
            all(torch.allclose(product, entry) for entry in sums)
            and torch.allclose(whole, product + added)
            and all(torch.allclose(_half(whole, out, half), entry) for entry, out, half in parts)
        )
    except Exception:  # functions refuse shapes in any way they like; then it is no plain product
        return False


def _small_case(
    operation: Operation, roles: Sequence[_Role], how: Contraction
) -> dict[int, torch.Tensor] | None:
    """Small random float64 tensors in place of the floating-point ones, by ``id``."""
    weight_shape = list(operation.weight.shape)
    shapes = [[min(size, _TOKENS) for size in tensor.shape] for tensor in operation.floats]
    for role in roles:
        if role.is_passive:
            if weight_shape[role.dim] > _LONGEST_PASSIVE:
                return None
            continue
        weight_shape[role.dim] = _SMALL
        if role.other >= 0:
            shapes[role.other][role.other_dim] = _SMALL
    generator = torch.Generator().manual_seed(0)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=torch.float64).normal_(generator=generator)

    small = {id(tensor): draw(shape) for tensor, shape in zip(operation.floats, shapes, strict=True)}
    return {**small, id(operation.weight): draw(weight_shape)}


def _halved(
    operation: Operation, roles: Sequence[_Role], terms: Mapping[int, torch.Tensor], dim: int, half: int
) -> dict[int, torch.Tensor]:
    """The added terms, the one that runs along with the weight's dimension halved."""
    role = next(role for role in roles if role.dim == dim)
    if role.other < 0:
        return dict(terms)
    key = id(operation.floats[role.other])
    return {**terms, key: _half(terms[key], role.other_dim, half)}


def _half(tensor: torch.Tensor, dim: int, half: int) -> torch.Tensor:
    """The first third, or the rest: parts of unequal size."""
    third = tensor.shape[dim] // 3
    return tensor.narrow(dim, 0, third) if half == 0 else tensor.narrow(dim, third, tensor.shape[dim] - third)


# ------------------------------------------------------------------ arguments


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in _CONTAINERS:
            yield from tensors_in(value.values() if isinstance(value, dict) else value)


def _replaced(value: Any, replaced: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replaced(item, replaced) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(_replaced(item, replaced) for item in value)
    return value


def _frozen(value: Any, numbers: Mapping[int, int]) -> Any:
    """Arguments with tensors as which one they are, and their shape."""
    if isinstance(value, torch.Tensor):
        return numbers[id(value)], tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((key, _frozen(item, numbers)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(item, numbers) for item in value)
    return type(value), value


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
