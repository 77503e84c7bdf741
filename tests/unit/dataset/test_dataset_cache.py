"""The cache of prepared data sets: what the key covers, damage, kills, and two processes at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dataset_bench import DATA

from extractor.config import DataSection, MaskSection
from extractor.dataset import cache
from extractor.dataset.prepare import prepare
from extractor.errors import AccessError, DatasetError, DiskSpaceError

LINE = {
    "id": "k",
    "messages": [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}],
}


class Workshop:
    """A data file, a template and a tokenizer that tests may change."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = folder
        self.data = folder / "data.jsonl"
        self.data.write_text(json.dumps(LINE) + "\n")
        self.template = folder / "template.jinja"
        shutil.copy(DATA / "templates" / "chatml.jinja", self.template)
        self.model = folder / "model"
        shutil.copytree(tokenizer, self.model)
        self.cache = folder / "cache"

    def prepare(self, *, trust_remote_code=False, **options):
        section = DataSection(files=(str(self.data),), template=str(self.template), **options)
        return prepare(section, self.model, trust_remote_code=trust_remote_code, cache_dir=self.cache)


@pytest.fixture
def workshop(tmp_path, model_folder):
    return Workshop(tmp_path, model_folder)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


CHANGES = {
    "dataset bytes": lambda shop: append(shop.data, "\n"),
    "template text": lambda shop: append(shop.template, "{# new #}"),
    "tokenizer file": lambda shop: append(shop.model / "tokenizer.json", "\n"),
    "data file name": lambda shop: shop.__setattr__("data", shop.data.rename(shop.folder / "other.jsonl")),
}
OPTIONS = [
    {"max_len": 100},
    {"mask": MaskSection(turns="last")},
    {"mask": MaskSection(end_of_turn=False)},
    {"mask": MaskSection(inserted_reasoning=True)},
    {"template_args": {"thinking": True}},
    {"format": "messages"},
    {"limit": 5},
    {"min_supervised": 2},
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_contents_give_another_key(workshop, change):
    before = workshop.prepare().meta.key

    CHANGES[change](workshop)

    assert workshop.prepare().meta.key != before


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_every_option_that_changes_the_result_gives_another_key(workshop, options):
    assert workshop.prepare(**options).meta.key != workshop.prepare().meta.key


@pytest.mark.parametrize("name", ["helper.py", "parts/rules.py"])
def test_all_code_in_the_folder_counts_where_it_may_run(workshop, name):
    (workshop.model / "parts").mkdir()
    (workshop.model / name).write_text("A = 1\n")
    keys = {trust: workshop.prepare(trust_remote_code=trust).meta.key for trust in (False, True)}

    (workshop.model / name).write_text("A = 2\n")

    assert workshop.prepare(trust_remote_code=True).meta.key != keys[True]
    assert workshop.prepare(trust_remote_code=False).meta.key == keys[False]


@pytest.mark.parametrize("library", ["transformers", "tokenizers", "jinja2"])
def test_another_version_of_a_library_gives_another_key_and_equal_samples_the_same_hash(
    workshop, monkeypatch, library
):
    before = workshop.prepare().meta
    known = {name: before.libraries[name] for name in before.libraries}
    monkeypatch.setattr("extractor.dataset.prepare.version", (known | {library: "999"}).__getitem__)

    after = workshop.prepare().meta

    assert after.key != before.key
    assert after.samples_hash == before.samples_hash


def test_other_masks_or_samples_have_another_hash(workshop):
    before = workshop.prepare().meta.samples_hash

    assert workshop.prepare(mask=MaskSection(end_of_turn=False)).meta.samples_hash != before
    append(workshop.data, json.dumps(LINE | {"id": "l"}) + "\n")
    assert workshop.prepare().meta.samples_hash != before


def test_modification_time_folder_and_seed_keep_the_key(workshop, tmp_path, model_folder):
    first = workshop.prepare()
    for path in (workshop.data, workshop.template, workshop.model / "tokenizer.json"):
        os.utime(path, (1, 1))
    (tmp_path / "elsewhere").mkdir()
    moved = Workshop(tmp_path / "elsewhere", model_folder)

    assert workshop.prepare(seed=3, reject_limit=0.5).meta.key == first.meta.key
    assert moved.prepare().meta.key == first.meta.key


def test_a_hit_does_no_work(workshop, monkeypatch):
    first = workshop.prepare()
    monkeypatch.setattr("extractor.dataset.prepare._write_samples", None)

    assert workshop.prepare().path == first.path


@pytest.mark.parametrize("name", ["samples.arrow", "rejected.jsonl", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_a_damaged_entry_is_built_again(workshop, name, damage):
    append(workshop.data, "broken\n")
    good = workshop.prepare(reject_limit=1.0)
    path = good.path / name
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 0x80]) + content[middle + 1 :]
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": flipped, "cut": content[:middle], "grow": content + b"x"}[damage])

    again = workshop.prepare(reject_limit=1.0)

    assert (again.path / name).read_bytes() == content
    assert again.sample(0).sample_id == "k"


def test_a_stray_file_under_the_entry_name_is_replaced(workshop):
    key = workshop.prepare().path
    shutil.rmtree(key)
    key.mkdir()

    assert workshop.prepare().sample(0).sample_id == "k"


def test_equal_input_gives_equal_bytes(workshop, tmp_path):
    first = workshop.prepare().path
    contents = {path.name: path.read_bytes() for path in first.iterdir()}
    shutil.rmtree(workshop.cache)

    second = workshop.prepare().path

    assert {path.name: path.read_bytes() for path in second.iterdir()} == contents


def test_a_file_that_changes_while_it_is_read_is_refused(workshop, monkeypatch):
    original = cache.hash_data_file

    def hash_then_change(path, on_bytes):
        found = original(path, on_bytes)
        append(path, json.dumps(LINE) + "\n")
        return found

    monkeypatch.setattr(cache, "hash_data_file", hash_then_change)

    with pytest.raises(DatasetError, match="changed while it was read"):
        workshop.prepare()
    assert [path for path in workshop.cache.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(("number", "error"), [(28, DiskSpaceError), (30, AccessError)])
def test_a_full_or_read_only_disk_is_named_and_leaves_nothing(workshop, monkeypatch, number, error):
    def fail(*_args):
        raise OSError(number, os.strerror(number), "samples.arrow")

    monkeypatch.setattr("extractor.dataset.writer.SampleWriter._flush", fail)

    with pytest.raises(error, match=r"samples\.arrow"):
        workshop.prepare()
    assert [path for path in workshop.cache.iterdir() if path.is_dir()] == []


CHILD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from extractor.dataset import cache
from extractor.dataset.masks import MaskOptions
from extractor.dataset.prepared import Counts, PreparedMeta, file_checksum
from extractor.dataset.records import Conversation
from extractor.dataset.writer import SampleWriter, write_meta

mode, folder = sys.argv[1], Path(sys.argv[2])

def build(part):
    with (folder / "built.txt").open("a") as log:
        log.write("x")
    (part / "rejected.jsonl").write_bytes(b"")
    with SampleWriter(part) as writer:
        for n in range(5000):
            writer.add(Conversation(str(n), "f", n + 1, ()), np.arange(50, dtype=np.int32), np.ones(50, np.uint8))
            if mode == "kill" and n == 4500:
                os.kill(os.getpid(), signal.SIGKILL)
    samples = part / "samples.arrow"
    write_meta(part, PreparedMeta(1, "k", "", "", "", "", {}, MaskOptions(), "", (), 1, 1, None, "auto", (),
        Counts(5000, 5000, {}, {}, 250000, 250000, 50), "", samples.stat().st_size, file_checksum(samples),
        file_checksum(part / "rejected.jsonl"), {}))

print(len(cache.open_or_build(folder / "cache", "k", build)))
"""


def start(mode: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, mode, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_build_an_entry_once(tmp_path):
    children = [start("build", tmp_path) for _ in range(2)]

    results = [child.communicate(timeout=60) for child in children]

    assert [out.strip() for out, _ in results] == ["5000", "5000"], results
    assert (tmp_path / "built.txt").read_text() == "x"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".k.lock", "k"]


def test_a_kill_leaves_no_entry_and_its_remains_are_removed(tmp_path):
    killed = start("kill", tmp_path)
    killed.communicate(timeout=60)
    names = [path.name for path in (tmp_path / "cache").iterdir()]

    after = start("build", tmp_path)
    out, err = after.communicate(timeout=60)

    assert killed.returncode == -signal.SIGKILL
    assert "k" not in names
    assert any(name.endswith(".part") for name in names)
    assert out.strip() == "5000", err
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".k.lock", "k"]


def test_without_file_locks_the_first_to_finish_wins(workshop, monkeypatch):
    def no_locks(*_args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    original = cache._publish

    def publish_second(part, entry):
        shutil.copytree(part, entry)
        return original(part, entry)

    monkeypatch.setattr(cache, "_publish", publish_second)

    assert workshop.prepare().sample(0).sample_id == "k"
    assert [path.name for path in workshop.cache.iterdir() if path.name.endswith(".part")] == []
