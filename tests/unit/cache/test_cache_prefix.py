from __future__ import annotations

import subprocess
import sys

from shoal.cache.prefix import PrefixIndex, block_digest
from shoal.messages import pack_ids

FOUR = pack_ids([1, 2, 3, 4])


def test_a_digest_is_the_same_in_every_process():
    """Pinned, and equal under another hash seed."""
    first = block_digest(b"", FOUR)
    chained = block_digest(first, FOUR).hex()
    code = (
        "from shoal.cache.prefix import block_digest as d; from shoal.messages import pack_ids;"
        "f = pack_ids([1, 2, 3, 4]); print(d(d(b'', f), f).hex())"
    )
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == chained
    assert chained == "7757d38fe7879f2bc9040c2ec07a78a3"


def test_a_digest_depends_on_parent_and_tokens():
    """The same tokens after another prefix are other content."""
    one, other = block_digest(b"", FOUR), block_digest(b"salt", FOUR)
    assert len({one, other, block_digest(one, FOUR), block_digest(other, FOUR)}) == 4
    assert block_digest(b"", pack_ids([1, 2, 3, 5])) != one


def test_what_was_registered_is_found_until_forgotten():
    """register, find, forget."""
    index = PrefixIndex()
    node = index.register(7, b"d", None, FOUR, b"")
    assert node is not None and index.find(b"d", None, FOUR, b"") is node and len(index) == 1
    index.forget(7)
    assert index.find(b"d", None, FOUR, b"") is None and len(index) == 0
    index.forget(7)
    index.check_integrity()


def test_equal_content_is_registered_once():
    """The second block is told of the first."""
    index = PrefixIndex()
    first = index.register(1, b"d", None, FOUR, b"")
    assert index.register(2, b"d", None, FOUR, b"") is first
    assert index.block_ids() == {1}


def test_a_collision_is_a_miss_and_is_not_registered():
    """Equal digests with other tokens, another parent or another salt never match."""
    index = PrefixIndex()
    node = index.register(1, b"d", None, FOUR, b"")
    assert node is not None
    other = pack_ids([9, 9, 9, 9])
    for parent, tokens, salt in ((None, other, b""), (node, FOUR, b""), (None, FOUR, b"salt")):
        assert index.find(b"d", parent, tokens, salt) is None
        assert index.register(2, b"d", parent, tokens, salt) is None
    assert index.block_ids() == {1}
    index.check_integrity()
