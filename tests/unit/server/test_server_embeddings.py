"""``/v1/embeddings``, ``/classify``, ``/score``, ``/rerank`` over a tiny encoder."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers as T

from shoal.engine.front import AsyncLLM
from shoal.server.app import create_app
from shoal.server.settings import ServerSettings
from support import encoders

Post = Callable[[str, dict[str, Any]], httpx.Response]


def posting(front: AsyncLLM) -> Post:
    app = create_app(front, ServerSettings(model="tiny"))

    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(path, json=body)

        return asyncio.run(asked())

    return post


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.save(tmp_path_factory.mktemp("server") / "bert")


@pytest.fixture(scope="module")
def post(folder: Path) -> Iterator[Post]:
    front = AsyncLLM(str(folder), num_threads=1)
    yield posting(front)
    asyncio.run(front.shutdown())


@pytest.fixture(scope="module")
def post_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Post]:
    config = T.BertConfig(**encoders.SHAPE, num_labels=1)
    folder = tmp_path_factory.mktemp("server") / "pairs"
    front = AsyncLLM(str(encoders.save(folder, T.BertForSequenceClassification, config)), num_threads=1)
    yield posting(front)
    asyncio.run(front.shutdown())


def test_vectors_come_in_the_order_of_their_texts(post: Post, folder: Path) -> None:
    answer = post("/v1/embeddings", {"model": "tiny", "input": encoders.TEXTS, "user": "me"})
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "list" and body["model"] == "tiny"
    assert [one["index"] for one in body["data"]] == list(range(len(encoders.TEXTS)))
    got = torch.tensor([one["embedding"] for one in body["data"]])
    torch.testing.assert_close(got, encoders.reference_vectors(folder, encoders.TEXTS), atol=1e-5, rtol=0)
    tokens = sum(len(text.split()) + 2 for text in encoders.TEXTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_base64_holds_the_same_numbers(post: Post) -> None:
    plain = post("/v1/embeddings", {"input": "aa bc", "dimensions": 8}).json()["data"][0]["embedding"]
    coded = post("/v1/embeddings", {"input": "aa bc", "dimensions": 8, "encoding_format": "base64"})
    data = bytearray(base64.b64decode(coded.json()["data"][0]["embedding"]))
    torch.testing.assert_close(torch.frombuffer(data, dtype=torch.float32), torch.tensor(plain))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "aa", "dimensions": 1000}, "dimensions"),
        ("/v1/embeddings", {"input": "aa", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "ab " * 70}, "prompt"),
        ("/v1/embeddings", {"input": ["aa", 5]}, "input"),
        ("/classify", {"input": "aa"}, "model"),
        ("/score", {"text_1": ["aa", "ab"], "text_2": ["aa"]}, "text_1"),
        ("/score", {"text_1": "aa", "text_2": []}, "text_2"),
        ("/rerank", {"query": "aa", "documents": ["ab", ""]}, "prompt"),
        ("/v1/completions", {"prompt": "aa"}, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    post: Post, path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_what_is_too_long_is_cut_where_that_is_asked_for(post: Post) -> None:
    answer = post("/v1/embeddings", {"input": "ab " * 70, "truncate_prompt_tokens": 7})
    assert answer.json()["usage"]["prompt_tokens"] == 7


def test_documents_are_ranked_by_a_cross_encoders_scores(post_pairs: Post) -> None:
    query, documents = encoders.TEXTS[0], encoders.TEXTS[1:]
    scores = post_pairs("/score", {"text_1": query, "text_2": documents}).json()["data"]
    by_score = sorted(range(len(documents)), key=lambda index: -scores[index]["score"])
    ranked = post_pairs("/v1/rerank", {"query": query, "documents": documents, "top_n": 3}).json()["results"]
    assert [one["index"] for one in ranked] == by_score[:3]
    assert ranked[0]["relevance_score"] == pytest.approx(scores[by_score[0]]["score"], abs=1e-6)
    assert ranked[0]["document"] == {"text": documents[by_score[0]]}


def test_a_classifiers_classes_are_told(post_pairs: Post) -> None:
    [one] = post_pairs("/classify", {"input": "aa ab"}).json()["data"]
    assert one["num_classes"] == 1 and 0 < one["probs"][0] < 1 and one["label"] == "LABEL_0"


def test_texts_of_many_clients_share_steps_and_one_may_bring_more_than_wait(folder: Path) -> None:
    num_texts = 5 * len(encoders.TEXTS)

    async def run() -> tuple[int, list[Any]]:
        front = AsyncLLM(str(folder), num_threads=1, max_num_queued_requests=num_texts)
        before = front.stats().steps_total
        found = await asyncio.gather(
            *(front.encode(lambda tasks, text=text: tasks.embed(text)) for text in encoders.TEXTS * 5)
        )
        steps = front.stats().steps_total - before
        many = await front.encode(lambda tasks: tasks.embed(encoders.TEXTS * 6))
        assert len(many) > num_texts
        await front.shutdown()
        return steps, found

    steps, found = asyncio.run(run())
    assert steps < num_texts
    got = torch.tensor([one[0].outputs.embedding for one in found[: len(encoders.TEXTS)]])
    torch.testing.assert_close(got, encoders.reference_vectors(folder, encoders.TEXTS), atol=1e-5, rtol=0)
