"""Where options come from: command line, then environment, then config file, then defaults."""

from __future__ import annotations

import pytest

from shoal.cli.options import QUEUE
from shoal.config import EngineConfig


@pytest.fixture
def configured(run, monkeypatch):
    """``configured("--flag", ...)``: the config and options ``shoal serve`` would have run with."""
    seen = []
    monkeypatch.setattr(
        "shoal.cli.serve.run_server", lambda config, options, _: seen.append((config, options))
    )

    def serve(*arguments):
        ended = run("serve", *arguments)
        assert ended.status == 0, ended.err
        return seen[-1]

    return serve


@pytest.fixture
def yaml_file(tmp_path):
    def write(content: str) -> str:
        path = tmp_path / "shoal.yaml"
        path.write_text(content)
        return str(path)

    return write


def test_without_options_the_defaults_are_engine_configs_and_the_queue_is_bounded(configured):
    assert configured("demo") == (EngineConfig(model="demo", **QUEUE), {})


def test_without_a_model_demo_is_served_and_said(run, monkeypatch):
    models = []
    monkeypatch.setattr("shoal.cli.serve.run_server", lambda config, *_: models.append(config.model))
    assert "serving demo" in run("serve").err
    assert models == ["demo"]


def test_every_flag_reaches_the_config(configured):
    config, options = configured(
        "demo", "-tp", "2", "--executor", "processes", "--device", "cpu", "--dtype", "bfloat16",
        "--attn-implementation", "sdpa", "--num-threads", "3", "--max-model-len", "64", "--max-num-seqs", "4",
        "--no-async-scheduling", "--cpu-pinning", "off", "--comm", "gloo",
        "--cpu-kernels", "off", "--quantization", "int8", "--compile", "--way", "paged",
        "--max-num-batched-tokens", "32", "--memory-utilization", "0.5", "--kv-cache-memory-bytes", "1000",
        "--num-gpu-blocks-override", "9", "--block-size", "8", "--no-enable-prefix-caching", "--seed", "5",
        "--trust-remote-code", "--revision", "main", "--max-num-queued-requests", "6",
        "--max-num-queued-tokens", "60", "--max-connections", "50", "--max-body-bytes", "500",
        "--step-timeout", "7",
        "--served-model-name", "a", "--served-model-name", "b", "--port", "1234",
    )  # fmt: skip
    assert config == EngineConfig(
        model="demo", tensor_parallel_size=2, executor="processes", device="cpu", dtype="bfloat16",
        attn_implementation="sdpa", comm="gloo", cpu_kernels="off", quantization="int8", compile=True,
        way="paged",
        num_threads=3, async_scheduling=False, cpu_pinning="off", max_model_len=64, max_num_seqs=4,
        max_num_batched_tokens=32, gpu_memory_utilization=0.5, kv_cache_memory_bytes=1000,
        num_gpu_blocks_override=9, block_size=8,
        enable_prefix_caching=False, seed=5, trust_remote_code=True, revision="main",
        max_num_queued_requests=6, max_num_queued_tokens=60, step_timeout=7,
    )  # fmt: skip
    assert (options["served_model_name"], options["port"]) == (["a", "b"], 1234)
    assert (options["max_connections"], options["max_body_bytes"]) == (50, 500)


def test_command_line_wins_over_environment_over_file_over_default(configured, yaml_file, monkeypatch):
    path = yaml_file("block_size: 2\nmax_num_seqs: 3\nseed: 4\n")
    monkeypatch.setenv("SHOAL_BLOCK_SIZE", "20")
    monkeypatch.setenv("SHOAL_MAX_NUM_SEQS", "30")
    config, _ = configured("demo", "--config", path, "--block-size", "200")
    assert (config.block_size, config.max_num_seqs, config.seed) == (200, 30, 4)
    assert config.max_num_batched_tokens == EngineConfig(model="demo").max_num_batched_tokens


def test_the_environment_alone_configures(configured, yaml_file, monkeypatch):
    monkeypatch.setenv("SHOAL_CONFIG", yaml_file("seed: 4"))
    monkeypatch.setenv("SHOAL_MODEL", "org/model")
    monkeypatch.setenv("SHOAL_MEMORY_UTILIZATION", "0.25")
    monkeypatch.setenv("SHOAL_ENABLE_PREFIX_CACHING", "false")
    config, _ = configured()
    assert (config.model, config.seed, config.gpu_memory_utilization) == ("org/model", 4, 0.25)
    assert config.enable_prefix_caching is False


def test_a_config_file_may_hold_every_kind_of_value(configured, yaml_file):
    path = yaml_file(
        "model: org/model\nmax-model-len: 64\nmemory_utilization: 0.5\nenable_prefix_caching: false\n"
        "trust_remote_code: true\nserved_model_name: [a, b]\nrevision: null\ndtype: float16\n"
    )
    config, options = configured("--config", path)
    assert config == EngineConfig(
        model="org/model", max_model_len=64, gpu_memory_utilization=0.5, enable_prefix_caching=False,
        trust_remote_code=True, dtype="float16", **QUEUE,
    )  # fmt: skip
    assert options["served_model_name"] == ["a", "b"]


def test_one_value_is_enough_where_several_may_be(configured, yaml_file):
    assert configured("--config", yaml_file("served_model_name: abc"))[1]["served_model_name"] == ["abc"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("max_modle_len: 5", "max_modle_len: not an option of serve"),
        ("max_tokens: 5", "max_tokens: not an option of serve"),
        ("config: other.yaml", "config: not an option of serve"),
        ("seed: 1\nSEED: 2", "SEED: not an option"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "given twice"),
        ("max_model_len: 1.5", "--max-model-len"),
        ("max_num_seqs: true", "--max-num-seqs"),
        ("seed: {a: 1}", "seed"),
        ("seed: [1, 2]", "seed"),
        ("block_size: 0", "block_size"),
        ("- a\n- b", "must be a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_config_file_is_refused_naming_the_key(run, yaml_file, content, told):
    ended = run("serve", "demo", "--config", yaml_file(content))
    assert ended.status == 2 and told in ended.err


def test_a_missing_config_file_is_refused(run, tmp_path):
    ended = run("serve", "demo", "--config", str(tmp_path / "none.yaml"))
    assert ended.status == 2 and "none.yaml: No such file" in ended.err
