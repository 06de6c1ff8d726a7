"""Where features lie in a parameter, and which sets of them a rank can hold."""

from __future__ import annotations

import torch

from shoal.plan.features import Features, Origin, find_slab, places


def origin_of(tensor: torch.Tensor, whole: torch.Tensor) -> Origin:
    return Origin(tuple(whole.shape), int(tensor.storage_offset()), tuple(tensor.stride()))


def made(view: torch.Tensor, whole: torch.Tensor, *dims: int) -> Features:
    """Features along these dimensions of a view of a parameter."""
    sizes = tuple(view.shape[dim] for dim in dims)
    return Features(dims, sizes, tuple(whole.shape), places(origin_of(view, whole), view.shape, dims))


def test_heads_and_their_features_lie_along_two_dimensions() -> None:
    whole = torch.empty(10, 4, 3)
    features = made(whole, whole, 1, 2)
    assert features.places[1].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert features.places[2].tolist() == [0, 1, 2] * 4
    assert 0 not in features.places


def test_an_expert_of_a_stack_lies_where_every_other_does() -> None:
    whole = torch.empty(4, 6, 5)
    for view in (whole[2], whole[3].t().t()):
        assert made(view, whole, 0).places[1].tolist() == list(range(6))
    assert made(whole[1].t(), whole, 1).places[1].tolist() == list(range(6))


def test_whole_heads_are_a_part_along_their_dimension_and_halves_of_heads_along_the_other() -> None:
    whole = torch.empty(10, 4, 3)
    features = made(whole, whole, 1, 2)
    heads = find_slab([features], [torch.arange(0, 3), torch.arange(3, 12)])
    assert heads is not None
    assert (heads.dim, heads.size) == (1, 4)
    assert [part.tolist() for part in heads.parts] == [[0], [1, 2, 3]]
    first = torch.tensor([0, 3, 6, 9])
    rest = torch.tensor([1, 2, 4, 5, 7, 8, 10, 11])
    halves = find_slab([features], [first, rest])
    assert halves is not None
    assert (halves.dim, [part.tolist() for part in halves.parts]) == (2, [[0], [1, 2]])


def test_a_corner_of_a_grid_of_features_is_no_part() -> None:
    whole = torch.empty(10, 4, 3)
    assert find_slab([made(whole, whole, 1, 2)], [torch.tensor([0, 1]), torch.arange(2, 12)]) is None


def test_experts_one_after_the_other_in_a_dimension_keep_the_same_part_each() -> None:
    """[4 experts · 6 neurons, 5] viewed by expert: a rank keeps its neurons of all, seen in use or not."""
    whole = torch.empty(24, 5)
    stack = whole.view(4, 6, 5)
    uses = [made(stack[expert], whole, 0) for expert in (0, 2)]
    slab = find_slab(uses, [torch.arange(0, 2), torch.arange(2, 6)])
    assert slab is not None
    assert slab.parts[0].tolist() == [0, 1, 6, 7, 12, 13, 18, 19]
    assert (slab.dim, slab.size) == (0, 24)


def test_a_part_of_a_parameter_that_no_use_was_seen_of_and_is_no_further_expert_is_refused() -> None:
    whole = torch.empty(20, 5)
    use = made(whole[:6], whole, 0)
    assert find_slab([use], [torch.arange(0, 2), torch.arange(2, 6)]) is None


def test_an_activation_is_flattened_and_cut_along_its_feature_dimensions() -> None:
    whole = torch.empty(10, 4, 3)
    features = made(whole, whole, 1, 2)
    activation = torch.arange(2.0 * 4 * 3).view(2, 4, 3)
    own = Features((1, 2), features.sizes, features.shape, features.places)
    assert torch.equal(own.flatten(activation), activation.flatten(1))
    part = own.cut(activation, torch.arange(3, 9))
    assert part is not None
    assert torch.equal(part, activation[:, 1:3])
    assert own.cut(activation, torch.tensor([0, 1, 3])) is None
