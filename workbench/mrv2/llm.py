"""`LLM`: the public API, as in vLLM's offline use, over an `EngineClient`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tqdm.auto import tqdm

from mrv2.chat_template import Message
from mrv2.config import EngineConfig, Knobs
from mrv2.engine.client import EngineClient
from mrv2.engine.connect import EnginePlace, make_client
from mrv2.engine.messages import EngineRequest, EngineSnapshot
from mrv2.engine.output_processor import OutputProcessor, ProcessedOutputs
from mrv2.engine.service import CoreFactory, make_core
from mrv2.engine.step_outputs import EngineOutputs
from mrv2.errors import ConfigError, EngineDeadError, RequestError
from mrv2.instrument import Span, stage, stages
from mrv2.options import build_config
from mrv2.outputs import RequestOutput
from mrv2.prompts import (
    ParsedPrompt,
    PromptType,
    match_params,
    match_priorities,
    parse_prompt,
    parse_prompts,
)
from mrv2.sampling_params import RequestOutputKind, SamplingParams
from mrv2.tokenizer import Tokenizer
from mrv2_models.registry import resolve_model

if TYPE_CHECKING:
    from mrv2.record import Level, Recording

# how long one wait for the engine lasts before the caller looks whether its requests were aborted
_POLL_SECONDS = 0.2


class LLM:
    """A loaded model that generates; a context manager, and usable from several threads.

    Args:
        model: a model folder, a model that can be fetched by name, or a preset (random weights, no tokenizer).
        engine: where the engine runs: the caller's thread ("inproc"), a background "thread", a child "process".
        tokenizer: folder of the tokenizer, if it is not the model's.
        options: vLLM's option names and this engine's own (see `mrv2.options`).

    Raises `ConfigError` for an unknown or unsupported option.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        engine: EnginePlace = "inproc",
        tokenizer: str | Path | None = None,
        core_factory: CoreFactory = make_core,
        **options: Any,
    ) -> None:
        config = build_config(str(model), tokenizer=None if tokenizer is None else str(tokenizer), **options)
        folder = resolve_model(model).folder
        text_folder = tokenizer or folder
        self.tokenizer: Tokenizer | None = None
        if text_folder is not None and not config.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_folder(text_folder)
        self.client: EngineClient = make_client(config, engine, core_factory)
        eos = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        self._processor = OutputProcessor(
            self.tokenizer, eos_token_ids=tuple(dict.fromkeys((*eos, *self.client.info.model_config.eos_token_ids)))
        )
        self._request_numbers = count()
        # guards the processor, the mailboxes and `_is_pumping`; never held while waiting for the engine
        self._changed = threading.Condition(threading.Lock())
        # one of the threads that wait takes the engine's outputs, for all of them
        self._is_pumping = False
        # unfinished request -> the call that waits for its outputs
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        # requests whose stream was dropped; a destructor may run inside a step, so they are aborted later
        self._abandoned: deque[str] = deque()

    @property
    def config(self) -> EngineConfig:
        return self.client.info.config

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, a dict ``{"prompt": ...}`` or ``{"prompt_token_ids": [...]}``,
                or a list of those.
            sampling_params: one for all, or one each; None = `get_default_sampling_params`.
            use_tqdm: show a progress bar, or a callable that makes one.
            priority: one number for each prompt, lower is served earlier (scheduling_policy="priority").

        Raises `RequestError` if any request can never be served; then none has been started.
        """
        return self._run(parse_prompts(prompts, self.tokenizer), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; each message is a dict with "role" and "content".

        Raises `RequestError` for a model without chat template and for messages that it refuses.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        tokenizer = self.get_tokenizer()
        prompts = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            # the template has written the special tokens
            prompts.append(parse_prompt(text, tokenizer, add_special_tokens=False))
        return self._run(prompts, sampling_params, use_tqdm, None)

    def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        cumulative: bool = False,
        priority: int = 0,
    ) -> RequestStream:
        """Start one request and return an iterator of its outputs: what is new in each, or with `cumulative` all.

        Closing the iterator aborts the request; one that is merely dropped is aborted by the next call.
        """
        kind = RequestOutputKind.CUMULATIVE if cumulative else RequestOutputKind.DELTA
        (params,) = match_params(self._or_default(sampling_params), 1)
        params = params.replace(output_kind=kind)
        mailbox: deque[RequestOutput] = deque()
        (request_id,) = self._submit([parse_prompt(prompt, self.tokenizer)], [params], [priority], mailbox)
        return RequestStream(self, request_id, mailbox)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises `RequestError` if the engine has none."""
        if self.tokenizer is None:
            raise RequestError(f"{self.config.model} runs without a tokenizer: there is none, or it was left out")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own defaults (``generation_config.json``), else ``SamplingParams()``."""
        return SamplingParams(**(self.tokenizer.generation_defaults if self.tokenizer is not None else {}))

    def set(self, **knobs: Any) -> Knobs:
        """Change knobs between two steps, also while requests run; returns all knobs in force."""
        return self.client.set(**knobs)

    def snapshot(self) -> EngineSnapshot:
        """Return a consistent picture of the engine between two steps."""
        return self.client.snapshot()

    @overload
    def record(self, on: bool) -> list[Span]: ...
    @overload
    def record(self, on: None = None, *, steps: int | None = None, level: Level = "stages") -> Recording: ...

    def record(
        self, on: bool | None = None, *, steps: int | None = None, level: Level = "stages"
    ) -> list[Span] | Recording:
        """Return a context manager that records what the engine does inside its block (see `mrv2.record.record`).

        With ``on=True`` start recording stages without a block; with ``on=False`` stop that and return the spans.

        Args:
            steps: stop after that many turns of the engine's loop.
            level: "stages", "kernels" or "nsight"; the latter two need ``engine="inproc"``.
        """
        if on is None:
            from mrv2.record import record

            return record(steps, level, llm=self)
        if steps is not None or level != "stages":
            raise ConfigError(f"record({on}) takes neither steps nor level; leave it out for a context manager")
        return self.client.record(on)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests with finish reason "abort"; unknown and finished ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._changed:
            done = self._processor.abort(ids)
            self._post(done)
        if done.abort_ids:
            self.client.abort(done.abort_ids)

    def close(self) -> None:
        """Stop the engine and free its memory; may be called again."""
        self.client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _or_default(
        self, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.get_default_sampling_params() if params is None else params

    def _run(
        self,
        prompts: list[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., tqdm],
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        """Submit everything, then wait for the last to finish."""
        given = match_params(self._or_default(sampling_params), len(prompts))
        params = [each.replace(output_kind=RequestOutputKind.FINAL_ONLY) for each in given]
        mailbox: deque[RequestOutput] = deque()
        ids = self._submit(prompts, params, match_priorities(priority, len(prompts)), mailbox)
        finished: dict[str, RequestOutput] = {}
        try:
            with _Progress(use_tqdm, len(prompts)) as progress:
                while len(finished) < len(ids):
                    output = self._wait(mailbox)
                    finished[output.request_id] = output
                    progress.update(output)
        except BaseException:
            self._drop(ids)
            raise
        return [finished[request_id] for request_id in ids]

    def _submit(
        self,
        prompts: list[ParsedPrompt],
        params: list[SamplingParams],
        priorities: list[int],
        mailbox: deque[RequestOutput],
    ) -> list[str]:
        """Hand all requests to the engine, or none; return their ids."""
        self._drop_abandoned()
        ids = [str(next(self._request_numbers)) for _ in prompts]
        requests: list[EngineRequest] = []
        try:
            with self._changed:
                for request_id, prompt, each, priority in zip(ids, prompts, params, priorities, strict=True):
                    requests += self._processor.add_request(
                        request_id, prompt.text, prompt.token_ids, each, priority=priority
                    )
                    self._mailboxes[request_id] = mailbox
            self.client.submit(requests)
        except RequestError:
            with self._changed:
                self._processor.withdraw(ids)
                self._forget(ids)
            raise
        except BaseException:
            self._drop(ids)
            raise
        return ids

    def _wait(self, mailbox: deque[RequestOutput]) -> RequestOutput:
        """Return the next output of a call, taking outputs off the engine while there is none."""
        self._drop_abandoned()
        while True:
            is_mine = False
            try:
                with self._changed:
                    while not mailbox and self._is_pumping:
                        self._changed.wait()
                    if mailbox:
                        return mailbox.popleft()
                    self._is_pumping = is_mine = True
                self._pump(mailbox)
            finally:
                if is_mine:
                    with self._changed:
                        self._is_pumping = False
                        self._changed.notify_all()

    def _pump(self, mailbox: deque[RequestOutput]) -> None:
        """Take the engine's next outputs and sort them into the mailboxes of all calls."""
        outputs = self.client.poll(_POLL_SECONDS) or self._poll_again(mailbox)
        with stage(stages.PROCESS_OUTPUTS), self._changed:
            done = self._processor.process(outputs)
            self._post(done)
        if done.abort_ids:
            self.client.abort(done.abort_ids)

    def _poll_again(self, mailbox: deque[RequestOutput]) -> EngineOutputs:
        """After an empty poll: make sure that the engine has work, so that nobody waits for ever."""
        picture = self.client.snapshot()
        if mailbox or picture.num_running or picture.num_waiting or picture.steps_in_flight:
            return EngineOutputs()
        outputs = self.client.poll(0.0)
        if not outputs and not mailbox:
            raise EngineDeadError("the engine is idle, yet a request has not finished: its last output was lost")
        return outputs

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            self._drop([self._abandoned.popleft()])

    def _post(self, done: ProcessedOutputs) -> None:
        for output in done.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.append(output)
            if output.finished:
                self._mailboxes.pop(output.request_id, None)
        self._changed.notify_all()

    def _drop(self, request_ids: list[str]) -> None:
        """Abort requests nobody waits for any more, whatever state the engine is in."""
        try:
            self.abort(request_ids)
        except EngineDeadError:
            pass  # nothing is left to abort; the caller already gets the engine's own error
        with self._changed:
            self._forget(request_ids)

    def _forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._mailboxes.pop(request_id, None)


class RequestStream:
    """Iterator over the outputs of one running request; `close` aborts it."""

    def __init__(self, llm: LLM, request_id: str, mailbox: deque[RequestOutput]) -> None:
        self.request_id = request_id
        self._llm = llm
        self._mailbox = mailbox
        self._finished = False

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> RequestOutput:
        if self._finished:
            raise StopIteration
        try:
            output = self._llm._wait(self._mailbox)
        except BaseException:
            self.close()
            raise
        self._finished = output.finished
        return output

    def close(self) -> None:
        """Abort the request if it still runs; the iterator ends."""
        if not self._finished:
            self._finished = True
            self._llm._drop([self.request_id])

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._finished:
            self._llm._abandoned.append(self.request_id)


class _Progress:
    """A progress bar over finished requests, with the rate of tokens."""

    def __init__(self, use_tqdm: bool | Callable[..., tqdm], total: int) -> None:
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True) if use_tqdm else None
        self._num_prompt = self._num_generated = 0

    def update(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        self._num_prompt += len(output.prompt_token_ids)
        self._num_generated += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"in {self._num_prompt / elapsed:.0f} tok/s, out {self._num_generated / elapsed:.0f} tok/s", refresh=False
        )
        self._bar.update(1)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
