"""``shoal generate --task ...``: where texts come from, what is refused before loading, what is printed."""

from __future__ import annotations

import io
import json

import pytest

from shoal.engine.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FillMaskCandidate,
    FillMaskRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)


class FakeEncoder:
    """A text's vector is its length; its class is its first letter."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def embed(self, prompts, **options):
        self.calls.append(options)
        return [EmbeddingRequestOutput("", [1, 2], EmbeddingOutput([float(len(p)), 0.5])) for p in prompts]

    def classify(self, prompts, **options):
        return [
            ClassificationRequestOutput("", [1], ClassificationOutput([0.25, 0.75], p[0])) for p in prompts
        ]

    def fill_mask(self, prompts, **options):
        self.calls.append(options)
        return [FillMaskRequestOutput("", [1], [[FillMaskCandidate(0.5, 3, "word")]]) for _ in prompts]

    def score(self, first, second, **options):
        return [
            ScoringRequestOutput("", [1], ScoringOutput(float(len(a) - len(b))))
            for a, b in zip(first, second, strict=True)
        ]


@pytest.fixture
def encoder(monkeypatch):
    fake = FakeEncoder()
    monkeypatch.setattr("shoal.cli.generate._open", lambda config: setattr(fake, "config", config) or fake)
    return fake


def rows(ended):
    assert ended.status == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def test_vectors_come_as_lines_of_json_and_the_engine_is_an_encoders(run, encoder):
    ended = run("generate", "m", "--task", "embed", "-p", "abc", "-p", "d", "--pooling", "cls",
                "--truncate-prompt-tokens", "-1")  # fmt: skip
    assert rows(ended) == [
        {"index": 0, "prompt": "abc", "embedding": [3.0, 0.5], "prompt_tokens": 2},
        {"index": 1, "prompt": "d", "embedding": [1.0, 0.5], "prompt_tokens": 2},
    ]
    assert encoder.config.runner == "pooling"
    assert encoder.calls == [{"pooling": "cls", "truncate_prompt_tokens": -1}]


def test_lines_of_stdin_are_texts(run, encoder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\nabc\n"))
    assert [row["prompt"] for row in rows(run("generate", "m", "--task", "embed"))] == ["ab", "abc"]


def test_a_file_goes_in_and_a_file_comes_out(run, encoder, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "ab"}\n{"prompt_token_ids": [1, 2, 3]}\n')
    ended = run("generate", "m", "--task", "embed", "--input", str(source), "--output", str(target))
    assert ended.status == 0 and ended.out == ""
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert found[0]["prompt"] == "ab" and found[1]["prompt_token_ids"] == [1, 2, 3]
    assert [row["embedding"][0] for row in found] == [2.0, 3.0]


def test_pairs_are_scored_from_a_file_and_from_the_command_line(run, encoder, tmp_path):
    source = tmp_path / "pairs.jsonl"
    source.write_text('{"text_1": "abcd", "text_2": "a"}\n')
    found = rows(run("generate", "m", "--task", "score", "--input", str(source)))
    assert found == [{"index": 0, "text_1": "abcd", "text_2": "a", "score": 3.0, "prompt_tokens": 1}]
    found = rows(run("generate", "m", "--task", "score", "-p", "abc", "-p", "a", "-p", "ab"))
    assert [row["score"] for row in found] == [2.0, 1.0]


def test_classes_and_words_are_shown_to_people(run, encoder):
    assert run("generate", "m", "--task", "classify", "-p", "yes", "--format", "text").out == "y 0.7500\n"
    ended = run("generate", "m", "--task", "fill-mask", "-p", "a [MASK]", "--top-k", "3", "--format", "text")
    assert ended.out == "word 0.500\n"
    assert encoder.calls == [{"truncate_prompt_tokens": None, "top_k": 3}]


@pytest.mark.parametrize(
    ("task", "line", "said"),
    [
        ("embed", '{"text": "ab"}', "line 1: must have prompt or prompt_token_ids"),
        ("embed", '["ab"]', "must be a JSON object"),
        ("score", '{"text_1": "ab"}', "must have text_1 and text_2"),
        ("embed", '{"prompt": "ab", "temperature": 1}', "nothing else"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(run, encoder, tmp_path, task, line, said):
    source = tmp_path / "in.jsonl"
    source.write_text(line)
    ended = run("generate", "m", "--task", task, "--input", str(source))
    assert ended.status == 2 and said in ended.err
    assert not hasattr(encoder, "config")


def test_nothing_to_encode_and_half_a_pair_are_refused(run, encoder, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert "no text" in run("generate", "m", "--task", "embed").err
    assert "two texts" in run("generate", "m", "--task", "score", "-p", "ab").err
