"""Stop strings: found across pieces, held back while in doubt, flushed at the end."""

from __future__ import annotations

import random
from typing import Any

import engine_tokenizers
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.engine.stops import BranchText, StopFinder, stop_finder
from shoal.engine.text import Tokenizer
from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams

TOKENIZER = engine_tokenizers.make("byte_level")


def stream(finder: StopFinder, pieces: list[str]) -> tuple[list[str], str | None]:
    """The texts given out after each piece (and at the end), and the stop string found."""
    given_out = []
    for piece in pieces:
        text, stop = finder.push(piece)
        given_out.append(text)
        if stop is not None:
            return given_out, stop
    return [*given_out, finder.finish()], None


def test_a_stop_string_in_one_piece_cuts_the_text_before_it() -> None:
    assert stream(StopFinder(["END"], False), ["oneEND two"]) == (["one"], "END")


def test_a_stop_string_across_pieces_never_shows() -> None:
    assert stream(StopFinder(["END"], False), ["one E", "N", "D two"]) == (["one ", "", ""], "END")


def test_text_held_back_in_vain_is_given_out_as_soon_as_that_is_clear() -> None:
    assert stream(StopFinder(["END"], False), ["xEN", "Ex", "EN"]) == (["x", "ENEx", "", "EN"], None)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    texts, stop = stream(StopFinder(["a" * 50], False), ["plain text", "aa", "b"])
    assert (texts, stop) == (["plain text", "", "aab", ""], None)


def test_include_keeps_the_stop_string_and_nothing_behind_it() -> None:
    assert stream(StopFinder(["END"], True), ["oneE", "ND two"]) == (["one", "END"], "END")


@pytest.mark.parametrize(
    ("stops", "text", "found"),
    [
        (["cd", "bc"], "abcd", ("a", "bc")),
        (["ab", "abc"], "xabc", ("x", "ab")),
        (["abc", "ab"], "xabc", ("x", "abc")),
        (["aab"], "aaaab", ("aa", "aab")),
    ],
)
def test_the_first_by_position_then_by_listing_wins(
    stops: list[str], text: str, found: tuple[str, str]
) -> None:
    ((before,), stop) = stream(StopFinder(stops, False), [text])
    assert (before, stop) == found


def plain_search(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: after each piece, look through all of the text."""
    text = ""
    for piece in pieces:
        text += piece
        places = [(text.find(stop), index) for index, stop in enumerate(stops) if stop in text]
        if places:
            start, index = min(places)
            return text[: start + len(stops[index]) * include], stops[index]
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=0, max_size=3),
    include=st.booleans(),
)
@example(pieces=["a", "a", "b"], stops=["aab", "ab"], include=False)
def test_streaming_equals_searching_all_of_the_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    texts, stop = stream(StopFinder(stops, include), pieces)
    assert ("".join(texts), stop) == plain_search(pieces, stops, include)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_a_stop_string_can_begin_with(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops, False)
    taken = given_out = ""
    for piece in pieces:
        text, stop = finder.push(piece)
        if stop is not None:
            return
        taken, given_out = taken + piece, given_out + text
        held = taken[len(given_out) :]
        assert taken.startswith(given_out)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def branch(stop: str | list[str] | None = None, tokenizer: Tokenizer = TOKENIZER, **wish: Any) -> BranchText:
    return BranchText(tokenizer, SamplingParams(stop=stop, max_tokens=None, **wish))


def run(text: BranchText, ids: list[int]) -> tuple[str, str | None]:
    """All ids, one at a time, and the end."""
    whole = ""
    for count, token in enumerate(ids, 1):
        piece, stop = text.push((token,), count)
        whole += piece
        if stop is not None:
            assert text.num_tokens == count and text.finish() == ""
            return whole, stop
    return whole + text.finish(), None


def test_without_stop_strings_the_text_is_the_decoded_ids() -> None:
    for line in engine_tokenizers.LINES:
        assert run(branch(), TOKENIZER.encode(line)) == (line, None)


def test_a_stop_string_of_several_tokens_is_found_with_its_last() -> None:
    ids = TOKENIZER.encode("日本語😀stop")
    assert run(branch("😀"), ids) == ("日本語", "😀")
    assert run(branch("語😀s"), ids) == ("日本", "語😀s")
    assert run(branch("語😀s", include_stop_str_in_output=True), ids) == ("日本語😀s", "語😀s")


def test_what_was_held_back_is_flushed_at_the_end() -> None:
    ids = TOKENIZER.encode("abc\n") + TOKENIZER.encode("é")[:-1]
    whole, stop = run(branch("\n\n"), ids)
    assert stop is None and whole.startswith("abc\n")
    assert run(branch("c\nd"), TOKENIZER.encode("abc\n")) == ("abc\n", None)


def test_tokens_behind_the_stop_string_in_one_push_are_left_alone() -> None:
    ids = [TOKENIZER.encode(letter)[0] for letter in "abcdef"]
    text = branch("cd")
    assert text.push(ids, len(ids)) == ("ab", "cd")
    assert text.num_tokens == 4


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("a", "x")), (1, ("a", "x")), (2, ("axb", "x")), (4, ("axbxc", None)), (5, ("axbxc", None))],
)
def test_a_stop_string_within_min_tokens_does_not_count(
    min_tokens: int, expected: tuple[str, str | None]
) -> None:
    ids = [TOKENIZER.encode(letter)[0] for letter in "axbxc"]
    assert run(branch("x", min_tokens=min_tokens), ids) == expected
    together = branch("x", min_tokens=min_tokens)
    piece, stop = together.push(ids, len(ids))
    assert (piece + together.finish(), stop) == expected


def test_a_stop_string_that_does_not_count_is_not_held_back() -> None:
    (x,) = TOKENIZER.encode("x")
    assert branch("x", min_tokens=2).push((x,), 1) == ("x", None)


def test_a_stop_string_that_only_begins_within_min_tokens_counts_and_is_cut_whole() -> None:
    ids = [TOKENIZER.encode(letter)[0] for letter in "axyz"]
    assert run(branch("xy", min_tokens=2), ids) == ("a", "xy")


def test_a_stop_string_that_ended_within_min_tokens_is_not_found_later() -> None:
    ids = [TOKENIZER.encode(letter)[0] for letter in "abz"]
    assert run(branch(["b", "bc"], min_tokens=2), ids) == ("abz", None)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    nothing = Tokenizer(None, vocab_size=10)
    with pytest.raises(RequestError, match=r"^stop: .*stop_token_ids"):
        branch("x", nothing)
    assert branch(None, nothing).push([1, 2], 2) == ("", None)


def test_special_tokens_show_only_if_asked_for() -> None:
    ids = TOKENIZER.encode("a<|end|>b")
    assert run(branch(), ids) == ("ab", None)
    assert run(branch(skip_special_tokens=False), ids) == ("a<|end|>b", None)
    assert run(branch("<|end|>", skip_special_tokens=False), ids) == ("a", "<|end|>")


@pytest.mark.parametrize("min_tokens", [0, 3])
@pytest.mark.parametrize("stops", [["😀"], ["b", "bc", "abc"], ["ca", "語a"], ["aaaaaa"], ["<|end|>"]])
def test_what_looks_at_ends_alone_finds_what_a_stream_finds(stops: list[str], min_tokens: int) -> None:
    """At the same token, whatever characters and special tokens lie around."""
    params = SamplingParams(stop=stops, max_tokens=None, min_tokens=min_tokens)
    find = stop_finder(TOKENIZER, params)
    assert find is not None
    pieces = ["a", "b", "c", "aaa", "😀", "語", "<|end|>"]
    num_found = 0
    for seed in range(60):
        ids = TOKENIZER.encode("".join(random.Random(seed).choices(pieces, k=12)))
        text = BranchText(TOKENIZER, params)
        for count in range(1, len(ids) + 1):
            _, stop = text.push((ids[count - 1],), count)
            assert find(ids[:count]) == stop, (ids[:count], stop)
            if stop is not None:
                num_found += 1
                break
    assert num_found or stops == ["<|end|>"]


def test_without_stop_strings_there_is_nothing_to_find() -> None:
    assert stop_finder(TOKENIZER, SamplingParams()) is None
