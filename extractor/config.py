"""`run.toml`: what a run is, validated as a whole before anything is loaded.

Owns the keys, their defaults and their errors. It reads no model, no data and no GPU: what needs those
(does the layer exist, does the disk suffice) is checked by `extractor.preflight`.

Invariants: a `RunConfig` is immutable; an unknown key is an error that names the nearest known one; an
error names the file, the line and the key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from extractor.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails

DEFAULT_MAX_TOKENS = 8192

PositiveInt = Annotated[int, Field(gt=0)]
# TOML has arrays, which arrive as lists: only the container is lax, its items stay strict.
PathText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Paths = Annotated[tuple[PathText, ...], Field(strict=False)]
Ints = Annotated[tuple[int, ...], Field(strict=False)]


class Section(BaseModel):
    """A table of `run.toml`: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """`[model]`: which model, on which device, in which precision."""

    path: PathText
    """Folder, or hub id that is in the local cache."""
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    trust_remote_code: bool = False
    allow_unverified_sglang: bool = False
    """Run on a SGLang release that was never verified; the start-up proof still decides."""
    tp: PositiveInt = 1
    """Ranks (processes, and GPUs) over which each layer is split."""
    gpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)] | None = None
    """Numbers of the GPUs, as nvidia-smi counts, one for each rank; None takes the first that are visible."""
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

    files: Paths = Field(min_length=1)
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
    as_served: bool = False
    """Store what SGLang's own capture gives; it is not the residual stream in every class (docs/models.md)."""


class OutputSection(Section):
    """`[output]`: where and how the states are written."""

    dir: PathText
    layout: str = "shards"
    shard_bytes: PositiveInt = 2_000_000_000
    """States per shard: what a kill can cost at most."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision on disk; "auto" is the model's."""
    reserve_bytes: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Free space that must remain on the output's file system."""

    @field_validator("layout")
    @classmethod
    def _only_shards(cls, layout: str) -> str:
        if layout != "shards":
            raise ValueError(
                f"a run writes the layout shards; for {layout} run `tapdeck export DIR OUT --layout {layout}` "
                "afterwards (known there: speculators-v1)"
            )
        return layout


class BatchSection(Section):
    """`[batch]`: what one forward pass holds."""

    max_tokens: Annotated[int, Field(ge=16)] | None = None
    """Token budget; None takes 8192, or `data.max_len` where that is more. A longer sample is computed in chunks."""
    chunk_tokens: Annotated[int, Field(ge=16)] | None = None
    """Tokens of a chunk of a sample longer than `max_tokens`, at most that; None takes `max_tokens`."""


class WriterSection(Section):
    """`[writer]`: from the device to the disk."""

    threads: PositiveInt = 8
    """Twice the taps of a usual run: while the files of one shard are synced, those of the next are written."""
    buffers: Annotated[int, Field(ge=2)] = 4
    """Host memory, in batches of states; or the longest sample and one batch, where that is more."""


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

    @property
    def max_tokens(self) -> int:
        """Token budget of a batch."""
        return self.batch.max_tokens or max(DEFAULT_MAX_TOKENS, self.data.max_len)

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a chunk; None when no sample may be longer than a batch."""
        return None if self.data.max_len <= self.max_tokens else self.batch.chunk_tokens or self.max_tokens

    @model_validator(mode="after")
    def _chunk_fits_batch(self) -> Self:
        if self.batch.chunk_tokens is not None and self.batch.chunk_tokens > self.max_tokens:
            raise ValueError(
                f"batch.chunk_tokens = {self.batch.chunk_tokens} is larger than batch.max_tokens = "
                f"{self.max_tokens}; lower batch.chunk_tokens or raise batch.max_tokens"
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


def load(
    path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> RunConfig:
    """A configuration from `run.toml`, flags and overrides; later ones win.

    Relative paths in the file are relative to its folder, all others to the current folder.

    Args:
        path: the file; None starts from nothing.
        overrides: `key=value` with dotted keys; the value is TOML, or else a plain string.
        flags: dotted keys to values.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value is wrong.
    """
    tree: dict[str, Any] = {}
    text = ""
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
            tree = tomllib.loads(text)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", remedy="name an existing run.toml") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
        _anchor(tree, path.resolve().parent)
    given: dict[str, Any] = {}
    for key, value in (flags or {}).items():
        set_key(given, key, value)
    for override in overrides:
        apply_override(given, override)
    _anchor(given, Path.cwd())
    return build(_merge(tree, given), source="the command line" if path is None else str(path), text=text)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `a.b.c=value` in a tree of tables, in place.

    Raises:
        ConfigError: there is no `=`, or the key runs through a value that is no table.
    """
    key, separator, raw = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"--set {override!r}: expected key=value", remedy="for example --set batch.max_tokens=16384"
        )
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    set_key(tree, key.strip(), value)


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets one dotted key in a tree of tables, in place.

    Raises:
        ConfigError: the key runs through a value that is no table.
    """
    *tables, leaf = key.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key}: {table} is a value, not a table")
    tree[leaf] = value


def build(tree: Mapping[str, Any], *, source: str, text: str = "") -> RunConfig:
    """Validates a tree of tables.

    Args:
        tree: as parsed from TOML, with absolute paths.
        source: what to call it in errors (a file name, "the command line").
        text: the TOML text, for line numbers.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(fault, source, text) for fault in error.errors()]
        raise ConfigError("\n".join(faults)) from error


def _merge(tree: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the values of `over` in place of its own, table by table."""
    merged = dict(tree)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _anchor(tree: dict[str, Any], base: Path) -> None:
    """Makes the relative paths in a tree absolute, in place; a model path that is no folder is a hub id."""

    def absolute(path: Any) -> Any:
        return str(base / Path(path).expanduser()) if isinstance(path, str) and path else path

    for table, key in (("output", "dir"), ("data", "template"), ("data", "files"), ("model", "path")):
        section = tree.get(table)
        if not isinstance(section, dict) or key not in section:
            continue
        value = section[key]
        if isinstance(value, list):
            section[key] = [absolute(item) for item in value]
        elif key != "path" or (isinstance(value, str) and Path(absolute(value)).is_dir()):
            section[key] = absolute(value)


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
