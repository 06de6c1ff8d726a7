"""A model without a model: pages that remember which token of which prefix was written where.

Each slot of the simulated KV memory holds the identity of the whole token prefix up to it. A step is
executed as a rank would execute it, from what the step says and the tokens of the step before; before
anything is written, and again after everything was, each branch must find its own prefix, position by
position. The next token is a function of prefix and branch, so the outputs must be those of
:func:`reference`, which has no memory. Blocks that nobody keeps, and no step in flight reads, are overwritten
with nonsense at once. Where there is a window, a second memory stands for the layers that see it: in that a
branch must find what its window shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from msgspec import structs
from sched_words import (
    POISON,
    Branch,
    extend,
    next_token,
    reference,
    start_identity,
)

from shoal.cache.manager import CacheManager
from shoal.cache.pool import BlockPool
from shoal.cache.prefix import Digest, block_digest
from shoal.cache.spec import WindowSpec
from shoal.messages import (
    PLACEHOLDER_ID,
    SequenceStep,
    Step,
    StepResult,
    TokenResult,
    pack_ids,
    unpack_ids,
)
from shoal.sched.request import BranchUpdate, Request, RequestSpec, Status
from shoal.sched.scheduler import Scheduler


@dataclass
class World:
    """A scheduler, its simulated pages, and everything that must hold between the two."""

    num_blocks: int = 8
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    caching: bool = True
    digest: Digest = block_digest
    bound: int | None = None
    depth: int = 1  # steps in flight
    num_slots: int | None = None  # of states, beside the pages
    keeps_kv: bool = True
    window: int | None = None  # positions that some layers see
    num_window_blocks: int = 1  # at least; a branch alone always fits
    branches: dict[int, Branch] = field(default_factory=dict)
    errors_next: set[int] = field(default_factory=set)  # sequence ids that fail in the next step

    def __post_init__(self) -> None:
        if not self.keeps_kv:
            self.max_num_batched_tokens = max(self.max_num_batched_tokens, self.max_model_len)
        spec = None
        if self.window is not None and self.keeps_kv and self.num_slots is None:
            spec = self._window_spec(self.window)
        self.cache = CacheManager(
            self.num_blocks,
            self.block_size,
            enable_prefix_caching=self.caching and self.keeps_kv and self.num_slots is None,
            digest=self.digest,
            num_slots=self.num_slots,
            window=spec,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_num_queued_requests=self.bound,
            keeps_kv=self.keeps_kv,
        )
        self.states: dict[int, int] = {}  # per slot, the identity of the prefix behind it
        self.requests: dict[int, Request] = {}
        self.in_flight: deque[Step] = deque()
        self.sampled: dict[int, int] = {}  # by the last step, as a rank remembers it
        self.num_ahead = 0  # steps begun while another one was in flight
        self.pages: dict[int, list[int]] = {}  # per block, the prefix identity in each slot
        self.window_pages: dict[int, list[int]] = {}
        self.poison_all()

    def _window_spec(self, window: int) -> WindowSpec:
        def made(num_blocks: int) -> WindowSpec:
            return WindowSpec(window=window, block_size=self.block_size, num_blocks=num_blocks)

        least = min(self.num_blocks, made(1).wanted(1, self.max_num_batched_tokens))
        return made(max(self.num_window_blocks, least))

    def poison(self, pages: dict[int, list[int]], block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            pages[block_id] = [POISON] * self.block_size

    def poison_all(self) -> None:
        self.poison(self.pages, range(self.num_blocks))
        if self.cache.window is not None:
            self.poison(self.window_pages, range(self.cache.window.num_blocks))

    def add(self, request: RequestSpec) -> list[Request]:
        made = self.scheduler.add(request)
        for item in made:
            branch = Branch(request, item.branch, [], [])
            for token_id in request.prompt_ids:
                branch.append(token_id)
            self.branches[item.sequence_id] = branch
            self.requests[item.sequence_id] = item
        return made

    def unfinished(self) -> list[int]:
        return [sequence_id for sequence_id, branch in self.branches.items() if branch.ended is None]

    def abort(self, request_id: str) -> None:
        ended = self.scheduler.abort(request_id)
        mine = [i for i in self.unfinished() if self.branches[i].spec.request_id == request_id]
        assert [request.sequence_id for request in ended] == mine
        self._mark(mine, "abort", None)

    def finish(self, sequence_id: int, stop: str) -> None:
        was_live = self.branches[sequence_id].ended is None
        assert self.scheduler.finish(sequence_id, "stop", stop) == was_live
        if was_live:
            self._mark([sequence_id], "stop", stop)

    def _mark(self, sequence_ids: list[int], reason: str, stop_reason: str | None) -> None:
        for sequence_id in sequence_ids:
            self.branches[sequence_id].ended = (reason, stop_reason)
            self.branches[sequence_id].was_disturbed = True

    def reset(self) -> None:
        """The group died with its pages."""
        self.scheduler.reset()
        self.in_flight.clear()
        self.sampled = {}
        self.poison_all()
        assert self.cache.window_usage == 0.0 and self.cache.num_free == self.num_blocks
        self.scheduler.check_integrity()

    def begin(self) -> Step | None:
        """Schedule a step and hold it against the rules."""
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is None:
            assert self.in_flight or not self.unfinished()
            return None
        counts = [len(item.token_ids) // 4 for item in step.sequences]
        assert 1 <= sum(counts) <= self.max_num_batched_tokens
        ids = [item.sequence_id for item in step.sequences]
        assert len(set(ids)) == len(ids) <= self.max_num_seqs
        assert all(self.requests[i].status is Status.RUNNING for i in ids)
        assert self.keeps_kv or all(item.start == 0 for item in step.sequences)
        oldest = min(i for i, request in self.requests.items() if request.status is Status.RUNNING)
        assert oldest in ids or self._is_in_flight(oldest), "the oldest was left out"
        awaiting = [item for item in step.sequences if PLACEHOLDER_ID in unpack_ids(item.token_ids)]
        assert self.in_flight or not awaiting
        sampling = (
            {item.sequence_id for item in self.in_flight[0].sequences if item.sampling} if awaiting else ()
        )
        for item in awaiting:
            assert item.token_ids == pack_ids([PLACEHOLDER_ID]) and item.sequence_id in sampling
            assert not self.requests[item.sequence_id].is_ending, "a token too many"
        self.num_ahead += bool(self.in_flight)
        self.in_flight.append(step)
        self._check_window_sizes(step)
        return step

    def _check_window_sizes(self, step: Step) -> None:
        """Nobody holds more for its window than that and its tokens in flight need."""
        window = self.cache.window
        for item in step.sequences if window is not None else ():
            held = len(self.requests[item.sequence_id].blocks.window_ids)
            in_flight = [share for flight in self.in_flight for share in flight.sequences]
            tokens = sum(len(s.token_ids) // 4 for s in in_flight if s.sequence_id == item.sequence_id)
            slack = 0 if self.cache.enable_prefix_caching else self.block_size
            assert held <= window.most_blocks(tokens + slack), "more blocks than the window needs"

    def _is_in_flight(self, sequence_id: int) -> bool:
        """Whether a branch has nothing to compute before a step in flight is answered."""
        is_waited_for = self.requests[sequence_id].is_ending or not self.keeps_kv
        return is_waited_for and any(
            item.sequence_id == sequence_id for step in self.in_flight for item in step.sequences
        )

    def end(self) -> list[BranchUpdate]:
        """Execute the oldest step in flight, answer it, and check what the scheduler made of the answer."""
        step = self.in_flight.popleft()
        items = [self._filled(item) for item in step.sequences]
        for item in items:
            if self.branches[item.sequence_id].ended is None:
                self._check_message(item)
            self._check_read(item, item.start)
            self._check_window_read(item, item.start)
        self._move_states(items)
        written: set[tuple[int, int]] = set()
        for item in items:
            self._write(item, written)
        for item in items:
            self._check_read(item, item.start + len(item.token_ids) // 4)
            self._check_window_read(item, item.start + len(item.token_ids) // 4)
        answers = [self._answer(item) for item in items if self._answers(item)]
        self.sampled = {answer.sequence_id: answer.token_id for answer in answers}
        expected = {answer.sequence_id: answer for answer in answers}
        updates = self.scheduler.update(StepResult(step_id=step.step_id, tokens=tuple(reversed(answers))))
        self.errors_next.clear()
        for update in updates:
            self._check_update(update, expected.pop(update.request.sequence_id))
        assert all(self.branches[i].ended is not None for i in expected), "an answer got lost"
        self.scheduler.check_integrity()
        self._poison_what_nobody_keeps()
        return updates

    def _move_states(self, items: list[SequenceStep]) -> None:
        """What a rank does to states: it goes on from what it finds, or anew at position 0."""
        if self.num_slots is None:
            assert all(item.slot == -1 for item in items)
            return
        assert len({item.slot for item in items}) == len(items), "two branches of one step in one slot"
        for item in items:
            assert 0 <= item.slot < self.num_slots
            branch = self.branches[item.sequence_id]
            if item.start:
                assert self.states[item.slot] == branch.identities[item.start - 1], "another branch's state"
            stop = item.start + len(item.token_ids) // 4
            # A branch that ended meanwhile may have a token more in flight than it knows of.
            self.states[item.slot] = branch.identities[min(stop, len(branch.identities)) - 1]

    def _filled(self, item: SequenceStep) -> SequenceStep:
        """The step's share with the token in it that a placeholder stands for."""
        if item.token_ids != pack_ids([PLACEHOLDER_ID]):
            return item
        token_ids = pack_ids([max(self.sampled[item.sequence_id], 0)])
        return structs.replace(
            item, token_ids=token_ids, history=item.history and item.history[: -len(token_ids)] + token_ids
        )

    def step(self) -> list[BranchUpdate] | None:
        """One step answered, and as many in flight meanwhile as the world is deep."""
        while len(self.in_flight) < self.depth and self.begin() is not None:
            pass
        return self.end() if self.in_flight else None

    def drain(self) -> None:
        """Run until all is answered, within a bound that a livelock would break."""
        work = sum(
            len(b.token_ids) + (b.spec.max_tokens or self.max_model_len) for b in self.branches.values()
        )
        for _ in range(2 * work + 10):
            if self.step() is None:
                break
        assert not self.unfinished(), "no end in sight"
        assert self.cache.num_free == self.num_blocks
        assert self.cache.usage == self.cache.window_usage == 0.0
        self.check_outputs()

    def check_outputs(self) -> None:
        capacity = self.num_blocks * self.block_size
        for sequence_id, branch in self.branches.items():
            request = self.requests[sequence_id]
            output, *end = reference(
                branch.spec, branch.index, max_model_len=self.max_model_len, capacity=capacity
            )
            assert list(request.token_ids) == branch.token_ids
            assert (request.finish_reason, request.stop_reason) == branch.ended
            if branch.was_disturbed:
                assert branch.output == output[: len(branch.output)]
            else:
                assert branch.output == output and branch.ended == tuple(end)

    def _check_message(self, item: SequenceStep) -> None:
        branch = self.branches[item.sequence_id]
        token_ids = list(unpack_ids(item.token_ids))
        assert token_ids == branch.token_ids[item.start : item.start + len(token_ids)] and token_ids
        samples = item.start + len(token_ids) == len(branch.token_ids)
        assert (item.sampling is not None) == samples
        if not samples:
            return
        assert item.sampling is branch.spec.sampling[branch.index]
        assert item.num_output == len(branch.output)
        if item.sampling.needs_history:
            assert list(unpack_ids(item.history)) == branch.token_ids
            assert item.num_prompt == len(branch.spec.prompt_ids)
        else:
            assert item.history == b""

    def _check_read(self, item: SequenceStep, num_positions: int) -> None:
        """All of a branch's first positions are in the pages, where its table says."""
        wanted = iter(self.branches[item.sequence_id].identities[:num_positions])
        for block_id in unpack_ids(item.block_ids):
            chunk = list(islice(wanted, self.block_size))
            assert self.pages[block_id][: len(chunk)] == chunk, f"wrong keys and values in block {block_id}"
        assert next(wanted, None) is None, "the table is too short"

    def _check_window_read(self, item: SequenceStep, num_positions: int) -> None:
        """What the window of a branch's first new token shows, and all up to ``num_positions``, is there."""
        window = self.cache.window
        if window is None:
            assert not item.window_block_ids and not item.window_base
            return
        block_ids = unpack_ids(item.window_block_ids)
        identities = self.branches[item.sequence_id].identities
        for position in range(max(0, item.start - window.window + 1), min(num_positions, len(identities))):
            place, offset = divmod(position, self.block_size)
            assert place >= item.window_base, "a block in the window is gone"
            block_id = block_ids[place - item.window_base]
            assert self.window_pages[block_id][offset] == identities[position], (
                f"wrong keys and values in window block {block_id}"
            )

    def _write(self, item: SequenceStep, written: set[tuple[int, int]]) -> None:
        """What a rank does: each token extends the prefix it finds in the pages."""
        block_ids = unpack_ids(item.block_ids)

        def slot(position: int) -> tuple[int, int]:
            return block_ids[position // self.block_size], position % self.block_size

        if item.start:
            block_id, offset = slot(item.start - 1)
            identity = self.pages[block_id][offset]
        else:
            identity = start_identity(self.branches[item.sequence_id].spec.cache_salt)
        for position, token_id in enumerate(unpack_ids(item.token_ids), item.start):
            identity = extend(identity, token_id)
            block_id, offset = slot(position)
            assert self.cache._pool.num_holders(block_id), (
                "a block was given up, and a step in flight writes it"
            )
            assert (block_id, offset) not in written, "two tokens of one step in one slot"
            written.add((block_id, offset))
            self.pages[block_id][offset] = identity
            if self.window_pages:
                block_id = unpack_ids(item.window_block_ids)[position // self.block_size - item.window_base]
                assert self.cache._window._pool.num_holders(block_id), "a step in flight writes it"
                self.window_pages[block_id][offset] = identity

    def _answers(self, item: SequenceStep) -> bool:
        return item.sampling is not None or item.sequence_id in self.errors_next

    def _answer(self, item: SequenceStep) -> TokenResult:
        if item.sequence_id in self.errors_next:
            return TokenResult(sequence_id=item.sequence_id, error="broken")
        last = item.start + len(item.token_ids) // 4 - 1
        identity = self.pages[unpack_ids(item.block_ids)[last // self.block_size]][last % self.block_size]
        token_id = next_token(identity, item.sampling.branch)
        return TokenResult(sequence_id=item.sequence_id, token_id=token_id)

    def _check_update(self, update: BranchUpdate, answer: TokenResult) -> None:
        branch = self.branches[update.request.sequence_id]
        assert branch.ended is None
        if answer.error is not None:
            assert (update.token, update.token_ids, update.error) == (None, [], "broken")
            assert update.finish_reason == "error"
            self._mark([update.request.sequence_id], "error", None)
            return
        assert update.token is answer and update.token_ids == [answer.token_id] and update.error is None
        branch.append(answer.token_id)
        if update.finish_reason is not None:
            branch.ended = (update.finish_reason, update.stop_reason)

    def _poison_what_nobody_keeps(self) -> None:
        shares = [item for step in self.in_flight for item in step.sequences]
        read = {b for item in shares for b in unpack_ids(item.block_ids)}
        self.poison(self.pages, _nobodys(self.cache._pool, read))
        window = self.cache.window
        if window is not None:
            seen: set[int] = set()
            for item in shares:
                first = max(0, window.first_block(item.start) - item.window_base)
                seen.update(unpack_ids(item.window_block_ids)[first:])
            self.poison(self.window_pages, _nobodys(self.cache._window._pool, seen))


def _nobodys(pool: BlockPool, read: set[int]) -> list[int]:
    """Blocks that are not held, kept or read."""
    return [
        b
        for b in range(pool.num_blocks)
        if pool.num_holders(b) == 0 and not pool.is_kept(b) and b not in read
    ]
