"""The demo's conversations: questions about Python, answered by Python's own documentation.

Every interpreter carries the text (`pydoc_data.topics` and the docstrings of the standard library), so the
demo needs no data set and no network. Lengths vary from about 60 to 600 tokens, some conversations have
several turns, some a system message.

Invariants: the same Python version, number and seed give the same bytes; ids are unique; a record is one
line of OpenAI messages. Nothing is imported but the topics: docstrings are read from the source files.
"""

from __future__ import annotations

import ast
import json
import math
import random
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

# As text, because a list of a hundred names would be a page of quotation marks.
MODULES = """
    argparse ast base64 bisect calendar collections configparser contextlib dataclasses datetime difflib
    dis doctest email.message enum filecmp fileinput fractions functools glob graphlib gzip heapq html
    http.client http.cookiejar http.server imaplib inspect ipaddress json json.decoder json.encoder
    logging logging.handlers mimetypes operator optparse pathlib pdb pickle pickletools platform poplib
    profile pstats queue random re sched secrets selectors shelve shutil smtplib socket socketserver
    statistics string subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback
    unittest.mock urllib.parse urllib.request uuid warnings weakref xml.dom.minidom
    xml.etree.ElementTree xmlrpc.client zipfile
""".split()  # noqa: SIM905

SHORTEST_ANSWER = 200
LONGEST_TALK = 1900
"""Characters of all answers of a conversation; with about 3.6 characters per token 55 to 530 tokens."""

SYSTEM = "You answer questions about Python from its documentation."


class Book(msgspec.Struct, frozen=True):
    """A piece of documentation that can be read on from any entry.

    Attributes:
        is_reference: a topic of the language reference; otherwise the docstrings of one module.
        entries: (subject, text), in reading order.
    """

    is_reference: bool
    entries: tuple[tuple[str, str], ...]


def build_conversations(target: Path, *, num_samples: int, seed: int) -> int:
    """Writes conversations as OpenAI messages, one JSON object a line.

    Args:
        target: the JSONL file; replaced when it exists.
        num_samples: how many; beyond some 2,000 the same passages come again in other lengths.
        seed: another seed takes other passages and lengths.

    Returns:
        The number written, which is `num_samples`.

    Raises:
        OSError: the file cannot be written.
    """
    rng = random.Random(seed)  # noqa: S311 -- a reproducible choice, nothing secret
    places = [(book, first) for book in _library() for first in range(len(book.entries))]
    rng.shuffle(places)
    part = target.with_name(target.name + ".part")
    with part.open("w", encoding="utf-8", newline="\n") as file:
        for index in range(num_samples):
            book, first = places[index % len(places)]
            record = {"id": f"demo-{seed}-{index:06d}", "messages": _conversation(book, first, rng)}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    part.replace(target)
    return num_samples


def _conversation(book: Book, first: int, rng: random.Random) -> list[dict[str, str]]:
    """One to three questions about consecutive entries of a book, answered from it."""
    num_turns = rng.choices((1, 2, 3), weights=(6, 3, 2))[0]
    # Uniform in the logarithm: short and long conversations alike, as in real data sets.
    budget = math.exp(rng.uniform(math.log(SHORTEST_ANSWER), math.log(LONGEST_TALK)))
    per_answer = max(SHORTEST_ANSWER, int(budget / num_turns))
    messages = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.25 else []
    position = first
    for turn in range(num_turns):
        if position == len(book.entries):
            break
        subject, text = book.entries[position]
        position += 1
        while book.is_reference and len(text) < per_answer and position < len(book.entries):
            text = f"{text}\n\n{book.entries[position][1]}"
            position += 1
        messages.append({"role": "user", "content": _question(book, subject, turn, rng)})
        messages.append({"role": "assistant", "content": _cut(text, per_answer)})
    return messages


def _question(book: Book, subject: str, turn: int, rng: random.Random) -> str:
    if book.is_reference:
        opening = (
            "What does the Python reference say about {}?",
            "Explain to me: {}.",
            "{}: how does it work?",
        )
        further = ("Go on, please.", "What else does it say?", "And then?")
    else:
        opening = ("What does `{}` do?", "Describe `{}` from the standard library.", "When would I use `{}`?")
        further = ("And `{}`?", "What about `{}`?", "How does `{}` differ from that?")
    return rng.choice(further if turn else opening).format(subject)


def _cut(text: str, longest: int) -> str:
    """The text up to the last line that ends within `longest` characters, at least its first line."""
    if len(text) <= longest:
        return text
    end = text.rfind("\n", 1, longest)
    return (text[:end] if end > 0 else text[:longest]).rstrip()


def _library() -> Iterator[Book]:
    yield from _reference()
    for name in MODULES:
        entries = tuple(_docstrings(name))
        if entries:
            yield Book(is_reference=False, entries=entries)


def _reference() -> Iterator[Book]:
    """The topics that `help()` shows, a paragraph or more per entry."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:  # some distributions package it apart
        return
    for name, text in sorted(topics.items()):
        heading, _, body = text.partition("\n\n")
        subject = heading.strip().splitlines()[0] if re.search(r"\n[*=]{3,}", heading) else name
        paragraphs = [part.rstrip() for part in (body or text).split("\n\n")]
        merged: list[str] = []
        for paragraph in paragraphs:
            if merged and len(merged[-1]) < SHORTEST_ANSWER:
                merged[-1] = f"{merged[-1]}\n\n{paragraph}"
            else:
                merged.append(paragraph)
        entries = tuple((subject, part.strip("\n")) for part in merged if part.strip())
        if entries:
            yield Book(is_reference=True, entries=entries)


def _docstrings(module_name: str) -> Iterator[tuple[str, str]]:
    """Public functions, classes and methods that a module describes at some length.

    Read from the source: what an imported module holds depends on what else the process has loaded.
    """
    source = Path(sysconfig.get_path("stdlib"), *module_name.split("."))
    files = [path for path in (source.with_suffix(".py"), source / "__init__.py") if path.is_file()]
    if not files:  # some distributions package parts of the standard library apart
        return
    for node in ast.parse(files[0].read_bytes()).body:
        yield from _described(node, module_name)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                yield from _described(member, f"{module_name}.{node.name}")


def _described(node: ast.stmt, owner: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
        "_"
    ):
        text = ast.get_docstring(node)
        if text and len(text) >= SHORTEST_ANSWER:
            yield f"{owner}.{node.name}", text
