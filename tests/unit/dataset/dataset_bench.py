"""Short cuts for the tests of the data set package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extractor.dataset.masks import LossMasker, Masked, MaskOptions
from extractor.dataset.prepared import PreparedDataset
from extractor.dataset.records import Conversation, Turn
from extractor.dataset.rejects import Reject, first_rejects
from extractor.dataset.templates import ChatTemplate
from extractor.dataset.tokens import TextTokenizer, merge_spans

DATA = Path(__file__).resolve().parents[2] / "data"


class Bench:
    """Masks conversations with a template of the test data."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text_tokenizer = TextTokenizer(tokenizer)

    def template(self, name: str, **args: Any) -> ChatTemplate:
        path = DATA / "templates" / f"{name}.jinja"
        return ChatTemplate.load(self.tokenizer, path, args)

    def masker(self, name: str, **options: Any) -> LossMasker:
        return LossMasker(self.template(name), self.text_tokenizer, MaskOptions(**options))

    def mask(self, name: str, *turns: Turn, **options: Any) -> Masked:
        return self.masker(name, **options).mask(talk(*turns))

    def runs(self, masked: Masked) -> list[str]:
        """Each maximal run of supervised tokens, decoded."""
        return decode_runs(self.tokenizer, masked.input_ids, masked.loss_mask)


def talk(*turns: Turn) -> Conversation:
    return Conversation("t", "talk.jsonl", 1, turns)


def user(text: str, **extra: Any) -> Turn:
    return Turn("user", text, extra=extra)


def answer(text: str, *, train: bool = True, **extra: Any) -> Turn:
    return Turn("assistant", text, train, extra)


def decode_runs(tokenizer: Any, ids: Any, mask: Any) -> list[str]:
    runs: list[list[int]] = []
    previous = 0
    for token, supervised in zip(ids, mask, strict=True):
        if supervised and not previous:
            runs.append([])
        if supervised:
            runs[-1].append(int(token))
        previous = supervised
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def without_marker(run: str, markers: list[str]) -> str:
    """A run less one end marker at its end, and the newline after that."""
    for marker in markers:
        for ending in (marker + "\n", marker):
            if marker and run.endswith(ending):
                return run.removesuffix(ending)
    return run


def span_texts(masked: Masked) -> list[str]:
    return [masked.text[start:end] for start, end in merge_spans(masked.spans)]


def rejects_of(prepared: PreparedDataset) -> list[Reject]:
    found = first_rejects(prepared.rejected_path, per_code=1000)
    return sorted((one for some in found.values() for one in some), key=lambda one: one.source_line)
