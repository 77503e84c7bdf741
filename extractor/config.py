"""`run.toml`: what a run is, validated as a whole before anything is loaded.

Owns the keys, their defaults and their errors. It reads no model, no data and no GPU: what needs those
(does the layer exist, does the disk suffice) is checked by `extractor.commands.preflight`.

Invariants: a `RunConfig` is immutable; an unknown key is an error that names the nearest known one; an
error names the file, the line and the key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from extractor.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails

PositiveInt = Annotated[int, Field(gt=0)]
# TOML has arrays, which arrive as lists: only the container is lax, its items stay strict.
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Ints = Annotated[tuple[int, ...], Field(strict=False)]


class Section(BaseModel):
    """A table of `run.toml`: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """`[model]`: which model, on which device, in which precision."""

    path: str
    """Folder, or hub id that is in the local cache."""
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    trust_remote_code: bool = False
    allow_unverified_sglang: bool = False
    """Run on a SGLang release that was never verified; the start-up proof still decides."""
    tp: PositiveInt = 1
    dp: PositiveInt = 1
    mem_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Upper bound on the share of GPU memory; the KV pool itself is sized from a batch."""
    attention_backend: str | None = None
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Further `ServerArgs` fields, checked against the installed SGLang."""


class MaskSection(Section):
    """`[data.mask]`: which tokens of a conversation are supervised."""

    turns: Literal["all", "last"] = "all"
    end_of_turn: bool = True
    """Supervise the token that ends an assistant turn: the model must learn to stop."""
    inserted_reasoning: bool = False
    """Supervise reasoning blocks that the template itself adds to an answer without reasoning."""


class DataSection(Section):
    """`[data]`: which conversations, how they are rendered, what is rejected."""

    files: Strings = Field(min_length=1)
    format: Literal["auto", "messages", "sharegpt"] = "auto"
    template: str | None = None
    """A Jinja file; None takes the chat template of the model's tokenizer."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    mask: MaskSection = Field(default_factory=MaskSection)
    max_len: PositiveInt = 2048
    """Longer samples are cut on the right to this many tokens."""
    min_supervised: PositiveInt = 1
    """Samples with fewer supervised tokens (after cutting) are rejected."""
    limit: PositiveInt | None = None
    """Take only the first so many accepted samples."""
    seed: int | None = None
    """Shuffle the samples over the shards; None keeps the order of the files."""
    reject_limit: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of records that may be rejected before the run refuses."""


class TapsSection(Section):
    """`[taps]`: which boundaries are stored."""

    layers: Ints | None = None
    """None takes the default selection and says so."""
    embed: bool = False
    final: bool = True
    normed: bool = False
    convention: Literal["after", "before"] = "after"


class OutputSection(Section):
    """`[output]`: where and how the states are written."""

    dir: str
    layout: Literal["shards"] = "shards"
    shard_bytes: PositiveInt = 2_000_000_000
    """States per shard: what a kill can cost at most."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision on disk; "auto" is the model's."""
    reserve_bytes: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Free space that must remain on the output's file system."""


class BatchSection(Section):
    """`[batch]`: what one forward pass holds."""

    max_tokens: PositiveInt = 8192


class WriterSection(Section):
    """`[writer]`: from the device to the disk."""

    threads: PositiveInt = 4
    buffers: Annotated[int, Field(ge=2)] = 4
    """Host buffers, each as large as one batch of states; together they bound the memory."""


class NcclSection(Section):
    """`[nccl]`: a preset and single variables that win over it."""

    preset: Literal["none", "pcie-blackwell"] = "none"
    env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _only_nccl(self) -> Self:
        for name in self.env:
            if not name.startswith("NCCL_"):
                raise ValueError(f"{name} is no NCCL variable (they start with NCCL_)")
        return self


class RunConfig(Section):
    """A whole run."""

    model: ModelSection
    data: DataSection
    output: OutputSection
    taps: TapsSection = Field(default_factory=TapsSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    writer: WriterSection = Field(default_factory=WriterSection)
    nccl: NcclSection = Field(default_factory=NcclSection)

    @model_validator(mode="after")
    def _sample_fits_batch(self) -> Self:
        if self.data.max_len > self.batch.max_tokens:
            raise ValueError(
                f"data.max_len = {self.data.max_len} is larger than batch.max_tokens = "
                f"{self.batch.max_tokens}; a sample must fit one batch. Raise batch.max_tokens or lower data.max_len"
            )
        return self


NCCL_PRESETS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    # From tuning single-stream decoding on 8 PCIe Blackwell cards; a prefill all-reduce is much larger,
    # so measure before believing it. Belongs with attention_backend = "flashinfer" and
    # disable_custom_all_reduce = true.
    "pcie-blackwell": {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_NTHREADS": "512",
    },
}


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads `run.toml`; relative paths in it are relative to its folder.

    Args:
        path: the file.
        overrides: `key=value` with dotted keys; the value is TOML, or else a plain string.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", remedy="name an existing run.toml") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        apply_override(tree, override)
    return build(tree, source=str(path), text=text, base=path.resolve().parent)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `a.b.c=value` in a tree of tables, in place.

    Raises:
        ConfigError: there is no `=`, or the key runs through a value that is no table.
    """
    key, separator, raw = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r}: expected key=value", remedy="for example --set batch.max_tokens=16384")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    *tables, leaf = key.strip().split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override!r}: {table} is a value, not a table")
    tree[leaf] = value


def build(tree: Mapping[str, Any], *, source: str, text: str = "", base: Path | None = None) -> RunConfig:
    """Validates a tree of tables.

    Args:
        tree: as parsed from TOML.
        source: what to call it in errors (a file name, "the command line").
        text: the TOML text, for line numbers.
        base: folder that relative paths are relative to; None leaves them.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(fault, source, text) for fault in error.errors()]
        raise ConfigError("\n".join(faults)) from error
    return config if base is None else _anchor(config, base)


def _anchor(config: RunConfig, base: Path) -> RunConfig:
    """Relative paths made absolute; a model path stays when no such folder exists (it is a hub id)."""

    def absolute(path: str) -> str:
        return str(base / Path(path).expanduser())

    model_folder = base / Path(config.model.path).expanduser()
    template = config.data.template
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"path": str(model_folder) if model_folder.exists() else config.model.path}
            ),
            "data": config.data.model_copy(
                update={
                    "files": tuple(absolute(file) for file in config.data.files),
                    "template": None if template is None else absolute(template),
                }
            ),
            "output": config.output.model_copy(update={"dir": absolute(config.output.dir)}),
        }
    )


def _explain(fault: ErrorDetails, source: str, text: str) -> str:
    keys = [part for part in fault["loc"] if isinstance(part, str)]
    dotted = ".".join(str(part) for part in fault["loc"])
    where = f"{source}{_line_of(keys, text)}"
    match fault["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(keys[-1], _known_keys(keys[:-1]), n=1, cutoff=0.5)
            hint = f"; did you mean {'.'.join([*keys[:-1], near[0]])}?" if near else ""
            known = ", ".join(sorted(_known_keys(keys[:-1])))
            return f"{where}: unknown key {dotted}{hint} (known here: {known})"
        case "missing":
            return f"{where}: {dotted} is missing; it has no default"
        case "value_error":
            return f"{where}: {dotted + ': ' if dotted else ''}{fault['msg'].removeprefix('Value error, ')}"
        case _:
            return f"{where}: {dotted} = {fault['input']!r}: {fault['msg']}"


def _known_keys(tables: Sequence[str]) -> Iterable[str]:
    section: type[BaseModel] = RunConfig
    for table in tables:
        annotation = section.model_fields[table].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return section.model_fields.keys()


def _line_of(keys: Sequence[str], text: str) -> str:
    """`:LINE` of a key (or of its table) in TOML text, or nothing."""
    if not text or not keys:
        return ""
    *tables, leaf = keys
    current: list[str] = []
    table_line = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line)
        if header:
            current = [part.strip().strip("\"'") for part in header[1].split(".")]
            if current == keys:
                return f":{number}"
            if current == tables:
                table_line = f":{number}"
        elif current == tables and re.match(rf"\s*[\"']?{re.escape(leaf)}[\"']?\s*=", line):
            return f":{number}"
    return table_line
