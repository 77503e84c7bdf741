"""What the tests of the data set package share: the small tokenizer, the case files, and a prepare call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dataset_bench import DATA, Bench

from extractor.config import DataSection
from extractor.dataset.prepare import prepare
from extractor.dataset.prepared import PreparedDataset
from extractor.dataset.templates import load_tokenizer


@pytest.fixture(scope="session")
def cases() -> Path:
    return DATA / "cases"


@pytest.fixture(scope="session")
def model_folder(cases: Path) -> Path:
    return cases / "_common" / "tok"


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Any:
    return load_tokenizer(model_folder, trust_remote_code=False)


@pytest.fixture(scope="session")
def bench(tokenizer: Any) -> Bench:
    return Bench(tokenizer)


@pytest.fixture
def prepare_lines(tmp_path: Path, model_folder: Path):
    """Prepares a file with the given lines (objects or raw bytes)."""

    def run(lines: list[Any], *, template: Path | None = None, **options: Any) -> PreparedDataset:
        path = tmp_path / "lines.jsonl"
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(raw) + b"\n")
        chosen = template or DATA / "templates" / "chatml.jinja"
        data = DataSection(files=(str(path),), template=str(chosen), **options)
        return prepare(data, model_folder, trust_remote_code=False, cache_dir=tmp_path / "cache")

    return run


@pytest.fixture
def prepare_case(tmp_path: Path, cases: Path, model_folder: Path):
    """Prepares a file of a case with a template of that case (or ChatML)."""

    def run(case: str, file: str = "data.jsonl", template: str | None = "template.jinja", **options: Any):
        chosen = DATA / "templates" / "chatml.jinja" if template is None else cases / case / template
        options.setdefault("reject_limit", 1.0)
        data = DataSection(files=(str(cases / case / file),), template=str(chosen), **options)
        return prepare(data, model_folder, trust_remote_code=False, cache_dir=tmp_path / "cache")

    return run
