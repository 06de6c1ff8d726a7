"""``LLM``: the engine for a script. Steps the core on the caller's own thread; knows no asyncio."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from shoal.config import EngineConfig, make_config
from shoal.engine.core import EngineCore
from shoal.engine.encode_core import EncodeCore
from shoal.engine.encode_run import run_job
from shoal.engine.encode_tasks import Classified, EncoderTasks, Job, Output
from shoal.engine.launch import launch
from shoal.engine.outputs import BeamSearchOutput, RequestOutput
from shoal.engine.pooling_outputs import (
    EmbeddingRequestOutput,
    FillMaskRequestOutput,
    ScoringRequestOutput,
)
from shoal.engine.progress import UseTqdm, progress
from shoal.engine.prompts import listed_prompts
from shoal.engine.protocol import EngineInfo, EngineStats, Prompt
from shoal.engine.results import Collector, beam_search_output
from shoal.engine.steps import Core, D
from shoal.errors import EngineDeadError, EngineError, RequestError, UnsupportedError
from shoal.sampling_params import BeamSearchParams, SamplingParams
from shoal.worker.torchrun import serve_rank, torchrun_place

__all__ = ["LLM"]

_LOOK_S = 0.2  # how often a call that waits for its ranks looks whether the engine is shut down

Messages = Sequence[Mapping[str, Any]]
OnFinish = Callable[[int], None]
"""Called with the number of requests finished so far."""


class LLM:
    """One model over ``tensor_parallel_size`` ranks; use it as a context manager or call :meth:`shutdown`.

    Takes the fields of :class:`shoal.config.EngineConfig` as keywords.

    Under ``torchrun`` the ranks that exist are used. Rank 0 drives; on the others, :meth:`generate` (or
    the end of the ``with`` block) serves until rank 0 shuts down, and gives back nothing.

    Raises:
        UsageError: the model or an option is wrong.
        RankError: a rank failed while loading.
    """

    def __init__(
        self,
        model: str = "",
        *,
        config: EngineConfig | None = None,
        show_progress: bool = False,
        **options: Any,
    ) -> None:
        config = config or make_config(model=model, **options)
        self._lock = threading.RLock()  # held while requests run; on_finish is called with it held
        self._is_running = False
        self._is_stopping = False
        self._why_dead = "the engine was shut down"
        self._next_id = 0
        self._core: EngineCore | EncodeCore | None = None
        place = torchrun_place()
        self._serves = place is not None and place[0] > 0 and config.tensor_parallel_size > 1
        self._has_served = False
        if self._serves:
            atexit.register(self.shutdown)  # rank 0 counts on us, whatever the script does
        else:
            core = self._core = launch(config, show_progress)
            # Ranks must not outlive a script that forgets to shut down.
            self._stop_ranks = weakref.finalize(self, core.shutdown)

    @property
    def info(self) -> EngineInfo:
        """Fixed facts of the running engine."""
        return self._running().info

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        return self._running().stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: OnFinish | None = None,
        *,
        use_tqdm: UseTqdm = False,
    ) -> list[RequestOutput]:
        """Serve prompts together.

        Args:
            prompts: one prompt or several; a prompt is text, ``{"prompt": text}``,
                ``{"prompt_token_ids": [...]}`` or a list of token ids.
            sampling_params: for all of them, or one each.
            on_finish: called after each request that ends.
            use_tqdm: show a progress bar, or the one that is passed.

        Returns:
            one output a prompt, in their order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; none is.
            QueueFullError: more prompts than ``max_num_queued_requests`` lets wait; none is served.
            EngineDeadError: the ranks failed too often.
        """
        if self._serve_instead():
            return []
        many = listed_prompts(prompts)
        params = _each(sampling_params, len(many))
        core = self._generator()
        resolved = []
        for index, prompt in enumerate(many):
            with _naming(index, len(many)):
                resolved.append(core.tokenizer.resolve_prompt(prompt))
        with self._lock:
            if self._is_running:
                raise EngineError("generate was called from an on_finish of its own; call it afterwards")
            self._is_running = True
            try:
                with progress(use_tqdm, len(many), "Processed prompts", on_finish) as told:
                    return self._run(self._generator(), resolved, params, told)
            finally:
                self._is_running = False

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: OnFinish | None = None,
        *,
        use_tqdm: UseTqdm = False,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """As :meth:`generate`, for one conversation or several, through the model's chat template."""
        if self._serve_instead():
            return []
        if not messages:
            raise RequestError("messages: must not be empty", field="messages")
        many = [messages] if isinstance(messages[0], Mapping) else messages
        core = self._generator()
        prompts = [{"prompt_token_ids": core.tokenizer.render_chat(m, **template_kwargs)} for m in many]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, on_finish, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: UseTqdm = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations, searched for as transformers does; vLLM's name and form for what
        :meth:`generate` does with ``num_beams``.

        Errors as for :meth:`generate`.
        """
        if self._serve_instead():
            return []
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)
        core = self._generator()
        has_encoder = core.info.way == "seq2seq"
        return [beam_search_output(output, core.tokenizer, has_encoder) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each text. Of a model that generates text, load it with ``runner="pooling"``.

        Args:
            prompts: as :meth:`generate` takes them.
            pooling: ``mean``, ``cls`` (the first token's) or ``last``; None: as the folder's
                sentence-transformers files say, else ``mean`` for an encoder and ``last`` for a decoder.
            normalize: whether vectors have length 1; None: as the files say, else they have.
            dimensions: only so many of each vector's numbers, for models trained for that.
            truncate_prompt_tokens: what is longer is cut; -1: to what the model takes; None: it is refused.
            use_tqdm: show a progress bar, or the one that is passed.

        Raises:
            RequestError: a text or an option cannot be served; none is.
            UnsupportedError: the model was loaded to generate text.
        """
        return self._encode(
            lambda tasks: tasks.embed(prompts, pooling, normalize, dimensions, truncate_prompt_tokens),
            use_tqdm,
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[Classified]:
        """The probabilities of a classifier's classes, for each text or for each token of it.

        Args and errors as for :meth:`embed`.
        """
        return self._encode(lambda tasks: tasks.classify(prompts, truncate_prompt_tokens), use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: a cross-encoder's score of the pair, or the cosine of their vectors.

        Args:
            text_1: one text, which goes with each of the others, or as many as there are of these.
            text_2: one or several.

        Errors as for :meth:`embed`.
        """
        return self._encode(lambda tasks: tasks.score(text_1, text_2, truncate_prompt_tokens), use_tqdm)

    def fill_mask(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        top_k: int = 5,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[FillMaskRequestOutput]:
        """The likeliest words for each mask token in each text.

        Args:
            top_k: how many.

        Other arguments and errors as for :meth:`embed`.
        """
        return self._encode(lambda tasks: tasks.fill_mask(prompts, top_k, truncate_prompt_tokens), use_tqdm)

    def shutdown(self) -> None:
        """Stop the ranks. Safe to call twice, and from any thread: a running ``generate`` ends with
        EngineDeadError after the step it is in.
        """
        if self._serve_instead():
            return
        self._is_stopping = True
        with self._lock:
            if self._core is not None:
                self._core = None
                self._stop_ranks()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _run(
        self,
        core: EngineCore,
        resolved: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        on_finish: OnFinish,
    ) -> list[RequestOutput]:
        collectors: dict[str, Collector] = {}
        done = 0
        try:
            for index, ((text, ids), one) in enumerate(zip(resolved, params, strict=True)):
                request_id = str(self._next_id)
                self._next_id += 1
                with _naming(index, len(resolved)):
                    core.submit(request_id, ids, one)
                collectors[request_id] = Collector(request_id, text, ids, one)
            while core.has_work:
                for delta in self._step(core):
                    collectors[delta.request_id].push(delta)
                    done += delta.finished
                    if delta.finished:
                        on_finish(done)
        except BaseException:
            for request_id in collectors:
                core.abort(request_id)
            raise
        return [collector.final() for collector in collectors.values()]

    def _encode(self, make: Callable[[EncoderTasks], Job[Output]], use_tqdm: UseTqdm) -> list[Output]:
        if self._serve_instead():
            return []
        core = self._running()
        if not isinstance(core, EncodeCore):
            raise UnsupportedError(
                'model: it was loaded to generate text; pass runner="pooling" for vectors', field="runner"
            )
        job = make(core.tasks)
        with self._lock, progress(use_tqdm, len(job.inputs), "Processed prompts") as show:
            return run_job(core, job, lambda: self._step(core), show)

    def _step(self, core: Core[Any, D]) -> list[D]:
        if self._is_stopping:
            raise EngineDeadError(self._why_dead)
        try:
            if core.supervisor.is_recovering:
                core.supervisor.wait(_LOOK_S)
                return core.check()
            return core.step()
        except EngineDeadError as error:
            self._give_up(str(error))
            raise
        except Exception as error:  # whatever it is, the step has no answer, so no other can follow
            self._give_up(f"the engine has failed: {error}")
            raise EngineDeadError(self._why_dead) from error
        except BaseException:
            try:
                core.interrupted()
            except EngineDeadError as error:
                self._give_up(str(error))
            raise

    def _give_up(self, why: str) -> None:
        self._why_dead = why
        self.shutdown()

    def _serve_instead(self) -> bool:
        """On a rank that does not drive: serve until rank 0 is done."""
        if not self._serves:
            return False
        if not self._has_served:
            self._has_served = True
            serve_rank()
        return True

    def _generator(self) -> EngineCore:
        core = self._running()
        if not isinstance(core, EngineCore):
            raise UnsupportedError(
                f"model: {core.info.architecture} is served for vectors and scores; it generates no text",
                field="runner",
            )
        return core

    def _running(self) -> EngineCore | EncodeCore:
        if self._core is None:
            raise EngineDeadError(self._why_dead)
        return self._core


@contextmanager
def _naming(index: int, count: int) -> Iterator[None]:
    """A refusal of one of several prompts says which."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"prompts[{index}]: {error}", error.field, index) from error


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"sampling_params: {len(params)} for {count} prompts; pass one for all or one each",
            field="sampling_params",
        )
    return list(params)
