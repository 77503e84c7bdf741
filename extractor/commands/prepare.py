"""`tapdeck prepare`: the data set only: token ids, masks and rejects, with a look at what is supervised.

Owns what is printed about a prepared data set. Texts of the data set are data: they are never taken for
markup, and control characters in them are shown, not sent to the terminal.
"""

from __future__ import annotations

import io
import time
import unicodedata
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from extractor import checkpoint, folders
from extractor.dataset.prepare import prepare
from extractor.dataset.rejects import first_rejects
from extractor.dataset.templates import load_tokenizer
from extractor.dataset.tokens import TextTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from extractor.commands.output import Output
    from extractor.config import RunConfig
    from extractor.dataset.prepare import PrepareProgress
    from extractor.dataset.prepared import PreparedDataset, PreparedSample

PLACES_PER_REASON = 3
PROGRESS_SECONDS = 5.0
SUPERVISED_STYLE = "bold green"
BRACKETS = ("[[", "]]")
DIVIDER = "|"


class ProgressNotes:
    """Prints a line of progress every few seconds of a phase, with rate and remaining time.

    A phase that takes less prints nothing, however long what came before it took.
    """

    def __init__(self, out: Output, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._phase = ""
        self._begun = self._last = clock()

    def __call__(self, progress: PrepareProgress) -> None:
        """Takes one report; cheap when it is not time for a line."""
        now = self._clock()
        if progress.phase != self._phase:
            self._phase, self._begun, self._last = progress.phase, now, now
        if now - self._last < PROGRESS_SECONDS:
            return
        self._last = now
        seconds = max(now - self._begun, 1e-9)
        rate = progress.bytes_done / seconds
        remaining = (progress.bytes_total - progress.bytes_done) / rate if rate else float("inf")
        parts = [f"{progress.phase}: {progress.bytes_done / 1e6:.1f} of {progress.bytes_total / 1e6:.1f} MB"]
        if progress.phase == "tokenize":
            parts.append(f"{progress.records} records, {progress.rejected} rejected")
            parts.append(f"{progress.tokens / seconds:.0f} tokens/s")
        self._out.note(", ".join([*parts, f"{remaining:.0f} s left"]))


def run(config: RunConfig, *, show: int | None, cache_dir: Path | None = None, out: Output) -> int:
    """Prepares the data set of a run and reports on it.

    Args:
        config: the run.
        show: print the first so many samples token by token, supervised spans coloured and in brackets.
        cache_dir: where prepared data sets are kept; None takes the user's cache folder.
        out: where to print.

    Returns:
        The exit code.

    Raises:
        PreflightError: model, file or template is missing, or the tokenizer cannot be loaded.
        DatasetError: too many records were rejected, or no sample is left.
    """
    model_folder = checkpoint.resolve(config.model.path, config.model.revision)
    prepared = prepare(
        config.data,
        model_folder,
        trust_remote_code=config.model.trust_remote_code,
        cache_dir=cache_dir or folders.cache_folder(),
        on_progress=ProgressNotes(out),
    )
    for line in summary(prepared):
        out.line(line)
    if show:
        tokenizer = TextTokenizer(
            load_tokenizer(model_folder, trust_remote_code=config.model.trust_remote_code)
        )
        for index in range(min(show, len(prepared))):
            sample = prepared.sample(index)
            ids = [int(token) for token in sample.input_ids]
            out.line()
            out.line(_to_terminal(sample_text(sample, tokenizer.decode_each(ids)), out))
        if show < len(prepared):
            out.line(f"\n{show} of {len(prepared)} samples shown")
    out.result(_as_object(prepared))
    return 0


def summary(prepared: PreparedDataset) -> list[str]:
    """The counts in words, one line each."""
    meta, counts = prepared.meta, prepared.meta.counts
    share = counts.supervised_tokens / counts.tokens
    rejected = sum(counts.rejected.values())
    lines = [
        f"{counts.records} records: {counts.accepted} accepted, {rejected} rejected",
        f"{counts.tokens} tokens, {counts.supervised_tokens} supervised ({share * 100:.1f} %), "
        f"longest sample {counts.longest} (limit {meta.max_len})",
        f"template: {printable(meta.template_source)}; mask: turns {meta.mask.turns}, "
        f"end_of_turn {meta.mask.end_of_turn}, inserted_reasoning {meta.mask.inserted_reasoning}",
    ]
    if meta.mask.end_of_turn and not meta.end_markers:
        lines.append(
            "warning: no token could be confirmed as the end of an answer in this template; none is supervised"
        )
    lines += [f"warning {code}: {count} records" for code, count in meta.counts.warnings.items()]
    if rejected:
        for code, places in first_rejects(prepared.rejected_path, PLACES_PER_REASON).items():
            count = counts.rejected.get(code, len(places))
            shown = "; ".join(
                f"{place.source_file}:{place.source_line} {place.detail}".rstrip() for place in places
            )
            of = "" if count <= len(places) else f" ({len(places)} of {count} shown)"
            lines.append(f"rejected {printable(code)}: {count}{of}: {printable(shown)}")
        lines.append(f"all rejects: {prepared.rejected_path}")
    lines.append(f"prepared data set: {prepared.path}")
    return lines


def sample_text(sample: PreparedSample, tokens: Sequence[str]) -> Text:
    """A sample token by token: supervised runs in brackets and colour, tokens divided by a bar."""
    supervised = int(sample.loss_mask.sum())
    text = Text()
    text.append(
        f"sample {sample.index} {printable(sample.sample_id)} "
        f"({printable(sample.source_file)}:{sample.source_line}): {len(tokens)} tokens, {supervised} supervised\n",
        style="dim",
    )
    inside = False
    for token, supervise in zip(tokens, sample.loss_mask, strict=True):
        if bool(supervise) != inside:
            text.append(BRACKETS[0] if supervise else BRACKETS[1], style=SUPERVISED_STYLE)
            inside = bool(supervise)
        elif text.plain and not text.plain.endswith("\n"):
            text.append(DIVIDER, style="dim")
        text.append(printable(token), style=SUPERVISED_STYLE if supervise else "")
    if inside:
        text.append(BRACKETS[1], style=SUPERVISED_STYLE)
    return text


def printable(text: str) -> str:
    """Text for a terminal: line breaks shown and kept, control and direction characters as escapes."""
    shown = []
    for character in text:
        if character == "\n":
            shown.append("\\n\n")
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs"):
            shown.append(character.encode("unicode_escape").decode())
        else:
            shown.append(character)
    return "".join(shown)


def _to_terminal(text: Text, out: Output) -> str:
    """Rich text as a string, coloured only if the stream is a terminal (rich honours NO_COLOR)."""
    stream = out.stderr if out.as_json else out.stdout
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=stream.isatty(), width=1 << 20, soft_wrap=True)
    console.print(text, end="")
    return buffer.getvalue()


def _as_object(prepared: PreparedDataset) -> dict[str, object]:
    meta, counts = prepared.meta, prepared.meta.counts
    return {
        "prepared": str(prepared.path),
        "key": meta.key,
        "records": counts.records,
        "samples": counts.accepted,
        "rejected": counts.rejected,
        "warnings": counts.warnings,
        "tokens": counts.tokens,
        "supervised_tokens": counts.supervised_tokens,
        "longest_tokens": counts.longest,
        "max_len": meta.max_len,
        "template": meta.template_source,
        "border_rule": meta.border_rule,
        "end_markers": list(meta.end_markers),
        "rejected_path": str(prepared.rejected_path),
    }
