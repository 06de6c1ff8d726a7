"""A model without a model: pages that remember which token of which prefix was written where.

Each slot of the simulated KV memory holds the identity of the whole token prefix up to it. A step is
executed as a rank would execute it, from what the step says alone; before anything is written, and again
after everything was, each branch must find its own prefix, position by position. The next token is a
function of prefix and branch, so the outputs must be those of :func:`reference`, which has no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from zlib import crc32

from shoal.cache.manager import CacheManager
from shoal.cache.prefix import Digest, block_digest
from shoal.messages import SamplingSpec, SequenceStep, Step, StepResult, TokenResult, unpack_ids
from shoal.sched.request import BranchUpdate, Request, RequestSpec, Status
from shoal.sched.scheduler import Scheduler

VOCABULARY = 24
EOS = 22
STOP = 23
POISON = -1


def extend(identity: int, token_id: int) -> int:
    """The identity of a prefix with one more token; the same in every process."""
    return hash((identity, token_id))


def start_identity(salt: bytes) -> int:
    return crc32(salt)


def next_token(identity: int, branch: int) -> int:
    return (identity ^ (branch * 0x9E3779B1)) // 7 % VOCABULARY


def spec(
    request_id: str,
    prompt_ids: list[int],
    *,
    n: int = 1,
    max_tokens: int | None = 8,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    salt: bytes = b"",
    penalty: float = 0.0,
) -> RequestSpec:
    """A request whose tokens EOS and STOP end it."""
    return RequestSpec(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=tuple(
            SamplingSpec(temperature=0.0, branch=i, min_tokens=min_tokens, presence_penalty=penalty)
            for i in range(n)
        ),
        max_tokens=max_tokens,
        eos_ids=frozenset({EOS}),
        stop_ids=frozenset({STOP}),
        ignore_eos=ignore_eos,
        cache_salt=salt,
    )


def counts(step: Step) -> dict[int, int]:
    """Tokens per sequence in a step."""
    return {item.sequence_id: len(unpack_ids(item.token_ids)) for item in step.sequences}


def long_spec(request_id: str, prompt_ids: list[int], **options) -> RequestSpec:
    """A request that ends at max_tokens only."""
    request = spec(request_id, prompt_ids, ignore_eos=True, **options)
    return RequestSpec(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
    )


def reference(
    request: RequestSpec, branch: int, *, max_model_len: int, capacity: int
) -> tuple[list[int], str, int | None]:
    """Output ids, finish reason and stop reason of one branch, worked out one token at a time."""
    identity = start_identity(request.cache_salt)
    for token_id in request.prompt_ids:
        identity = extend(identity, token_id)
    output: list[int] = []
    while True:
        token_id = next_token(identity, branch)
        output.append(token_id)
        identity = extend(identity, token_id)
        if len(output) >= request.sampling[branch].min_tokens:
            if token_id in request.eos_ids and not request.ignore_eos:
                return output, "stop", None
            if token_id in request.stop_ids:
                return output, "stop", token_id
        num_tokens = len(request.prompt_ids) + len(output)
        if len(output) == request.max_tokens or num_tokens == max_model_len or num_tokens == capacity + 1:
            return output, "length", None


@dataclass
class Branch:
    """What the world knows of one branch, by its own bookkeeping."""

    spec: RequestSpec
    index: int
    token_ids: list[int]
    identities: list[int]  # of each prefix
    ended: tuple[str, int | str | None] | None = None
    was_disturbed: bool = False  # aborted, finished from outside, or failed

    @property
    def output(self) -> list[int]:
        return self.token_ids[len(self.spec.prompt_ids) :]

    def append(self, token_id: int) -> None:
        before = self.identities[-1] if self.identities else start_identity(self.spec.cache_salt)
        self.token_ids.append(token_id)
        self.identities.append(extend(before, token_id))


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
    branches: dict[int, Branch] = field(default_factory=dict)
    errors_next: set[int] = field(default_factory=set)  # sequence ids that fail in the next step

    def __post_init__(self) -> None:
        self.cache = CacheManager(
            self.num_blocks, self.block_size, enable_prefix_caching=self.caching, digest=self.digest
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_num_queued_requests=self.bound,
        )
        self.requests: dict[int, Request] = {}
        self.step_in_flight: Step | None = None
        self.pages: dict[int, list[int]] = {}  # per block, the prefix identity in each slot
        self.poison(range(self.num_blocks))

    def poison(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.pages[block_id] = [POISON] * self.block_size

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
        self.step_in_flight = None
        self.poison(range(self.num_blocks))
        assert self.cache.num_free == self.num_blocks
        self.scheduler.check_integrity()

    def begin(self) -> Step | None:
        """Schedule a step and hold it against the rules."""
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is None:
            assert not self.unfinished()
            return None
        self.step_in_flight = step
        counts = [len(item.token_ids) // 4 for item in step.sequences]
        assert 1 <= sum(counts) <= self.max_num_batched_tokens
        ids = [item.sequence_id for item in step.sequences]
        assert len(set(ids)) == len(ids) <= self.max_num_seqs
        assert all(self.requests[i].status is Status.RUNNING for i in ids)
        running = [i for i, request in self.requests.items() if request.status is Status.RUNNING]
        assert min(running) in ids, "the oldest running branch was left out"
        for item in step.sequences:
            self._check_message(item)
            self._check_read(item, item.start)
        return step

    def end(self) -> list[BranchUpdate]:
        """Execute the step in flight, answer it, and check what the scheduler made of the answer."""
        step, self.step_in_flight = self.step_in_flight, None
        assert step is not None
        written: set[tuple[int, int]] = set()
        for item in step.sequences:
            held = [self.cache._pool.num_holders(block_id) > 0 for block_id in unpack_ids(item.block_ids)]
            assert all(held), "a block was given up while a step in flight used it"
            self._write(item, written)
        for item in step.sequences:
            self._check_read(item, item.start + len(item.token_ids) // 4)
        answers = [self._answer(item) for item in step.sequences if self._answers(item)]
        expected = {answer.sequence_id: answer for answer in answers}
        updates = self.scheduler.update(
            step, StepResult(step_id=step.step_id, tokens=tuple(reversed(answers)))
        )
        self.errors_next.clear()
        for update in updates:
            self._check_update(update, expected.pop(update.request.sequence_id))
        assert all(self.branches[i].ended is not None for i in expected), "an answer got lost"
        self.scheduler.check_integrity()
        self._poison_what_nobody_keeps()
        return updates

    def step(self) -> list[BranchUpdate] | None:
        return None if self.begin() is None else self.end()

    def drain(self) -> None:
        """Run until all is answered, within a bound that a livelock would break."""
        work = sum(
            len(b.token_ids) + (b.spec.max_tokens or self.max_model_len) for b in self.branches.values()
        )
        for _ in range(2 * work + 10):
            if self.step() is None:
                break
        assert not self.unfinished(), "no end in sight"
        assert self.cache.num_free == self.num_blocks and self.cache.usage == 0.0
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
            assert (block_id, offset) not in written, "two tokens of one step in one slot"
            written.add((block_id, offset))
            self.pages[block_id][offset] = identity

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
        pool = self.cache._pool
        self.poison(b for b in range(self.num_blocks) if pool.num_holders(b) == 0 and not pool.is_kept(b))
