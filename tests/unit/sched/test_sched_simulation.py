"""Whatever arrives, leaves or breaks in whatever order: right keys and values, right outputs, an end."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sched_simulator import World
from sched_words import spec

from shoal.cache.prefix import block_digest
from shoal.errors import RequestError

STEM = [0, 1, 1, 0, 2, 0, 1, 0, 0, 2, 1, 1, 1, 0, 2, 2, 0, 1, 2, 0, 0, 0, 1, 2]


def colliding_digest(parent_digest: bytes, tokens: bytes) -> bytes:
    """One of three digests; the salt ``c`` collides with none."""
    return bytes([(sum(parent_digest) + sum(tokens)) % 3])


worlds = st.builds(
    World,
    num_blocks=st.integers(1, 16),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 20),
    max_model_len=st.integers(2, 64),
    caching=st.booleans(),
    digest=st.sampled_from([block_digest, block_digest, colliding_digest]),
    depth=st.sampled_from([1, 2, 2]),
    num_slots=st.sampled_from([None, None, 1, 3]),
    keeps_kv=st.sampled_from([True, True, False]),
    window=st.sampled_from([None, 1, 2, 3, 4, 5, 7, 9]),
    num_window_blocks=st.integers(1, 16),
)

adds = st.fixed_dictionaries(
    {
        "stem": st.sampled_from([0, 3, 7, 8, 12, 16, len(STEM)]),
        "tail": st.lists(st.integers(0, 2), max_size=4),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "max_tokens": st.one_of(st.none(), st.integers(1, 14)),
        "min_tokens": st.sampled_from([0, 0, 3, 9]),
        "ignore_eos": st.booleans(),
        "salt": st.sampled_from([b"", b"", b"c"]),
        "penalty": st.sampled_from([0.0, 0.5]),
    }
)
disturbances = st.one_of(
    st.tuples(st.just("add"), adds),
    st.tuples(st.sampled_from(["abort", "finish", "fail"]), st.integers(0, 99)),
)
arrivals = st.tuples(st.just("add"), adds)
steps = st.tuples(st.just("steps"), st.integers(1, 8))
disturbed_steps = st.tuples(st.just("step"), st.lists(disturbances, max_size=2))
resets = st.tuples(st.just("reset"), st.one_of(st.none(), st.lists(disturbances, max_size=2)))
events = st.one_of(
    arrivals, arrivals, arrivals, disturbances, steps, steps, disturbed_steps, disturbed_steps, resets
)


def play(world: World, event: tuple[str, object]) -> None:
    kind, detail = event
    if kind == "add":
        add(world, detail)
    elif kind == "step":
        has_begun = len(world.in_flight) < world.depth and world.begin() is not None
        if has_begun:
            for inner in detail:
                play(world, inner)
        if has_begun and len(world.in_flight) == world.depth:
            world.end()
    elif kind == "steps":
        for _ in range(detail):
            world.step()
    elif kind == "reset":
        if detail is not None and len(world.in_flight) < world.depth and world.begin() is not None:
            for inner in detail:
                play(world, inner)
        world.reset()
    elif world.unfinished():
        target = world.unfinished()[detail % len(world.unfinished())]
        if kind == "abort":
            world.abort(world.branches[target].spec.request_id)
        elif kind == "finish":
            world.finish(target, "###")
        else:
            world.errors_next.add(target)


def add(world: World, detail: dict) -> None:
    prompt_ids = STEM[: detail["stem"]] + detail["tail"]
    options = {key: detail[key] for key in ("n", "max_tokens", "min_tokens", "ignore_eos", "salt", "penalty")}
    fits = 0 < len(prompt_ids) < world.max_model_len
    fits = fits and len(prompt_ids) <= world.num_blocks * world.block_size
    request = spec(str(len(world.branches)), prompt_ids, **options)
    if fits:
        world.add(request)
    else:
        with pytest.raises(RequestError) as caught:
            world.add(request)
        assert caught.value.field == "prompt"


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world=worlds, script=st.lists(events, max_size=40))
def test_any_script_gives_the_outputs_of_unlimited_memory(world, script):
    """Arrivals, aborts, finishes, failures and resets, in flight too: each step reads the right KV, all
    counts agree after each, everything ends, and the outputs are those of a run with endless memory."""
    for event in script:
        play(world, event)
    world.drain()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kept", [{"num_slots": 6}, {"keeps_kv": False}])
def test_states_and_sequences_computed_anew_give_the_same_outputs(kept, depth):
    """Branches with a slot each, or of which nothing is kept, are preempted and go on as if nothing were."""
    rng = random.Random(depth)
    world = World(num_blocks=18, block_size=3, max_num_seqs=8, max_num_batched_tokens=20, depth=depth, **kept)
    for number in range(100):
        prompt_ids = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        n = rng.choice([1, 1, 3])
        world.add(spec(str(number), prompt_ids, n=n, max_tokens=rng.randint(1, 20), ignore_eos=True))
        for _ in range(rng.choice([0, 1, 5])):
            world.step()
        if rng.random() < 0.1 and world.unfinished():
            world.abort(world.branches[rng.choice(world.unfinished())].spec.request_id)
        if rng.random() < 0.03:
            world.reset()
    world.drain()
    stats = world.scheduler.stats
    assert stats.num_preemptions > 5 and stats.num_prefix_hits == 0
    assert bool(world.num_ahead) == (depth == 2 and world.keeps_kv)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("seed", "window"), [(0, None), (1, None), (2, 6), (3, 9)])
def test_a_long_crowded_run_gives_the_outputs_of_unlimited_memory(seed, window, caching, depth):
    """Hundreds of requests through a small cache: hits, forks, evictions and preemptions all happen."""
    rng = random.Random(seed)
    world = World(
        num_blocks=rng.randint(14, 24),
        block_size=rng.choice([2, 3, 4]),
        max_num_seqs=rng.randint(4, 12),
        max_num_batched_tokens=rng.randint(6, 40),
        caching=caching,
        depth=depth,
        window=window,
    )
    for number in range(150):
        stem = STEM[: rng.choice([0, 6, 12, 24])]
        prompt_ids = stem + [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        n = rng.choice([1, 1, 2, 4])
        world.add(spec(str(number), prompt_ids, n=n, max_tokens=rng.randint(1, 30), ignore_eos=True))
        for _ in range(rng.choice([0, 1, 3, 12])):
            world.step()
        if rng.random() < 0.1 and world.unfinished():
            world.abort(world.branches[rng.choice(world.unfinished())].spec.request_id)
        if rng.random() < 0.03:
            world.reset()
    world.drain()
    stats = world.scheduler.stats
    assert stats.num_preemptions > 20
    assert (world.num_ahead > 100) == (depth == 2)
    assert (stats.num_prefix_hits > 100) == caching
