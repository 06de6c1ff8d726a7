"""What starting an encoder takes beside what every engine takes: how long a text may be, how its vector is
made, how steps are cut. Knows no request.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from shoal.config import EngineConfig
from shoal.engine.encode_core import EncodeCore
from shoal.engine.encode_tasks import EncoderTasks
from shoal.engine.pooling_settings import PoolingSettings, read_pooling_settings
from shoal.engine.protocol import EngineInfo
from shoal.engine.supervisor import RestartPolicy
from shoal.engine.text import Tokenizer
from shoal.errors import ConfigError
from shoal.model.pooling import longest_text, makes_text, tasks_of
from shoal.worker.executor import Executor

__all__ = ["encode_core", "encoder_tasks"]

_UNKNOWN_LENGTH = 2048  # where nothing says how long a text may be


def encoder_tasks(
    config: EngineConfig,
    path: Path,
    hf_config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    tokenizer: Tokenizer,
) -> EncoderTasks:
    """What the model can be asked for.

    Raises:
        ConfigError: ``max_model_len`` is more than it takes.
        UnsupportedError: its folder asks for something that is not built.
    """
    settings = read_pooling_settings(path, "last" if makes_text(hf_config) else "mean")
    length = _text_length(config, hf_config, model_class, tokenizer, settings)
    return EncoderTasks(tokenizer, length, tasks_of(model_class), settings, hf_config)


def encode_core(
    config: EngineConfig,
    executor: Executor,
    tokenizer: Tokenizer,
    info: EngineInfo,
    restarts: RestartPolicy,
    tasks: EncoderTasks,
) -> EncodeCore:
    """The engine of an encoder whose ranks are ready."""
    return EncodeCore(
        executor,
        tokenizer,
        info,
        restarts,
        tasks=tasks,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_queued_requests=config.max_num_queued_requests,
        max_num_queued_tokens=config.max_num_queued_tokens,
        steps_in_flight=2 if executor.computes_apart else 1,
    )


def _text_length(
    config: EngineConfig,
    hf_config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    tokenizer: Tokenizer,
    settings: PoolingSettings,
) -> int:
    """Tokens of one text: what the model has positions for, and no more than its folder says."""
    possible = longest_text(model_class, hf_config)
    asked = config.max_model_len
    if asked is not None:
        if possible is not None and asked > possible:
            raise ConfigError(
                f"max_model_len: {asked} is more than the model was made for ({possible})",
                field="max_model_len",
            )
        return asked
    limits = (possible, tokenizer.model_max_length, settings.max_length)
    return min((limit for limit in limits if limit is not None), default=_UNKNOWN_LENGTH)
