"""The collectives of ranks that share memory, as kernels on addresses. Knows no tensor and no process.

On each of two channels every rank has a counter of posts and two slots, used in turn. In each exchange a rank
fills its slot, posts, waits for the posts of all others, and reads their slots. It fills the same slot again
two exchanges of that channel later: by then it has waited for posts that the others made after they had read.
So one round of waiting is enough, and what a rank does between posting and waiting, on the other channel too,
is its own affair.

``state`` is the address of int64 words that belong to one rank alone; the segment is the memory shared by
all. Kernels of other rooms may call these: they return a status, OK or why not.
"""

from __future__ import annotations

from typing import Any

import numpy
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoal.comm.shm_sums import item_bytes, sum_parts
from shoal.jit.atomics import load_acquire, now_ns, store_release
from shoal.jit.compile import kernel
from shoal.jit.views import array_at, copy_bytes
from shoal.jit.waiting import ABANDONED, LATE, OK, raise_counter, wait_for, wake_sleepers

__all__ = [
    "CHANNELS",
    "CULPRIT",
    "DIFFERENT",
    "GONE",
    "LEFT",
    "MOST_RANKS",
    "PIECE_BYTES",
    "RANK",
    "SEGMENT",
    "SIZE",
    "SLOT_BYTES",
    "SPIN_NS",
    "STATE_WORDS",
    "TIMEOUT_NS",
    "WATCHED",
    "abandon",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "collect",
    "first_to_leave",
    "post",
    "segment_bytes",
]

GONE, DIFFERENT = 3, 4  # further statuses: a peer has died; it is in another collective

# The state's words, by number; from WATCHED on one for each rank: what poll() asks about its process.
SEGMENT, RANK, SIZE, SLOT_BYTES, PIECE_BYTES, SPIN_NS, TIMEOUT_NS, CULPRIT = range(8)
_POSTS, _EXCHANGES = 8, 10  # of each channel
CHANNELS = 2
WATCHED = 16
MOST_RANKS = 8
STATE_WORDS = WATCHED + MOST_RANKS

# The segment, in bytes from its start.
LEFT = 0  # 0, or 1 + the rank that first left or failed
_COUNTERS = 128  # per channel and rank: posts (value, sleepers), then what the last two posts were for
_COUNTER_STRIDE = 128  # processors fetch cache lines in pairs
_PURPOSE = 16
_SLOTS = 4096

# Up to here each rank sums everything; above, its share, which the others then copy: a second round of
# waiting for less to read. With two ranks both read the same.
_DIRECT_BYTES = 65536
_LOOK_NS = 20_000_000  # how often a waiting rank looks whether its peer still lives

_REDUCE, _GATHER, _BROADCAST, _BARRIER = 1, 2, 3, 4


def segment_bytes(size: int, slot_bytes: int) -> int:
    """Bytes shared by ``size`` ranks."""
    return _SLOTS + 2 * CHANNELS * size * slot_bytes


@kernel
def post(state: int, channel: int, address: int, count: int, kind: int) -> int:
    """Begin a sum over ranks: tell the others ``count`` elements at ``address``, and wait for nobody.

    :func:`collect` ends it, before the next is begun on the same channel; there may be one on each.

    Args:
        count: of elements that fit a slot (SLOT_BYTES).
        kind: as in :mod:`.shm_sums`.
    """
    mine = _begin(state, channel) + _word(state, RANK) * _word(state, SLOT_BYTES)
    copy_bytes(mine, address, count * item_bytes(kind))
    return _post(state, channel, _REDUCE + 16 * kind + 256 * count)


@kernel
def collect(state: int, channel: int, address: int, count: int, kind: int) -> int:
    """End a sum over ranks: put the sums, in rank order, to ``address``, where the parts may have been."""
    status = _wait(state, channel, _REDUCE + 16 * kind + 256 * count)
    if status == OK:
        stride, ranks = _word(state, SLOT_BYTES), _word(state, SIZE)
        sum_parts(kind, address, _slots(state, channel), stride, ranks, count)
    return status


@kernel
def all_reduce(state: int, address: int, count: int, kind: int) -> int:
    """Replace ``count`` elements at ``address`` by their sums over ranks; kinds as in :mod:`.shm_sums`."""
    size = item_bytes(kind)
    most = _word(state, PIECE_BYTES) // size
    for start in range(0, count, most):
        length, place = min(most, count - start), address + start * size
        if _word(state, SIZE) > 2 and length * size > _DIRECT_BYTES:
            status = _reduce_by_shares(state, place, length, kind)
        else:
            status = post(state, 0, place, length, kind)
            if status == OK:
                status = collect(state, 0, place, length, kind)
        if status != OK:
            return status
    return OK


@kernel
def all_gather(state: int, address: int, target: int, rows: int, widths: int) -> int:
    """Put the ranks' blocks side by side.

    Args:
        address: this rank's block, ``rows`` rows of its width.
        target: the result, ``rows`` rows as wide as all blocks together.
        widths: address of int64 words, each rank's bytes in a row (0 is allowed).
    """
    size, most, stride = _word(state, SIZE), _word(state, PIECE_BYTES), _word(state, SLOT_BYTES)
    width_of = array_at(widths, size, numpy.int64)
    widest, total = 0, 0
    for rank in range(size):
        widest, total = max(widest, width_of[rank]), total + width_of[rank]
    mine = rows * width_of[_word(state, RANK)]
    for start in range(0, rows * widest, most):
        slots = _begin(state, 0)
        sent = min(most, mine - start)
        if sent > 0:
            copy_bytes(slots + _word(state, RANK) * stride, address + start, sent)
        status = _meet(state, _GATHER + 16 * rows + (total << 32))
        if status != OK:
            return status
        column = 0
        for rank in range(size):
            length = min(most, rows * width_of[rank] - start)
            source = address + start if rank == _word(state, RANK) else slots + rank * stride
            _place(target + column, total, source, width_of[rank], start, length)
            column += width_of[rank]
    return OK


@kernel
def broadcast(state: int, address: int, num_bytes: int, source: int) -> int:
    """Copy ``num_bytes`` at ``address`` of rank ``source`` to ``address`` of every rank."""
    most = _word(state, PIECE_BYTES)
    for start in range(0, num_bytes, most):
        length = min(most, num_bytes - start)
        slot = _begin(state, 0) + source * _word(state, SLOT_BYTES)
        if _word(state, RANK) == source:
            copy_bytes(slot, address + start, length)
        status = _meet(state, _BROADCAST + 16 * source + 256 * num_bytes)
        if status != OK:
            return status
        if _word(state, RANK) != source:
            copy_bytes(address + start, slot, length)
    return OK


@kernel
def barrier(state: int) -> int:
    """Return once every rank has called it."""
    _begin(state, 0)
    return _meet(state, _BARRIER)


@kernel
def abandon(state: int, culprit: int) -> None:
    """Have every rank that waits or will come give up, because of rank ``culprit``."""
    segment = _word(state, SEGMENT)
    if load_acquire(segment + LEFT) == 0:
        store_release(segment + LEFT, culprit + 1)
    for channel in range(CHANNELS):
        for rank in range(_word(state, SIZE)):
            wake_sleepers(_counter(state, channel, rank))


@kernel
def first_to_leave(state: int) -> int:
    """The rank that first left or failed; -1 if none has."""
    left: int = load_acquire(_word(state, SEGMENT) + LEFT)
    return left - 1


@kernel(inline="always")
def _word(state: int, number: int) -> int:
    value: int = array_at(state, STATE_WORDS, numpy.int64)[number]
    return value


@kernel(inline="always")
def _counter(state: int, channel: int, rank: int) -> int:
    number: int = channel * MOST_RANKS + rank
    return _word(state, SEGMENT) + _COUNTERS + number * _COUNTER_STRIDE


@kernel
def _begin(state: int, channel: int) -> int:
    """Begin an exchange: the address of rank 0's slot; the others' follow, SLOT_BYTES apart."""
    array_at(state, STATE_WORDS, numpy.int64)[_EXCHANGES + channel] += 1
    first: int = _slots(state, channel)
    return first


@kernel
def _slots(state: int, channel: int) -> int:
    """Rank 0's slot in the exchange that the channel is in."""
    turn = 2 * channel + (_word(state, _EXCHANGES + channel) & 1)
    return _word(state, SEGMENT) + _SLOTS + turn * _word(state, SIZE) * _word(state, SLOT_BYTES)


@kernel
def _meet(state: int, purpose: int) -> int:
    """Post, and wait for the others' posts. What each wrote before, all see after."""
    status = _post(state, 0, purpose)
    return _wait(state, 0, purpose) if status == OK else status


@kernel
def _post(state: int, channel: int, purpose: int) -> int:
    words = array_at(state, STATE_WORDS, numpy.int64)
    # Whoever left in good order had waited for all posts of its last collectives: this is a later one.
    if load_acquire(words[SEGMENT] + LEFT) != 0:
        return ABANDONED
    words[_POSTS + channel] += 1
    posts, mine = words[_POSTS + channel], _counter(state, channel, words[RANK])
    # A peer is at most one post ahead, so of two words one is that of this post.
    store_release(mine + _PURPOSE + 8 * (posts & 1), purpose)
    raise_counter(mine, posts)
    return OK


@kernel
def _wait(state: int, channel: int, purpose: int) -> int:
    """Wait until the others have posted as often as this rank; they must have posted for the same."""
    words = array_at(state, STATE_WORDS, numpy.int64)
    posts = words[_POSTS + channel]
    for rank in range(words[SIZE]):
        if rank != words[RANK]:
            counter = _counter(state, channel, rank)
            status = _wait_for_rank(state, rank, counter, posts)
            if status == OK and load_acquire(counter + _PURPOSE + 8 * (posts & 1)) != purpose:
                status = DIFFERENT
            if status != OK:
                words[CULPRIT] = rank
                return status
    return OK


@kernel
def _wait_for_rank(state: int, rank: int, counter: int, posts: int) -> int:
    if load_acquire(counter) >= posts:
        return OK
    words = array_at(state, STATE_WORDS, numpy.int64)
    began, spin_ns = now_ns(), words[SPIN_NS]
    deadline = began + words[TIMEOUT_NS]
    while True:
        until = min(deadline, now_ns() + _LOOK_NS)
        status = wait_for(counter, posts, spin_ns, until, words[SEGMENT] + LEFT)
        if status != LATE:
            return status
        if _poll(state + 8 * (WATCHED + rank), 1, 0) > 0:
            return OK if load_acquire(counter) >= posts else GONE
        if now_ns() >= deadline:
            return LATE
        spin_ns = 0


@kernel
def _reduce_by_shares(state: int, address: int, count: int, kind: int) -> int:
    """Sum what fits a slot: each rank its share, which the others then copy."""
    purpose = _REDUCE + 16 * kind + 256 * count
    slots, stride, size = _begin(state, 0), _word(state, SLOT_BYTES), item_bytes(kind)
    ranks, mine = _word(state, SIZE), _word(state, RANK)
    copy_bytes(slots + mine * stride, address, count * size)
    status = _meet(state, purpose)
    if status != OK:
        return status
    begin, end = _share(count, ranks, mine), _share(count, ranks, mine + 1)
    sum_parts(kind, address + begin * size, slots + begin * size, stride, ranks, end - begin)
    # Nobody else reads this part of the slot.
    copy_bytes(slots + mine * stride + begin * size, address + begin * size, (end - begin) * size)
    status = _meet(state, purpose)
    if status != OK:
        return status
    for step in range(1, ranks):
        rank = (mine + step) % ranks  # not all from the same one at once
        begin, end = _share(count, ranks, rank), _share(count, ranks, rank + 1)
        copy_bytes(address + begin * size, slots + rank * stride + begin * size, (end - begin) * size)
    return OK


@kernel
def _share(count: int, ranks: int, rank: int) -> int:
    """Where rank ``rank``'s share of ``count`` elements begins: at a cache line."""
    return min(count, (count * rank // ranks) // 64 * 64) if rank < ranks else count


@kernel
def _place(target: int, stride: int, source: int, width: int, start: int, length: int) -> None:
    """Copy ``length`` bytes, which begin at byte ``start`` of a block of rows of ``width`` bytes, to where
    they belong in rows that are ``stride`` bytes apart."""
    done = 0
    while done < length:
        row, column = (start + done) // width, (start + done) % width
        piece = min(width - column, length - done)
        copy_bytes(target + row * stride + column, source + done, piece)
        done += piece


@intrinsic  # type: ignore[untyped-decorator]
def _poll(typing: Any, entries: Any, count: Any, timeout_ms: Any) -> Any:
    """``poll()`` of the C library; entries are eight bytes each, an int64 word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, integer = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(integer, [word, word, integer])
        known = builder.module.globals.get("poll") or ir.Function(builder.module, kind, name="poll")
        timeout = builder.trunc(arguments[2], integer)
        return builder.sext(builder.call(known, [arguments[0], arguments[1], timeout]), word)

    return types.int64(types.int64, types.int64, types.int64), generate
