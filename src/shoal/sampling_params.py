"""What a user may ask of sampling, validated. Knows no model, tokenizer or tensor.

Names and meanings are vLLM's. A field left at ``None`` is *unset*: it takes the model's
``generation_config.json`` value if there is one, else the neutral value in its comment
(:meth:`SamplingParams.with_defaults`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from shoal.errors import RequestError

__all__ = ["BeamSearchParams", "SamplingParams"]

_MOST_BRANCHES = 16384  # vLLM's bound
_MOST_BEAMS = 256
_MOST_NGRAM = 1024
_MOST_LOGPROBS = 20
_MOST = 2**31 - 1  # token counts and ids travel as 32-bit integers
# Within these, scores stay finite whatever they are: logits are float32, and lengths below 2**31.
_LEAST_REPETITION, _MOST_REPETITION = 1e-3, 1e3
_MOST_LENGTH_PENALTY = 30.0

_NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "early_stopping": False,
}


def _require(ok: bool, field: str, message: str) -> None:
    if not ok:
        raise RequestError(f"{field}: {message}", field=field)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Raises:
        RequestError: a value out of its range; ``field`` names it.
    """

    n: int = 1  # branches that share the prompt
    temperature: float | None = None  # unset: 1.0; 0 is greedy
    top_p: float | None = None  # unset: 1.0; in (0, 1]
    top_k: int | None = None  # unset: 0; 0 or -1 means all
    min_p: float | None = None  # unset: 0.0; share of the most likely token's probability
    repetition_penalty: float | None = None  # unset: 1.0; in [1e-3, 1e3]; prompt and output
    no_repeat_ngram_size: int | None = None  # unset: 0; no run of so many tokens twice, prompt and output
    presence_penalty: float = 0.0  # in [-2, 2]; output only
    frequency_penalty: float = 0.0  # in [-2, 2]; output only, times the count
    seed: int | None = None  # unset: drawn once at admission
    stop: str | Sequence[str] | None = None  # stop strings, cut from the text
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as max_model_len allows
    min_tokens: int = 0  # no end-of-sequence or stop token before this many
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: and the k most likely
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    forced_bos_token_id: int | None = None  # of encoder-decoders: the first token; unset: the model's
    num_beams: int = 1  # above 1: beam search as in transformers, greedy; n of them are returned
    length_penalty: float | None = None  # of beams, unset: 1.0; exponent of the length that divides a score
    early_stopping: bool | str | None = None  # of beams, unset: False; True, False or "never"

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        ids = self.stop_token_ids or ()
        _require(isinstance(stop, (list, tuple, set)), "stop", f"must be a string or a list, got {stop!r}")
        _require(isinstance(ids, (list, tuple, set)), "stop_token_ids", f"must be a list, got {ids!r}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        bias = self.logit_bias
        _require(bias is None or isinstance(bias, Mapping), "logit_bias", f"must be a mapping, got {bias!r}")
        if bias is not None:
            object.__setattr__(self, "logit_bias", dict(bias))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, f"must be true or false, got {value!r}")
        self._check_shape()
        self._check_beams()
        self._check_lengths_and_ids()

    def _check_shape(self) -> None:
        n_is_right = _integer(self.n) and 1 <= self.n <= _MOST_BRANCHES
        _require(n_is_right, "n", f"must be an integer from 1 to {_MOST_BRANCHES}, got {self.n!r}")
        t = self.temperature
        _require(
            t is None or (_number(t) and t >= 0),
            "temperature",
            f"must be a number of at least 0 (0 is greedy), got {t!r}",
        )
        p = self.top_p
        _require(p is None or (_number(p) and 0 < p <= 1), "top_p", f"must lie in (0, 1], got {p!r}")
        k = self.top_k
        _require(
            k is None or (_integer(k) and -1 <= k <= _MOST),
            "top_k",
            f"must be an integer from -1 to {_MOST} (0 or -1 means all), got {k!r}",
        )
        m = self.min_p
        _require(m is None or (_number(m) and 0 <= m <= 1), "min_p", f"must lie in [0, 1], got {m!r}")
        r = self.repetition_penalty
        _require(
            r is None or (_number(r) and _LEAST_REPETITION <= r <= _MOST_REPETITION),
            "repetition_penalty",
            f"must lie in [{_LEAST_REPETITION:g}, {_MOST_REPETITION:g}], got {r!r}",
        )
        size = self.no_repeat_ngram_size
        _require(
            size is None or (_integer(size) and 0 <= size <= _MOST_NGRAM),
            "no_repeat_ngram_size",
            f"must be an integer from 0 to {_MOST_NGRAM} (0 is off), got {size!r}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            v = getattr(self, name)
            _require(_number(v) and -2 <= v <= 2, name, f"must lie in [-2, 2], got {v!r}")

    def _check_beams(self) -> None:
        is_right = _integer(self.num_beams) and 1 <= self.num_beams <= _MOST_BEAMS
        _require(is_right, "num_beams", f"must be an integer from 1 to {_MOST_BEAMS}, got {self.num_beams!r}")
        penalty, stopping = self.length_penalty, self.early_stopping
        _require(
            penalty is None or (_number(penalty) and abs(penalty) <= _MOST_LENGTH_PENALTY),
            "length_penalty",
            f"must lie in [-{_MOST_LENGTH_PENALTY:g}, {_MOST_LENGTH_PENALTY:g}], got {penalty!r}",
        )
        _require(
            stopping is None or isinstance(stopping, bool) or stopping == "never",
            "early_stopping",
            f'must be true, false or "never", got {stopping!r}',
        )
        if self.num_beams == 1:
            return
        _require(self.n <= self.num_beams, "n", f"must not exceed num_beams ({self.num_beams}), got {self.n}")
        _require(not self.temperature, "temperature", "must be 0 or unset: beams are not drawn")

    def _check_lengths_and_ids(self) -> None:
        _require(
            self.seed is None or (_integer(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed",
            f"must be a 64-bit integer, got {self.seed!r}",
        )
        _require(
            self.max_tokens is None or (_integer(self.max_tokens) and 1 <= self.max_tokens <= _MOST),
            "max_tokens",
            f"must be an integer from 1 to {_MOST}, got {self.max_tokens!r}",
        )
        _require(
            _integer(self.min_tokens) and 0 <= self.min_tokens <= _MOST,
            "min_tokens",
            f"must be an integer from 0 to {_MOST}, got {self.min_tokens!r}",
        )
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens!r}",
        )
        _require(
            self.logprobs is None or (_integer(self.logprobs) and 0 <= self.logprobs <= _MOST_LOGPROBS),
            "logprobs",
            f"must be an integer from 0 to {_MOST_LOGPROBS}, got {self.logprobs!r}",
        )
        assert self.stop is not None and self.stop_token_ids is not None
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", "must be non-empty strings")
        _require(
            all(_integer(i) and i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            "must be token ids of at least 0",
        )
        forced = self.forced_bos_token_id
        _require(
            forced is None or (_integer(forced) and 0 <= forced <= _MOST),
            "forced_bos_token_id",
            f"must be a token id, got {forced!r}",
        )
        for token, bias in (self.logit_bias or {}).items():
            _require(
                _integer(token) and token >= 0 and _number(bias) and -100 <= bias <= 100,
                "logit_bias",
                f"must map token ids to numbers in [-100, 100], got {token!r}: {bias!r}",
            )

    def with_defaults(self, model_defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill the unset fields.

        Args:
            model_defaults: values of the model's generation config by field name; an explicit
                ``do_sample: false`` there, or beams here, make an unset temperature 0.

        Returns:
            the same request with every field set that may be unset, but for the seed and the forced token.
        """
        defaults = dict(_NEUTRAL)
        defaults.update({k: v for k, v in model_defaults.items() if k in _NEUTRAL and v is not None})
        if model_defaults.get("do_sample") is False or self.num_beams > 1:
            defaults["temperature"] = 0.0
        changes = {k: v for k, v in defaults.items() if getattr(self, k) is None}
        return replace(self, **changes)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The public field names, in order."""
        return tuple(f.name for f in fields(cls))


@dataclass(frozen=True)
class BeamSearchParams:
    """How :meth:`shoal.LLM.beam_search` searches. Names are vLLM's, and so is that the search goes on to
    ``max_tokens`` where a better sequence may yet be found.

    Raises:
        RequestError: a value out of its range, when the search begins; ``field`` names it.
    """

    beam_width: int  # beams, and sequences returned
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # beams are not drawn: nothing else is served
    length_penalty: float = 1.0  # the exponent of the length that a log-probability is divided by
    include_stop_str_in_output: bool = False  # accepted: tokens and text hold what ended a sequence anyway

    def sampling_params(self) -> SamplingParams:
        """The same search as :meth:`shoal.LLM.generate` takes it."""
        is_right = _integer(self.beam_width) and 1 <= self.beam_width <= _MOST_BEAMS
        _require(is_right, "beam_width", f"must be from 1 to {_MOST_BEAMS}, got {self.beam_width!r}")
        return SamplingParams(
            n=self.beam_width,
            num_beams=self.beam_width,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping="never",
            logprobs=min(2 * self.beam_width, _MOST_LOGPROBS),
        )
