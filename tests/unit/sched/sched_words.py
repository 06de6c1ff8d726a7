"""The simulated model's language: token ids, identities of prefixes, and what comes next after each."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from shoal.messages import SamplingSpec, Step, unpack_ids
from shoal.sched.request import RequestSpec

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
