"""From files of conversations to a prepared data set, through a cache keyed by content.

Owns the order of the work: check the files, load tokenizer and template, hash, look up, and only then
read, render, mask and write, one record at a time. A record with a fault becomes a reject and the work goes
on; only the share of rejects, or an empty result, refuses the data set, and then the list of rejects is kept.

Invariants: `records == accepted + rejected`; memory does not grow with the files (but for 64 bits per record
to keep ids unique); nothing is written outside the cache folder; no network.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from extractor.dataset import cache
from extractor.dataset.masks import LossMasker, MaskOptions, cut_to_length
from extractor.dataset.prepared import (
    REJECTED_NAME,
    SAMPLES_NAME,
    Counts,
    PreparedDataset,
    PreparedMeta,
    SourceFile,
    file_checksum,
)
from extractor.dataset.readers import RawRecord, RecordReader, check_files
from extractor.dataset.records import Conversation, SampleIds, parse_record
from extractor.dataset.rejects import RecordRejectedError, Reject, RejectList, check_limit
from extractor.dataset.templates import TEMPLATE_DATE, ChatTemplate, load_tokenizer
from extractor.dataset.tokens import BORDER_RULE, TextTokenizer
from extractor.dataset.writer import SampleWriter, sync_file, write_meta
from extractor.errors import BugError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from extractor.config import DataSection

_PROGRESS_RECORDS = 64
_LIBRARIES = ("transformers", "tokenizers", "jinja2")


class PrepareProgress(msgspec.Struct, frozen=True):
    """How far the preparation is.

    Attributes:
        phase: "hash" reads the files for the cache key, "tokenize" makes the samples.
        bytes_done: of the data files, in this phase.
        bytes_total: size of the data files.
        records: read so far.
        accepted: samples so far.
        rejected: rejects so far.
        tokens: of the samples so far.
    """

    phase: Literal["hash", "tokenize"]
    bytes_done: int
    bytes_total: int
    records: int = 0
    accepted: int = 0
    rejected: int = 0
    tokens: int = 0


def prepare(
    data: DataSection,
    model_folder: Path,
    *,
    trust_remote_code: bool,
    cache_dir: Path,
    on_progress: Callable[[PrepareProgress], None] | None = None,
) -> PreparedDataset:
    """Makes the prepared data set of a run, or finds it in the cache. Blocking.

    Args:
        data: `[data]` of the run; its paths are absolute or relative to the current folder.
        model_folder: local folder with the model's tokenizer.
        trust_remote_code: whether code in that folder may run.
        cache_dir: where prepared data sets are kept.
        on_progress: called often, in this thread.

    Returns:
        The data set, checked against its checksums.

    Raises:
        PreflightError: a file or the template is missing, or the tokenizer cannot be loaded.
        DatasetError: too many records were rejected, or no sample is left.
    """
    paths = [Path(name) for name in data.files]
    check_files(paths)
    tokenizer = load_tokenizer(model_folder, trust_remote_code=trust_remote_code)
    template = ChatTemplate.load(
        tokenizer, None if data.template is None else Path(data.template), data.template_args
    )
    report = on_progress or _ignore
    before = [_identity(path) for path in paths]
    parts = cache.KeyParts(
        version=cache.PREPARE_VERSION,
        libraries={name: version(name) for name in _LIBRARIES},
        files=_hash_files(paths, report),
        tokenizer_hash=cache.hash_tokenizer(model_folder, trust_remote_code=trust_remote_code),
        template_hash=cache.hash_text(template.text),
        template_args=data.template_args,
        template_date=TEMPLATE_DATE.date().isoformat(),
        trust_remote_code=trust_remote_code,
        mask=MaskOptions(**data.mask.model_dump()),
        max_len=data.max_len,
        min_supervised=data.min_supervised,
        limit=data.limit,
        format=data.format,
    )

    def build(folder: Path) -> None:
        masker = LossMasker(template, TextTokenizer(tokenizer), parts.mask)
        written = _write_samples(folder, paths, parts, masker, report)
        if [_identity(path) for path in paths] != before:
            raise DatasetError(
                "a data file changed while it was read", remedy="prepare again when it is complete"
            )
        markers = tuple(marker.text for marker in masker.end_markers)
        meta = _meta(folder, parts, *written, template_source=template.source, end_markers=markers)
        write_meta(folder, meta)

    prepared = cache.open_or_build(cache_dir, parts.key(), build)
    counts = prepared.meta.counts
    check_limit(counts.records, counts.rejected, data.reject_limit, prepared.rejected_path)
    if counts.accepted == 0:
        raise DatasetError(
            f"no sample is left of {counts.records} records in {', '.join(path.name for path in paths)}. "
            f"The list of rejects is {prepared.rejected_path}",
            remedy="check data.files and data.format",
            code="no_samples",
        )
    return prepared


def _write_samples(
    folder: Path,
    paths: list[Path],
    parts: cache.KeyParts,
    masker: LossMasker,
    report: Callable[[PrepareProgress], None],
) -> tuple[Counts, str]:
    """Reads all records, writes samples and rejects; returns counts and the hash of the samples."""
    reader = RecordReader(paths)
    ids = SampleIds()
    warnings: dict[str, int] = {}
    records = 0
    with (folder / REJECTED_NAME).open("wb") as sink, SampleWriter(folder) as samples:
        rejects = RejectList(sink)

        def progress() -> None:
            done = (reader.bytes_done, reader.bytes_total, records, samples.num_samples, rejects.total)
            report(PrepareProgress("tokenize", *done, samples.num_tokens))

        for record in reader:
            records += 1
            if isinstance(record, Reject):
                rejects.add(record)
            else:
                sample_id = ids.assign(record.value, record.source_file, record.source_line)
                try:
                    codes = _add_sample(record, sample_id, parts, masker, samples)
                except RecordRejectedError as error:
                    where = (record.source_file, record.source_line, sample_id)
                    rejects.add(Reject(*where, error.reason, error.detail))
                else:
                    for code in codes:
                        warnings[code] = warnings.get(code, 0) + 1
            if records % _PROGRESS_RECORDS == 0:
                progress()
            if samples.num_samples == parts.limit:
                break
        progress()
        sink.flush()
        sync_file(sink.fileno())
    if records != samples.num_samples + rejects.total:
        raise BugError(f"{records} records, {samples.num_samples} accepted, {rejects.total} rejected")
    counts = Counts(
        records=records,
        accepted=samples.num_samples,
        rejected=dict(sorted(rejects.counts.items())),
        warnings=dict(sorted(warnings.items())),
        tokens=samples.num_tokens,
        supervised_tokens=samples.num_supervised,
        longest=samples.longest,
    )
    return counts, samples.hash.hexdigest()


def _add_sample(
    record: RawRecord, sample_id: str, parts: cache.KeyParts, masker: LossMasker, samples: SampleWriter
) -> tuple[str, ...]:
    """Stores one record; returns its warnings."""
    conversation: Conversation = parse_record(
        record.value,
        sample_id=sample_id,
        source_file=record.source_file,
        source_line=record.source_line,
        style=parts.format,
    )
    masked = masker.mask(conversation)
    input_ids, loss_mask = cut_to_length(masked, parts.max_len, parts.min_supervised, conversation)
    samples.add(conversation, input_ids, loss_mask)
    return masked.warnings


def _hash_files(paths: list[Path], report: Callable[[PrepareProgress], None]) -> tuple[SourceFile, ...]:
    total = sum(path.stat().st_size for path in paths)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        report(PrepareProgress("hash", done, total))

    return tuple(cache.hash_data_file(path, on_bytes) for path in paths)


def _meta(
    folder: Path,
    parts: cache.KeyParts,
    counts: Counts,
    samples_hash: str,
    *,
    template_source: str,
    end_markers: tuple[str, ...],
) -> PreparedMeta:
    samples = folder / SAMPLES_NAME
    return PreparedMeta(
        version=parts.version,
        key=parts.key(),
        data_hash=cache.hash_files(parts.files),
        tokenizer_hash=parts.tokenizer_hash,
        template_hash=parts.template_hash,
        template_source=template_source,
        template_args=parts.template_args,
        mask=parts.mask,
        border_rule=BORDER_RULE,
        end_markers=end_markers,
        max_len=parts.max_len,
        min_supervised=parts.min_supervised,
        limit=parts.limit,
        format=parts.format,
        files=parts.files,
        counts=counts,
        samples_hash=samples_hash,
        samples_bytes=samples.stat().st_size,
        samples_checksum=file_checksum(samples),
        rejected_checksum=file_checksum(folder / REJECTED_NAME),
        libraries=parts.libraries,
    )


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _ignore(_: PrepareProgress) -> None:
    pass
