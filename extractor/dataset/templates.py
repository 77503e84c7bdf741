"""The chat template: where it comes from, how a conversation is rendered with it, what its source says.

The template is that of the model's own tokenizer, or a Jinja file that the config names. It is rendered by
transformers' own engine (sandboxed), so the text is what serving would see; a tokenizer of the model folder's
own code that prepares the variables of its template (tool declarations, for example) renders by itself. Nothing
here touches the network, and code of the model's folder runs only when the config says so.

Invariants: rendering is a function of its arguments alone (`strftime_now` gives a fixed day, or a resumed
run would see other tokens than the run that it continues); a template that raises rejects the record and
nothing else; tool-call arguments reach the template in the form that it works with.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from extractor import checkpoint
from extractor.dataset.records import decode_arguments
from extractor.dataset.rejects import RecordRejectedError
from extractor.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from jinja2.parser import Parser

    from extractor.dataset.records import Turn

TEMPLATE_DATE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""What templates that ask for today get; those with a `date_string` take it from data.template_args."""

# Noncharacters: no text should hold them; a record that does is refused where they would confuse.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "conversations", "chat_template"}
_REMOTE_MODULES = "transformers_modules."
"""Where transformers puts code of model folders."""
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


class ChatTemplate:
    """One template with its arguments, ready to render.

    Attributes:
        text: the Jinja source.
        source: "tokenizer", or the name of the file.
        has_marks: whether the source has `{% generation %}` blocks.
        literals: strings of the source and of the arguments that a content could be compared with.
    """

    def __init__(
        self,
        text: str,
        *,
        source: str,
        args: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        renderer: Callable[..., Any] | None = None,
    ) -> None:
        """Compiles the source.

        Args:
            text: the Jinja source.
            source: "tokenizer", or the name of the file.
            args: variables for the template.
            special_tokens: further variables: `bos_token` and the like.
            renderer: `apply_chat_template` of a tokenizer that has its own; None for transformers' engine.

        Raises:
            ConfigError: an argument has a name that is taken.
            PreflightError: the source is not valid Jinja.
        """
        reserved = sorted(_RESERVED & args.keys())
        if reserved:
            raise ConfigError(
                f"data.template_args: {', '.join(reserved)} is set by tapdeck",
                remedy="remove it from data.template_args",
            )
        self.text = text
        self.source = source
        self._variables = {"strftime_now": TEMPLATE_DATE.strftime, **special_tokens, **args}
        self._renderer = renderer
        tree, self._marking = _compile(text, source)
        self.has_marks = any(data.data == _OPEN for data in tree.find_all(nodes.TemplateData))
        self.literals = _find_literals(tree, self._variables.values())
        self._takes_strings = _tests_arguments_for_string(tree)

    @classmethod
    def load(cls, tokenizer: Any, template: Path | None, args: Mapping[str, Any]) -> ChatTemplate:
        """Takes the named file, or else the template of the tokenizer.

        Args:
            tokenizer: of transformers (untyped there).
            template: a Jinja file, or None.
            args: variables for the template.

        Raises:
            PreflightError: there is no template, the file cannot be read, or it is not valid Jinja.
            ConfigError: an argument has a name that is taken.
        """
        special = {
            key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
        }
        # Only code of the model's folder: what transformers brings renders as its engine does.
        is_own = type(tokenizer).__module__.startswith(_REMOTE_MODULES)
        own_method = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        renderer = tokenizer.apply_chat_template if is_own and own_method else None
        if template is not None:
            try:
                text = template.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise PreflightError(
                    f"{template}: {error}", remedy="name a readable Jinja file in data.template"
                ) from error
            return cls(text, source=template.name, args=args, special_tokens=special, renderer=renderer)
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        if not own:
            raise PreflightError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template",
                remedy='name a Jinja file: data.template = "template.jinja"',
                code="missing_template",
            )
        return cls(own, source="tokenizer", args=args, special_tokens=special, renderer=renderer)

    def render(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text of a whole conversation, without a generation prompt.

        Raises:
            RecordRejectedError: `template_error` with the template's message.
        """
        return self._render_calls(turns, tools, self._render)

    def marked(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, rendered: str
    ) -> list[tuple[int, int]]:
        """The spans of `{% generation %}` blocks in the rendered text.

        The engine's own tracker counts wrongly inside macros; here the template itself puts characters at
        both ends of each block, and the rest of the text must come out unchanged.

        Raises:
            RecordRejectedError: `mask_uncertain` when it does not.
        """
        text = self._render_calls(turns, tools, self._render_marked)
        plain: list[str] = []
        spans, starts, length = [], [], 0
        for part in re.split(f"([{_OPEN}{_CLOSE}])", text):
            if part == _OPEN:
                starts.append(length)
            elif part == _CLOSE and starts:
                spans.append((starts.pop(), length))
            else:
                plain.append(part)
                length += len(part)
        if "".join(plain) != rendered or starts:
            raise RecordRejectedError("mask_uncertain", "the template's generation blocks cannot be located")
        return [span for span in spans if span[0] < span[1]]

    def _render_calls(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None,
        render: Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None], str],
    ) -> str:
        """Renders with tool-call arguments in the form that the template works with."""
        if self._takes_strings or not any(turn.extra.get("tool_calls") for turn in turns):
            return render([_message(turn) for turn in turns], tools)
        try:
            return render([_message(_with_arguments(turn, decoded=True)) for turn in turns], tools)
        except RecordRejectedError as refused:
            # Templates that join strings want the wire format; those that iterate want objects.
            try:
                return render([_message(_with_arguments(turn, decoded=False)) for turn in turns], tools)
            except RecordRejectedError:
                raise refused from None

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        if self._renderer is not None:
            return self._render_by_tokenizer(self._renderer, messages, tools)
        try:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self.text,
                add_generation_prompt=False,
                **self._variables,
            )
        except _RENDER_ERRORS as error:
            raise RecordRejectedError("template_error", f"{type(error).__name__}: {error}") from error
        return str(texts[0])

    def _render_by_tokenizer(
        self,
        renderer: Callable[..., Any],
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        try:
            # Such code prints, and stdout belongs to results.
            with contextlib.redirect_stdout(sys.stderr):
                text = renderer(
                    messages,
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=False,
                    **self._variables,
                )
        except Exception as error:
            raise RecordRejectedError("template_error", f"{type(error).__name__}: {error}") from error
        return str(text)

    def _render_marked(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        try:
            return self._marking.render(
                messages=messages,
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                add_generation_prompt=False,
                **self._variables,
            )
        except _RENDER_ERRORS as error:
            raise RecordRejectedError("template_error", f"{type(error).__name__}: {error}") from error


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a local model folder; never asks the network.

    Returns:
        A tokenizer of transformers (untyped there).

    Raises:
        PreflightError: there is none, or it needs code that is not trusted.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise PreflightError(
            f"{folder}: no such folder", remedy="set model.path to a folder that holds the model"
        )
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        remedy = "check that the folder holds the tokenizer's files"
        if not trust_remote_code and "trust_remote_code" in str(error):
            code = ", ".join(checkpoint.remote_code(folder)) or "that code"
            remedy = f"read {code}; if you trust it, set model.trust_remote_code = true"
        raise PreflightError(f"the tokenizer in {folder} cannot be loaded: {error}", remedy=remedy) from error


def _message(turn: Turn) -> dict[str, Any]:
    return {"role": turn.role, "content": turn.content, **turn.extra}


def _with_arguments(turn: Turn, *, decoded: bool) -> Turn:
    """The turn with the arguments of its tool calls as objects, or as JSON text."""
    calls = turn.extra.get("tool_calls")
    if not calls:
        return turn

    def convert(arguments: Any) -> Any:
        if decoded:
            return decode_arguments(arguments, 0)
        return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()

    converted = []
    for call in calls:
        holder = call.get("function", call)
        if "arguments" in holder:
            holder = {**holder, "arguments": convert(holder["arguments"])}
        converted.append({**call, "function": holder} if "function" in call else holder)
    return msgspec.structs.replace(turn, extra={**turn.extra, "tool_calls": converted})


class _GenerationBlock(jinja2.ext.Extension):
    """Renders `{% generation %}` blocks with a character at both ends."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Wraps the body; a scope of its own, as in transformers' version of this block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Output([nodes.TemplateData(mark)]) for mark in (_OPEN, _CLOSE)]
        return nodes.Scope([marks[0], *body, marks[1]], lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: FBT001, FBT002, RUF100
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _compile(text: str, source: str) -> tuple[nodes.Template, jinja2.Template]:
    """The syntax tree, and the template in which generation blocks are marked.

    The environment is that of transformers.utils.chat_template_utils (5.19), which renders the text that
    counts; a difference between the two shows as a changed text and is refused.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.parse(text), environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise PreflightError(
            f"chat template ({source}), line {error.lineno}: {error.message}",
            remedy="mend it, or name another file in data.template",
            code="template_syntax",
        ) from error


def _find_literals(tree: nodes.Template, variables: Any) -> tuple[str, ...]:
    found = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    found.update(value for value in variables if isinstance(value, str))
    return tuple(sorted((text for text in found if text.strip()), key=lambda text: (-len(text), text)))


def _tests_arguments_for_string(tree: nodes.Template) -> bool:
    """Whether the template itself tells arguments in JSON text from objects (`arguments is string`)."""
    for test in tree.find_all(nodes.Test):
        subject = test.node
        name = None
        if isinstance(subject, nodes.Getattr):
            name = subject.attr
        elif isinstance(subject, nodes.Getitem) and isinstance(subject.arg, nodes.Const):
            name = subject.arg.value
        elif isinstance(subject, nodes.Name):
            name = subject.name
        if test.name == "string" and isinstance(name, str) and "arg" in name.lower():
            return True
    return False
