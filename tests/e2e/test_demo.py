"""`tapdeck demo`: from nothing to a verified data set, and again on what is there.

Takes the real small model from the user's cache folder, where the first demo on a machine puts it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import pytest

from tests.support import outputs
from tests.support.product import Finished, Tapdeck

NUM_SAMPLES = 8
DOWNLOAD_S = 600.0
KEYS = {
    "run", "output", "samples", "tokens", "supervised_tokens", "rejected", "quarantined", "shards", "bytes",
    "load_s", "seconds", "tokens_per_s", "peak_rss_bytes", "verify",
}  # fmt: skip


@dataclass(frozen=True)
class Demo:
    """The demo, twice in one folder."""

    folder: Path
    first: Finished
    second: Finished
    texts: tuple[bytes, bytes]
    stamps: tuple[dict[str, outputs.Stamp], dict[str, outputs.Stamp]]
    processes: list[int]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    home = tmp_path_factory.mktemp("demo")
    product = Tapdeck(home / "tapdeck", XDG_CACHE_HOME=str(platformdirs.user_cache_path()))
    folder = home / "folder"
    args = ("demo", "--headless", "--samples", str(NUM_SAMPLES), "--json", "--dir", folder)
    try:
        first = product.run(*args, deadline_s=DOWNLOAD_S)
        seen = [((folder / "conversations.jsonl").read_bytes(), outputs.stamps(folder / "data" / "shards"))]
        second = product.run(*args)
        seen.append(
            ((folder / "conversations.jsonl").read_bytes(), outputs.stamps(folder / "data" / "shards"))
        )
        texts, stamps = zip(*seen, strict=True)
        return Demo(folder, first, second, texts, stamps, product.processes())
    finally:
        product.close()


def test_the_demo_ends_with_a_verified_data_set(demo):
    said = demo.first.require(0).json

    assert said.keys() >= KEYS
    assert said["samples"] == NUM_SAMPLES
    assert said["complete"] is True
    assert said["verify"]["ok"] is True
    assert said["verify"]["compared_samples"] == NUM_SAMPLES
    assert max(said["verify"]["max_rel_err"].values()) < 1e-5
    assert said["bytes"] == sum(
        stamp.size for name, stamp in demo.stamps[0].items() if name.endswith(".safetensors")
    )


def test_the_demo_says_what_to_do_next(demo):
    assert f"tapdeck export {demo.folder / 'data'} OUT --layout speculators-v1" in demo.first.stderr


def test_the_demo_on_a_finished_folder_computes_nothing_and_is_verified_again(demo):
    said = demo.second.require(0).json

    assert f"0 of {said['shards']} shards to do" in demo.second.stderr
    assert "complete: every planned sample is stored" in demo.second.stderr
    assert said["shards_computed"] == 0
    assert said["verify"]["ok"] is True
    assert demo.stamps[1] == demo.stamps[0]


def test_the_text_of_the_demo_is_the_same_every_time_and_real(demo):
    first, second = demo.texts

    assert first == second
    records = [json.loads(line) for line in first.splitlines()]
    assert len(records) == NUM_SAMPLES
    answers = [m["content"] for record in records for m in record["messages"] if m["role"] == "assistant"]
    # Documentation, not filler: words, and no answer twice.
    assert len(set(answers)) == len(answers)
    assert all(len(answer.split()) > 10 for answer in answers)


def test_the_demo_leaves_no_process(demo):
    assert demo.processes == []
