"""Speech recognition with OpenVINO GenAI's Whisper pipeline, one window of a recording at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import openvino_genai as genai

from ovmstrio.core.errors import InvalidField, ModelFailure
from ovmstrio.inference.engine.audio_files import SAMPLE_RATE, Samples
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.util.regular_files import read_regular_bytes
from ovmstrio.util.truncation import shown

Span = tuple[float, float, str]
"""Start and end in seconds from the start of the window, and the text."""

_PREPROCESSOR: Final = "preprocessor_config.json"
_WINDOW_SECONDS: Final = 30
_PROMPT_TOKENS: Final = 223  # half of the decoder's context, less the start token


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """Transcription options; see :class:`ovmstrio.core.speech.TranscriptionRequest`."""

    translates: bool = False
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    has_segments: bool = False
    has_words: bool = False


@dataclass(slots=True)
class WindowTranscript:
    """Transcript of a window, and the number of its samples that it covers."""

    text: str
    samples: int
    language: str
    segments: list[Span] = field(default_factory=list)
    words: list[Span] = field(default_factory=list)


class SpeechRecognizer:
    """Whisper model as exported by Optimum; ``has_word_timestamps`` enables word timestamps, which are slower."""

    def __init__(self, folder: str, device: str, properties: dict[str, Any], *, has_word_timestamps: bool) -> None:
        self._make: Callable[[], Any] = lambda: genai.WhisperPipeline(
            folder, device, **properties, **({"word_timestamps": True} if has_word_timestamps else {})
        )
        self._pipeline = self._make()
        config = self._pipeline.get_generation_config()
        self.languages = {name.strip("<|>"): name for name in config.lang_to_id} if config.is_multilingual else {}
        self.window = _window_samples(Path(folder))  # maximum number of samples per window

    def hear(
        self,
        sound: Samples,
        wanted: TranscriptionOptions,
        *,
        is_first: bool,
        is_last: bool,
        on_text: Callable[[str], bool],
    ) -> WindowTranscript:
        """Transcribe up to :attr:`window` samples.

        ``is_first`` and ``is_last`` say whether the recording starts or ends with this window. For a complete
        recording without timestamps, ``on_text`` receives text while it is generated and returns False to stop.

        Raises:
            ModelFailure: the library failed; the model was reloaded.
        """
        is_timed = wanted.has_segments or wanted.has_words or not (is_first and is_last)
        try:
            config = self._config(wanted, is_first=is_first, is_timed=is_timed)
            if not is_timed:
                made = self._pipeline.generate(sound.tolist(), config, lambda text: _status(is_running=on_text(text)))
                return WindowTranscript(made.texts[0], len(sound), made.language or "")
            return self._hear_timed(sound, config, is_last=is_last)
        except RuntimeError as error:
            # The failed run would stay in the pipeline's state.
            self._pipeline = self._make()
            raise ModelFailure(f"the model failed: {library_error_message(error)}") from error

    def _hear_timed(self, sound: Samples, config: Any, *, is_last: bool) -> WindowTranscript:
        passes = _Passes(ends_after=None if is_last else 2 if config.word_timestamps else 1)
        made = self._pipeline.generate(sound.tolist(), config, passes)
        length = len(sound) / SAMPLE_RATE
        spans = [(each.start_ts, each.end_ts if each.end_ts >= 0 else length, each.text) for each in made.chunks or ()]
        words = [(each.start_ts, each.end_ts, each.word) for each in made.words or ()]
        if is_last:
            samples = len(sound)
        else:
            spans = self._first_pass(spans, passes)
            samples = round(spans[-1][1] * SAMPLE_RATE) if spans else len(sound)
            # Always advance, or a model that reports no progress would loop forever.
            samples = min(samples, len(sound)) if samples >= SAMPLE_RATE else len(sound)
        text = "".join(span[2] for span in spans)
        return WindowTranscript(text, samples, made.language or "", spans, words)

    def _first_pass(self, spans: list[Span], passes: _Passes) -> list[Span]:
        """Return the segments of the first pass; the rest is transcribed again with the next window."""
        if len(passes.tokens) <= 1:
            return spans
        room = len(self._pipeline.get_tokenizer().decode(passes.tokens[0]))
        kept: list[Span] = []
        for span in spans:
            if room <= 0:
                break
            kept.append(span)
            room -= len(span[2])
        return kept

    def _config(self, wanted: TranscriptionOptions, *, is_first: bool, is_timed: bool) -> Any:
        config = self._pipeline.get_generation_config()
        config.return_timestamps = is_timed
        config.word_timestamps = wanted.has_words
        if self.languages:
            config.task = "translate" if wanted.translates else "transcribe"
            if wanted.language:
                config.language = self.languages[wanted.language]
        if wanted.temperature > 0:
            config.do_sample = True
            config.temperature = wanted.temperature
        if wanted.prompt and is_first:
            config.initial_prompt = self._truncate_prompt(wanted.prompt)
        return config

    def _truncate_prompt(self, prompt: str) -> str:
        tokenizer = self._pipeline.get_tokenizer()
        ids = tokenizer.encode(prompt, add_special_tokens=False).input_ids.data[0].tolist()
        return prompt if len(ids) <= _PROMPT_TOKENS else str(tokenizer.decode(ids[-_PROMPT_TOKENS:]))

    def check(self, wanted: TranscriptionOptions) -> None:
        """Check that the model supports the options; raise InvalidField if it does not."""
        if wanted.translates and not self.languages:
            raise InvalidField("this English-only model cannot translate", field="model")
        known = self.languages or {"en": ""}
        if wanted.language and wanted.language not in known:
            expected = f"one of {', '.join(sorted(known))}" if self.languages else "en (English-only model)"
            message = f"Invalid language code. Expected {expected}"
            raise InvalidField(message, field="language", got=shown(wanted.language, 40))


class _Passes(genai.StreamerBase):  # type: ignore[misc]  # the library has no types
    """Streamer that records each pass over a window (one more for the rest of it), and stops after ``ends_after``."""

    def __init__(self, ends_after: int | None) -> None:
        super().__init__()
        self.tokens: list[list[int]] = []
        self._ends_after = ends_after

    def write(self, tokens: int | list[int]) -> Any:
        self.tokens.append([tokens] if isinstance(tokens, int) else list(tokens))
        return _status(is_running=len(self.tokens) != self._ends_after)

    def end(self) -> None:
        """Do nothing."""


def _status(*, is_running: bool) -> Any:
    return genai.StreamingStatus.RUNNING if is_running else genai.StreamingStatus.CANCEL


def _window_samples(folder: Path) -> int:
    try:
        samples = json.loads(read_regular_bytes(folder / _PREPROCESSOR)).get("n_samples")
    except (OSError, ValueError, AttributeError):
        samples = None
    return samples if isinstance(samples, int) and samples > 0 else _WINDOW_SECONDS * SAMPLE_RATE
