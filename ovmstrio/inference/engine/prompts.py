"""Prompts: chat rendering, tokenization and length checks."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ovmstrio.core.errors import ContextExceeded, InvalidField, InvalidRequest
from ovmstrio.core.generation import Conversation
from ovmstrio.inference.engine.chat_template import TemplateFailure, read_template_source
from ovmstrio.inference.engine.messages import CONFIG, CONTEXT_FILE, PROMPT_FIELD, TOKENIZER_FILE
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.inference.engine.template_program import HEADER
from ovmstrio.util.regular_files import read_regular_bytes
from ovmstrio.util.truncation import has_enough_tokens, max_characters, prefix_lengths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.generation import Prompt
    from ovmstrio.inference.engine.pipeline import Pipeline

# ----------------------------------------------------------------------
# Process that renders a model's chat template, so that a slow template delays no other request
# ----------------------------------------------------------------------

# The sandbox's budget (chat_template.py) stops loops and growth. It cannot count inside one C call, such as the
# comparison of deeply self-nested lists, during which no signal handler runs either. The kernel ends the process once a
# rendering has used its CPU time.

_PROGRAM: Final = "ovmstrio.inference.engine.template_program"
_FIELD: Final = PROMPT_FIELD
_CPU_SECONDS: Final = 2.0
_SEND_SECONDS: Final = 5.0
_WALL_SECONDS: Final = 30.0  # wall-clock limit, for a process that gets no CPU time
_END_SECONDS: Final = 1.0
_CHUNK: Final = 1 << 20

_FINAL_END: Final = "\ue0e0\ue0e1\ue0e2"
"""End of a final message to be continued: characters without a meaning, which no template trims."""


def _marked_messages(conversation: Conversation) -> Sequence[Mapping[str, Any]]:
    """Return the messages, with the end of a final message to be continued marked."""
    messages = conversation.messages
    if not conversation.continues_final_message:
        return messages
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1].get('content') or ''}{_FINAL_END}"}]


def _until_final_end(text: str, conversation: Conversation) -> str:
    """Return a prompt, cut at the end of a final message to be continued."""
    if not conversation.continues_final_message:
        return text
    end = text.rfind(_FINAL_END)
    if end < 0:
        message = "continue_final_message is not possible: the chat template leaves out the final message or its end"
        raise InvalidField(message, field=_FIELD)
    return text[:end]


T = TypeVar("T")


class TemplateProcess:
    """Process that renders one conversation at a time, and is replaced if it ends.

    ``parts`` are arguments of :class:`ChatTemplate`; ``cpu_seconds`` limits compilation and each rendering.
    """

    def __init__(self, parts: Mapping[str, Any], name: str, cpu_seconds: float = _CPU_SECONDS) -> None:
        self._parts = dict(parts)
        self._name = name
        self._cpu_seconds = cpu_seconds
        self._received = bytearray()
        self._conversation = Conversation(())
        self._ends = 0.0
        self._status = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable when the process has answered or ended."""
        return self._socket.fileno()

    @property
    def seconds_left(self) -> float:
        """Time left for the current rendering."""
        return max(0.0, self._ends - time.monotonic())

    @property
    def pid(self) -> int:
        """Process id; -1 if there is none."""
        return -1 if self._process is None else self._process.pid

    def begin(self, conversation: Conversation) -> None:
        """Start rendering a conversation."""
        tools = conversation.tools if conversation.tool_choice != "none" else ()
        messages = _marked_messages(conversation)
        request = {"messages": messages, "tools": tools, "options": conversation.template_options}
        self._conversation = conversation
        self._ends = time.monotonic() + _WALL_SECONDS
        try:
            data = _encode(request)
        except (RecursionError, TypeError, ValueError) as error:
            self._received[:] = _encode({"failed": f"not JSON serializable: {error}"})
            return
        try:
            self._socket.sendall(data)
        except OSError:
            # The process was killed since the last rendering, for example by the OOM killer.
            self._replace()
            with suppress(OSError):
                self._socket.sendall(data)

    def render(self, conversation: Conversation) -> str:
        """Render a conversation synchronously; see :meth:`take`."""
        self.begin(conversation)
        self.has_ended(_WALL_SECONDS)
        return self.take()

    def has_ended(self, within_seconds: float = 0) -> bool:
        """Wait up to ``within_seconds`` for the rendering; return whether :meth:`take` can be called."""
        ends = time.monotonic() + within_seconds
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._has_answer():
            left = max(0.0, ends - time.monotonic())
            if not poll.poll(left * 1e3):
                return self.seconds_left <= 0
            try:
                chunk = self._socket.recv(_CHUNK)
            except OSError:
                return True
            if not chunk:
                return True
            self._received += chunk
        return True

    def take(self) -> str:
        """Return the prompt of the finished rendering; raise InvalidField if it failed or exceeded its limits."""
        if not self._has_answer():
            raise InvalidField(f"{self._name} {self._replace()}", field=_FIELD)
        answer = json.loads(self._received[HEADER.size :])
        self._received.clear()
        if "unusable" in answer:
            raise InvalidField(f"{self._name} of the model is invalid: {answer['unusable']}", field=_FIELD)
        if "failed" in answer:
            raise InvalidField(f"{self._name} rejects the messages: {answer['failed']}", field=_FIELD)
        return _until_final_end(str(answer["text"]), self._conversation)

    def close(self) -> None:
        """Kill the process."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._status = self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._received.clear()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_SEND_SECONDS)
        number = theirs.fileno()
        command = [sys.executable, "-P", "-m", _PROGRAM, str(number), str(self._cpu_seconds)]
        with theirs, suppress(OSError):
            # If fork fails, the socket is closed and the next rendering retries.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(number,))  # noqa: S603 - our own
        with suppress(OSError):
            self._socket.sendall(_encode({"template": self._parts}))

    def _replace(self) -> str:
        """Start a new process; return why the last one ended."""
        is_late = self.seconds_left <= 0
        if self._process is None:
            self._start()
            return "could not be rendered: no process could be started"
        with suppress(subprocess.TimeoutExpired):
            # The kernel closes the socket of a process before its status can be read.
            self._process.wait(0 if is_late else _END_SECONDS)
        self.close()
        status = self._status
        self._start()
        if status == -signal.SIGPROF:
            return f"used more than {self._cpu_seconds:g} s of CPU time and was stopped"
        if is_late:
            return f"took longer than {_WALL_SECONDS:g} s and was stopped"
        return f"ended its process with status {status}"

    def _has_answer(self) -> bool:
        size = len(self._received) - HEADER.size
        return size >= 0 and size >= HEADER.unpack_from(self._received)[0]


class RenderQueue(Generic[T]):
    """Queue of requests whose conversations are rendered one after the other."""

    def __init__(self, process: TemplateProcess) -> None:
        self._process = process
        self._waiting: deque[tuple[T, Conversation]] = deque()
        self._current: tuple[T | None] | None = None

    @property
    def waiting(self) -> int:
        """Number of requests."""
        return len(self._waiting) + (self._current is not None and self._current[0] is not None)

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable when a rendering has ended."""
        return self._process.descriptor

    @property
    def seconds_left(self) -> float | None:
        """Seconds until :attr:`has_ended` must be checked; None while idle."""
        return None if self._current is None else self._process.seconds_left

    @property
    def has_ended(self) -> bool:
        """Return whether :meth:`take` has a request to return."""
        return self._current is not None and self._process.has_ended()

    def add(self, item: T, conversation: Conversation, within_seconds: float) -> None:
        """Add a request; if idle, wait up to ``within_seconds`` for its prompt."""
        self._waiting.append((item, conversation))
        if self._current is None:
            self._begin_next()
            self._process.has_ended(within_seconds)

    def take(self) -> tuple[T, str | InvalidField] | None:
        """Return the rendered request with its prompt or error; None if it was withdrawn."""
        if self._current is None:
            return None
        (item,), self._current = self._current, None
        try:
            outcome: str | InvalidField = self._process.take()
        except InvalidField as error:
            outcome = error
        self._begin_next()
        return None if item is None else (item, outcome)

    def withdraw(self, item: T) -> None:
        """Remove a request; a started rendering continues without effect."""
        if self._current is not None and self._current[0] is item:
            self._current = (None,)
        self._waiting = deque(each for each in self._waiting if each[0] is not item)

    def _begin_next(self) -> None:
        if self._waiting:
            item, conversation = self._waiting.popleft()
            self._current = (item,)
            self._process.begin(conversation)


def _encode(value: Any) -> bytes:
    data = json.dumps(value, default=dict).encode()  # converts mappings of other types
    return HEADER.pack(len(data)) + data


# ----------------------------------------------------------------------
# Prompts
# ----------------------------------------------------------------------

_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
_DECODED_END_TOKENS: Final = 12
_INNER_KEYS: Final = ("text_config", "llm_config", "language_config")


def context_length(folder: Path) -> tuple[int | None, str]:
    """Return the context length from a model's folder, and its file; None if unknown."""
    for file in (CONFIG, CONTEXT_FILE):
        settings = _read_object(folder / file)
        found = _positive(settings, *(settings.get(key) for key in _INNER_KEYS))
        if found is not None:
            return found, file
    return None, ""


def read_architectures(folder: Path) -> list[str]:
    """Return the architectures in ``config.json``, such as ``LlamaForCausalLM``."""
    named = _read_object(folder / CONFIG).get("architectures")
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else []


def _read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; an absent or invalid file is an empty one."""
    try:
        read = json.loads(read_regular_bytes(file))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _positive(*parts: Any) -> int | None:
    for part in parts:
        for key in _CONTEXT_KEYS if isinstance(part, dict) else ():
            value = part.get(key)
            if type(value) is int and value > 0:
                return value
    return None


class PromptOptions(NamedTuple):
    """Tokenization of a prompt.

    Attributes:
        adds_special_tokens: whether the tokenizer adds its special tokens; None for texts only.
        limit: maximum of tokens to which a prompt is truncated; None for no truncation.
        keeps_first: whether a truncated prompt keeps its first tokens, not its last ones.
    """

    adds_special_tokens: bool | None = None
    limit: int | None = None
    keeps_first: bool = False

    def truncated(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that are kept."""
        if self.limit is None:
            return list(tokens)
        return list(tokens[: self.limit] if self.keeps_first else tokens[-self.limit :])


_DEFAULT_OPTIONS: Final = PromptOptions()


class PromptTokenizer:
    """Tokenizer of prompts; ``limit`` is the maximum of prompt and answer tokens together."""

    def __init__(self, tokenizer: Any, render: Callable[[Conversation], str], limit: int) -> None:
        self._tokenizer = tokenizer
        self.render = render
        self._most = limit
        vocabulary = tokenizer.get_vocab()
        self.vocabulary_size = len(vocabulary)
        self.longest_token = max(map(len, vocabulary), default=1)
        self._max_characters = max_characters(limit, self.longest_token)

    def tokenize_prompt(self, prompt: Prompt, options: PromptOptions = _DEFAULT_OPTIONS) -> list[int]:
        """Return the tokens of a prompt, at least one.

        Raises:
            ContextExceeded: the prompt is certainly too long.
            InvalidRequest: it is empty, or the template or tokenizer rejects it.
        """
        if isinstance(prompt, Conversation):
            return self.tokenize_rendered(self.render(prompt), options)
        if not isinstance(prompt, tuple):
            adds = options.adds_special_tokens is not False
            return self._nonempty(self.encode_prompt(prompt, add_special_tokens=adds, options=options))
        self.check_known(prompt)
        return self._nonempty(options.truncated(prompt))

    def check_known(self, tokens: Sequence[int]) -> None:
        """Raise InvalidField if a token is not in the vocabulary."""
        wrong = next((token for token in tokens if not 0 <= token < self.vocabulary_size), None)
        if wrong is not None:
            limit = self.vocabulary_size - 1
            raise InvalidField(f"the prompt has an unknown token: {wrong} (expected 0 to {limit})", field=_FIELD)

    def tokenize_rendered(self, text: str, options: PromptOptions = _DEFAULT_OPTIONS) -> list[int]:
        """Return the tokens of a rendered conversation, as :meth:`tokenize_prompt`."""
        adds = bool(options.adds_special_tokens)
        return self._nonempty(self.encode_prompt(text, add_special_tokens=adds, options=options))

    @staticmethod
    def _nonempty(tokens: list[int]) -> list[int]:
        if not tokens:
            raise InvalidField("the prompt has no tokens; send a text that is not empty", field=_FIELD)
        return tokens

    def encode_prompt(
        self, text: str, *, add_special_tokens: bool, options: PromptOptions = _DEFAULT_OPTIONS
    ) -> list[int]:
        """Tokenize a prompt, or a part of one; of a long one only as much as is kept, or shows that it does not fit."""
        if len(text) > self._max_characters:
            raise self._exceeded(f"the prompt has at least {len(text) * self._most // self._max_characters}")
        needed = self._most if options.limit is None else options.limit
        tokens = np.empty(0, np.int64)
        for length in prefix_lengths(len(text), needed):
            part = text[:length] if options.limit is None or options.keeps_first else text[len(text) - length :]
            tokens = self.encode(part, add_special_tokens=add_special_tokens)
            if length < len(text) and has_enough_tokens(len(tokens), needed):
                if options.limit is None:
                    raise self._exceeded(f"the prompt has at least {len(tokens)}")
                break
        return options.truncated(tokens.tolist())

    def encode(self, text: str, **options: Any) -> npt.NDArray[np.int64]:
        """Return the tokens of a text (options are the tokenizer's); raise InvalidRequest if it is rejected."""
        return self.encode_all([text], **options)[0]

    def encode_all(self, texts: Sequence[str], **options: Any) -> list[npt.NDArray[np.int64]]:
        """Return the tokens of each text; for short texts ten times faster than a call per text."""
        encoded = self._encoded([_without_surrogates(text) for text in texts], **options)
        rows, masks = encoded.input_ids.data, encoded.attention_mask.data
        return [np.array(row[mask == 1], np.int64) for row, mask in zip(rows, masks, strict=True)]

    def _encoded(self, texts: str | list[str], **options: Any) -> Any:
        try:
            return self._tokenizer.encode(texts, **options)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidRequest(f"tokenization failed: {library_error_message(error)}") from error

    def tokenize_all(self, texts: Sequence[str], **options: Any) -> list[npt.NDArray[np.int64]]:
        """Return the tokens of each text, like :meth:`tokenize`."""
        if len(texts) > 1 and options.get("max_length") is None:
            return self.encode_all(texts, add_special_tokens=options["add_special_tokens"])
        return [self.tokenize(text, **options) for text in texts]

    def tokenize(
        self, text: str, *, add_special_tokens: bool, max_length: int | None = None, padding: str | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the tokens of a text, truncated at the end and padded to ``max_length`` on one side if requested.

        Raises:
            InvalidRequest: the tokenizer rejects the text, or has no padding token.
        """
        options: dict[str, Any] = {"add_special_tokens": add_special_tokens}
        if max_length is not None:
            options |= {"max_length": max_length, "truncation": True}
        # Tokenizers converted without these options ignore them, so truncate here as well.
        tokens = self.encode(text, **options)[:max_length]
        missing = 0 if padding is None or max_length is None else max_length - len(tokens)
        if missing <= 0:
            return tokens
        filling = self._tokenizer.get_pad_token_id()
        if filling < 0:
            raise InvalidRequest("the tokenizer has no padding token; leave out the padding")
        return np.pad(tokens, (missing, 0) if padding == "left" else (0, missing), constant_values=filling)

    def rendered_end(self, prompt: Prompt, tokens: Sequence[int]) -> str:
        """Return the end of a rendered conversation; empty for other prompts."""
        if not isinstance(prompt, Conversation):
            return ""
        ids = [token for token in tokens[-_DECODED_END_TOKENS:] if token >= 0]
        end: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return end

    def check_length(self, tokens: Sequence[int], *, has_answer: bool) -> None:
        """Check that a prompt leaves room for an answer, if one is requested; raise ContextExceeded if it does not."""
        most = self._most - has_answer
        if len(tokens) > most:
            raise self._exceeded(f"the prompt has {len(tokens)}, and at most {most} fit; shorten it")

    def _exceeded(self, reason: str) -> ContextExceeded:
        most = f"This model's maximum context length is {self._most} tokens, its answer included"
        return ContextExceeded(f"{most}; {reason}", field=_FIELD)


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and the library rejects."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


_LIBRARY: Final = "MINJA"
_GENERATION_PROMPT: Final = "add_generation_prompt"


class PromptRenderer(NamedTuple):
    """Renderer of conversations to prompts.

    Attributes:
        render: renders synchronously or raises.
        source: template source, from which output parsers are detected.
        file: file of the template; empty if there is none.
        process: process that renders in the background; None if rendering takes almost no time.
    """

    render: Callable[[Conversation], str]
    source: str
    file: str = ""
    process: TemplateProcess | None = None


def choose_renderer(pipeline: Pipeline, folder: Path, mode: str) -> PromptRenderer:
    """Return the renderer of a model, with ``mode`` MINJA the library's own; without a template it rejects all."""
    tokenizer, source = pipeline.tokenizer, pipeline.chat_template
    if mode == _LIBRARY:
        file = TOKENIZER_FILE if source else ""
        return PromptRenderer(partial(_render_with_library, tokenizer, source), source, file)
    try:
        template = read_template_source(
            folder, source, bos_token=tokenizer.get_bos_token(), eos_token=tokenizer.get_eos_token()
        )
    except (TemplateFailure, OSError) as error:
        return PromptRenderer(partial(_reject, f"the chat template of the model cannot be used: {error}"), "")
    if template is None:
        return PromptRenderer(partial(_reject, "the model has no chat template; send a prompt to /completions"), "")
    source = template.arguments["tool_source"] or template.arguments["source"]
    process = TemplateProcess(template.arguments, f"the chat template {template.file}".rstrip())
    return PromptRenderer(process.render, source, template.file or TOKENIZER_FILE, process)


def _reject(reason: str, _: Conversation) -> str:
    raise InvalidField(reason, field=_FIELD)


def _render_with_library(tokenizer: Any, template: str, conversation: Conversation) -> str:
    if not template:
        return _reject("the model has no chat template; send a prompt to /completions", conversation)
    options = dict(conversation.template_options)
    wants_answer = bool(options.pop(_GENERATION_PROMPT, True))
    tools = [dict(tool) for tool in conversation.tools] if conversation.tool_choice != "none" else []
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in _marked_messages(conversation)],
            wants_answer,
            template,
            tools=tools or None,
            extra_context=options or None,
        )
    except (RuntimeError, TypeError, ValueError) as error:
        message = f"the chat template rejects the messages: {library_error_message(error)}"
        raise InvalidField(message, field=_FIELD) from error
    return _until_final_end(text, conversation)
