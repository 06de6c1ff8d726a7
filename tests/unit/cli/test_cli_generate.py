"""``shoal generate``: where prompts come from, what is refused before loading, what is printed."""

from __future__ import annotations

import io
import json

import pytest

from shoal.engine.outputs import CompletionOutput, RequestOutput


class FakeLLM:
    """Answers prompt P with "<P>"; branch b of several with "<P>b"."""

    def __init__(self):
        self.calls = []
        self.closed = False
        self.finish_reason = "length"
        self.serves = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def generate(self, prompts, sampling_params, on_finish=None):
        self.calls.append(("generate", list(prompts), list(sampling_params)))
        texts = [prompt.get("prompt", "ids") for prompt in prompts]
        return self._answers(texts, sampling_params, on_finish)

    def chat(self, messages, sampling_params, on_finish=None):
        self.calls.append(("chat", list(messages), list(sampling_params)))
        return self._answers([one[-1]["content"] for one in messages], sampling_params, on_finish)

    def _answers(self, texts, sampling_params, on_finish):
        answers = []
        for index, (text, params) in enumerate(zip(texts, sampling_params, strict=True)):
            branches = [
                CompletionOutput(
                    b, f"<{text}>{b if params.n > 1 else ''}", [7, 8], finish_reason=self.finish_reason
                )
                for b in range(params.n)
            ]
            answers.append(RequestOutput(str(index), text, [1, 2, 3], branches, True))
            on_finish(index + 1)
        return [] if self.serves else answers


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr("shoal.cli.generate._open", lambda config: setattr(fake, "config", config) or fake)
    return fake


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines):
        path = tmp_path / "in.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return str(path)

    return write


def test_one_answer_is_printed_bare(run, llm):
    ended = run("generate", "demo", "-p", "hi")
    assert (ended.status, ended.out, ended.err) == (0, "<hi>\n", "")
    [(_, prompts, [params])] = llm.calls
    assert prompts == [{"prompt": "hi"}] and params.max_tokens == 128
    assert llm.config.model == "demo" and llm.closed


def test_several_answers_have_headers(run, llm):
    ended = run("generate", "demo", "-p", "a", "-p", "b", "--n", "2")
    assert ended.out.splitlines() == [
        "=== 1.1: 'a'", "<a>0", "=== 1.2: 'a'", "<a>1", "=== 2.1: 'b'", "<b>0", "=== 2.2: 'b'", "<b>1",
    ]  # fmt: skip
    assert len(llm.calls) == 1, "all prompts go in one batch"


def test_stdin_is_one_prompt(run, llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert run("generate", "demo").out == "<two\nlines>\n"


def test_jsonl_has_exactly_the_documented_keys(run, llm):
    ended = run("generate", "demo", "-p", "ü", "--format", "jsonl")
    assert ended.out == (
        '{"index": 0, "prompt": "ü", "text": "<ü>", "token_ids": [7, 8], "finish_reason": "length", '
        '"prompt_tokens": 3, "completion_tokens": 2}\n'
    )


def test_branches_are_rows_of_their_own(run, llm):
    rows = [
        json.loads(line)
        for line in run("generate", "demo", "-p", "a", "--n", "2", "--format", "jsonl").out.splitlines()
    ]
    assert [(row["index"], row["branch"], row["text"]) for row in rows] == [(0, 0, "<a>0"), (0, 1, "<a>1")]


def test_json_is_one_document(run, llm):
    [first, second] = json.loads(run("generate", "demo", "-p", "a", "-p", "b", "--json").out)
    assert (first["text"], second["index"]) == ("<a>", 1)


def test_a_file_of_all_kinds_keeps_its_order(run, llm, jsonl, tmp_path):
    path = jsonl(
        {"prompt": "a", "max_tokens": 5, "logit_bias": {"3": -1}},
        {"messages": [{"role": "user", "content": "hello"}]},
        "",
        {"prompt_token_ids": [4, 5], "temperature": 0},
    )
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    ended = run("generate", "demo", "--input", path, "--output", str(output), "--top-p", "0.5")
    assert (ended.status, ended.out) == (0, "")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["index"], row["text"]) for row in rows] == [(0, "<a>"), (1, "<hello>"), (2, "<ids>")]
    assert rows[1]["prompt"] == [{"role": "user", "content": "hello"}] and rows[2]["prompt"] == [4, 5]
    assert [path.name for path in tmp_path.iterdir() if path.name != "in.jsonl"] == ["out.jsonl"]
    (_, prompts, [first, third]), (_, _, [second]) = llm.calls
    assert prompts == [{"prompt": "a"}, {"prompt_token_ids": [4, 5]}]
    assert (first.max_tokens, first.logit_bias, third.temperature) == (5, {3: -1}, 0)
    assert {params.top_p for params in (first, second, third)} == {0.5} and second.max_tokens == 128


def test_chat_puts_text_into_a_users_message(run, llm):
    assert run("generate", "demo", "--chat", "-p", "hi").out == "<hi>\n"
    assert llm.calls[0][:2] == ("chat", [[{"role": "user", "content": "hi"}]])


def test_sampling_flags_reach_the_engine(run, llm):
    run(
        "generate", "demo", "-p", "a", "--temperature", "0.5", "--top-k", "3", "--min-p", "0.1",
        "--min-tokens", "2", "--repetition-penalty", "1.1", "--presence-penalty", "1",
        "--frequency-penalty", "-1", "--stop", "x",
        "--stop", "y z", "--stop-token-ids", "9", "--include-stop-str-in-output", "--ignore-eos",
        "--no-skip-special-tokens", "--seed", "3",
    )  # fmt: skip
    [(_, _, [params])] = llm.calls
    assert (params.temperature, params.top_k, params.min_p, params.min_tokens) == (0.5, 3, 0.1, 2)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 1, -1)
    assert (params.stop, params.stop_token_ids) == (("x", "y z"), (9,))
    assert params.include_stop_str_in_output and params.ignore_eos and not params.skip_special_tokens
    assert params.seed is None and llm.config.seed == 3


@pytest.mark.parametrize(("flag", "value"), [("on", True), ("off", False), ("never", "never")])
def test_a_search_can_be_asked_for(run, llm, flag, value):
    run(
        "generate", "demo", "-p", "a", "--num-beams", "4", "--n", "2", "--length-penalty", "0.5",
        "--early-stopping", flag, "--forced-bos-token-id", "7",
    )  # fmt: skip
    [(_, _, [params])] = llm.calls
    assert (params.num_beams, params.n, params.length_penalty, params.early_stopping) == (4, 2, 0.5, value)
    assert params.forced_bos_token_id == 7


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: must be a JSON object"),
        ({}, "line 2: must have exactly one of"),
        ({"prompt": "a", "messages": []}, "line 2: must have exactly one of"),
        ({"prompt": ""}, "line 2: prompt"),
        ({"prompt": 5}, "line 2: prompt"),
        ('{"prompt": "\\ud800"}', "line 2: prompt"),
        ({"prompt_token_ids": []}, "line 2: prompt_token_ids"),
        ({"prompt_token_ids": [1, "2"]}, "line 2: prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "line 2: prompt_token_ids"),
        ({"messages": [{"role": "user"}]}, "line 2: messages"),
        ({"prompt": "a", "temprature": 1}, "line 2: temprature: no such field"),
        ({"prompt": "a", "temperature": -1}, "line 2: temperature"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "line 2: logit_bias"),
        ({"prompt": "a", "stop_token_ids": 5}, "line 2: stop_token_ids: must be a list"),
        ({"prompt": "a", "logprobs": 1}, "line 2: logprobs: no such field"),
    ],
)
def test_a_wrong_line_is_named_before_anything_loads(run, monkeypatch, jsonl, line, told):
    monkeypatch.setattr("shoal.cli.generate._open", lambda _: pytest.fail("loaded"))
    ended = run("generate", "demo", "--input", jsonl({"prompt": "fine"}, line))
    assert ended.status == 2 and told in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["-p", ""],
        ["-p", "\udcff"],
        ["-p", "a", "--temperature", "-1"],
        ["-p", "a", "--n", "0"],
        ["--input", "/nowhere/in.jsonl"],
        ["--input", "/"],
        ["-p", "a", "--output", "/nowhere/out.jsonl"],
        ["-p", "a", "--output", "/"],
        ["-p", "a", "--output", "out.jsonl", "--format", "text"],
        ["-p", "a", "--output", "out.jsonl", "--json"],
        ["-p", "a", "--json", "--format", "jsonl"],
        [],
    ],
)
def test_wrong_usage_is_found_before_anything_loads(run, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.cli.generate._open", lambda _: pytest.fail("loaded"))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    ended = run("generate", "demo", *arguments)
    assert ended.status == 2 and ended.err.startswith("error: ") and not ended.out


def test_an_empty_file_is_refused(run, jsonl):
    ended = run("generate", "demo", "--input", jsonl("", " "))
    assert ended.status == 2 and "no prompt" in ended.err


def test_failed_answers_are_written_and_told(run, llm):
    llm.finish_reason = "error"
    ended = run("generate", "demo", "-p", "a", "--format", "jsonl")
    assert ended.status == 1 and json.loads(ended.out)["finish_reason"] == "error"
    assert ended.err == "error: 1 of 1 answers failed; their finish_reason says so\n"


def test_a_rank_that_only_serves_prints_nothing(run, llm):
    llm.serves = True
    ended = run("generate", "demo", "-p", "a", "--json")
    assert (ended.status, ended.out) == (0, "")
