"""The same command again: nothing is done twice, and what was damaged is done again, alone."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pexpect
import pytest

from tests.support import outputs
from tests.support.job import MAX_TOKENS, SHARD_BYTES, Inputs, Reference
from tests.support.product import COMMAND_LINE, START_S, Finished, Tapdeck

pytestmark = pytest.mark.slow

TRUNCATED, MISSING, EDITED, FLIPPED = "000001", "000003", "000004", "000007"


@dataclass(frozen=True)
class Repaired:
    """A finished data set whose files were damaged, and the run that was started again on a terminal.

    Attributes:
        quick: `verify --quick` of the damaged data set.
        full: `verify --json` of it.
        screen: everything that the terminal received.
        before, after: stamps of the files under `shards/`.
    """

    output: Path
    quick: Finished
    full: Finished
    screen: str
    code: int
    before: dict[str, outputs.Stamp]
    after: dict[str, outputs.Stamp]


def copy_of(reference: Reference, inputs: Inputs, folder: Path) -> tuple[Path, Path]:
    """A copy of the finished data set and the configuration that goes on with it."""
    output = folder / "copy"
    shutil.copytree(reference.output, output)
    return output, inputs.config(folder / "run.toml", output)


def damage(output: Path) -> None:
    """Four shards, each in another way."""
    shards = output / "shards"
    cut = shards / TRUNCATED / "layer_009.safetensors"
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size // 2)
    (shards / MISSING / "final.safetensors").unlink()
    record = json.loads((shards / EDITED / "shard.json").read_text())
    record["files"]["layer_001.safetensors"]["bytes"] += 4
    (shards / EDITED / "shard.json").write_text(json.dumps(record))
    flipped = shards / FLIPPED / "layer_001.safetensors"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)


def on_a_terminal(tapdeck: Tapdeck, *args: str | Path) -> tuple[str, int]:
    """Everything that a terminal receives from a command, and its exit code."""
    program, *first = COMMAND_LINE
    child = pexpect.spawn(
        program,
        [*first, *map(str, args)],
        env={**tapdeck.environment, "TERM": "xterm-256color"},
        cwd=str(tapdeck.home),
        dimensions=(40, 120),
        encoding="utf-8",
        timeout=START_S,
    )
    try:
        child.expect(pexpect.EOF)
        return child.before, child.wait()
    finally:
        child.close(force=True)


@pytest.fixture(scope="module")
def repaired(
    tapdeck: Tapdeck, inputs: Inputs, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Repaired:
    output, config = copy_of(reference, inputs, tmp_path_factory.mktemp("repaired"))
    damage(output)
    quick = tapdeck.run("verify", output, "--quick")
    full = tapdeck.run("verify", output, "--json")
    # As `verify` says: a resume reads no checksums.
    shutil.rmtree(output / "shards" / FLIPPED)
    before = outputs.stamps(output / "shards")
    screen, code = on_a_terminal(tapdeck, "extract", config)
    return Repaired(output, quick, full, screen, code, before, outputs.stamps(output / "shards"))


def test_a_complete_run_started_again_loads_no_model_and_changes_no_shard(
    fresh_tapdeck, reference, inputs, tmp_path
):
    output, config = copy_of(reference, inputs, tmp_path)
    before = outputs.stamps(output / "shards")

    finished = fresh_tapdeck.run("extract", config, "--json").require(0)

    assert f"0 of {reference.num_shards} shards to do" in finished.stderr
    assert "worker: pid" not in finished.stderr
    assert list(fresh_tapdeck.state.rglob("replica-*")) == []
    assert outputs.stamps(output / "shards") == before
    assert finished.json["complete"] is True
    assert finished.json["shards_computed"] == 0
    assert finished.json["bytes"] == reference.finished.json["bytes"]


def test_the_flags_of_the_older_script_describe_the_same_run(tapdeck, reference, inputs, tmp_path):
    output, _ = copy_of(reference, inputs, tmp_path)
    flags = {
        "--model-path": inputs.model,
        "--layer-ids": "1,9",
        "--max-seq-len": MAX_TOKENS + 1,
        "--tp-size": 1,
        "--data": inputs.conversations,
        "--output": output,
        "--layout": "shards",
    }
    settings = {
        "model.device": "cpu",
        "model.dtype": "float32",
        "batch.max_tokens": MAX_TOKENS,
        "output.shard_bytes": SHARD_BYTES,
    }

    finished = tapdeck.run(
        "extract",
        *(str(word) for flag in flags.items() for word in flag),
        *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
    ).require(0)

    assert f"0 of {reference.num_shards} shards to do" in finished.stderr


def test_a_prepared_cache_that_was_deleted_is_made_again_and_changes_nothing(
    fresh_tapdeck, reference, inputs, tmp_path
):
    output, config = copy_of(reference, inputs, tmp_path)
    before = outputs.contents(output)
    fresh_tapdeck.environment["XDG_CACHE_HOME"] = str(tmp_path / "empty-cache")

    finished = fresh_tapdeck.run("extract", config).require(0)

    assert f"0 of {reference.num_shards} shards to do" in finished.stderr
    assert list((tmp_path / "empty-cache" / "tapdeck").iterdir()) != []
    assert outputs.contents(output) == before


def test_a_quick_verify_finds_wrong_sizes_and_missing_files_but_no_flipped_byte(repaired):
    said = repaired.quick.require(1).stdout

    for shard in (TRUNCATED, MISSING, EDITED):
        assert f"shards/{shard}/" in said
    assert f"shards/{FLIPPED}/" not in said


def test_verify_finds_a_flipped_byte_and_every_other_damage_with_its_file(repaired):
    found = repaired.full.require(1).json

    kinds = {
        (Path(item["path"]).parent.name, Path(item["path"]).name, item["kind"]) for item in found["damaged"]
    }
    assert (FLIPPED, "layer_001.safetensors", "checksum") in kinds
    assert {shard for shard, _, _ in kinds} == {TRUNCATED, MISSING, EDITED, FLIPPED}
    assert found["ok"] is False
    assert found["complete"] is False


def test_verify_says_how_to_repair(repaired):
    damaged = ", ".join([TRUNCATED, MISSING, EDITED, FLIPPED])

    assert f"to repair: remove {damaged} from {repaired.output / 'shards'}" in repaired.full.stderr


def test_a_resume_names_each_damage_and_does_only_those_shards_again(repaired, reference):
    changed = {
        Path(name).parts[0]
        for name in repaired.before.keys() | repaired.after.keys()
        if repaired.before.get(name) != repaired.after.get(name)
    }

    assert repaired.code == 0, repaired.screen
    for shard in (TRUNCATED, MISSING, EDITED):
        assert f"shard {int(shard)} is damaged and will be computed again" in repaired.screen
    assert f"4 of {reference.num_shards} shards to do" in repaired.screen
    assert changed == {TRUNCATED, MISSING, EDITED, FLIPPED}


def test_repaired_shards_are_byte_identical_to_undamaged_ones(repaired, reference):
    outputs.require_same_bytes(repaired.output / "shards", reference.output / "shards")


def test_a_terminal_gets_a_bar_with_percentage_shards_and_rate(repaired):
    assert "\x1b[" in repaired.screen
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", repaired.screen)
    lines = [line for line in re.split(r"[\r\n]+", plain) if "tokens/s" in line and " %" in line]
    assert lines
    assert re.search(r"\d/4 shards .* \d+ % +[\d,]+ tokens/s", lines[-1])
    assert "complete: every planned sample is stored" in plain
