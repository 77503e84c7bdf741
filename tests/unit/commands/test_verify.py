"""The verb `verify` on small data sets that the real store wrote, with states of a small random model."""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers

from extractor import checkpoint, taps
from extractor.commands import verify
from extractor.commands.output import Output
from extractor.errors import ConfigError, PreflightError, StoreError
from extractor.plan import Geometry
from extractor.reference import Reference
from extractor.store import manifest as manifests
from extractor.store import names
from extractor.store.manifest import Manifest, ModelRecord, TapsRecord, Totals
from extractor.store.pipeline import ShardSpec, WriterPool

VOCAB = 61
GEOMETRY = Geometry(max_tokens=64, shard_tokens=64)
SHARDS = ((0, 1), (2, 3, 4))
"""Sample indices of two shards."""
TAPS = taps.select(num_layers=5, layers=[1, 2], embed=False, final=True, normed=False, convention="after")


@dataclass(frozen=True)
class Sample:
    index: int
    input_ids: np.ndarray

    @property
    def sample_id(self) -> str:
        return f"s{self.index}"

    @property
    def loss_mask(self) -> np.ndarray:
        return np.ones(len(self.input_ids), dtype=np.uint8)


@dataclass(frozen=True)
class Block:
    """Rows of one batch, already in host memory."""

    states: dict[str, torch.Tensor]
    num_samples: int

    @property
    def num_tokens(self) -> int:
        return len(next(iter(self.states.values())))

    def wait(self) -> None:
        """Nothing to wait for."""

    def verdicts(self) -> list[None]:
        return [None] * self.num_samples

    def rows(self, tap: str) -> memoryview:
        return self.states[tap].contiguous().view(-1).view(torch.uint8).numpy().data

    def release(self) -> None:
        """Nothing to release."""


SAMPLES = [
    Sample(index, np.random.default_rng(index).integers(0, VOCAB, 9 + index).astype(np.int32))
    for index in range(5)
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=TAPS.num_layers,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def output(tmp_path: Path, model_folder: Path) -> Path:
    """A whole data set of two shards."""
    return write_output(tmp_path / "out", model_folder)


def write_output(output: Path, model_folder: Path, holds: dict[str, str] | None = None) -> Path:
    """Writes a data set; `holds` plants another boundary under a tap's name."""
    facts = checkpoint.read(model_folder)
    manifest = Manifest(
        model=ModelRecord(
            path=str(model_folder),
            revision=None,
            config_hash=facts.config_hash,
            weights_hash=facts.weights_hash,
            architecture=facts.architecture,
            num_layers=facts.num_layers,
            hidden_size=facts.hidden_size,
        ),
        tokenizer_hash="",
        template_hash="",
        data_hash="",
        samples_hash="",
        prepared_key="",
        data={},
        mask={},
        geometry=GEOMETRY,
        taps=TapsRecord.of(TAPS),
        dtype="float32",
        compute_dtype="float32",
        device="cpu",
        attention_backend=None,
        sglang_args={},
        totals=Totals(
            samples=len(SAMPLES),
            tokens=sum(len(sample.input_ids) for sample in SAMPLES),
            supervised_tokens=sum(len(sample.input_ids) for sample in SAMPLES),
            shards=len(SHARDS),
            rejected=0,
        ),
    )
    output.mkdir()
    manifests.write(output, manifest)
    reference = Reference(model_folder)
    every_tap = [taps.make_tap(k, TAPS.num_layers) for k in range(TAPS.num_layers + 1)]
    pool = WriterPool(1, on_commit=lambda _: None, on_error=lambda _, error: pytest.fail(str(error)))
    for index, members in enumerate(SHARDS):
        samples = [SAMPLES[member] for member in members]
        computed = [reference.states(sample.input_ids, every_tap) for sample in samples]
        states = {
            name: torch.cat([state[(holds or {}).get(name, name)] for state in computed])
            for name in TAPS.names
        }
        spec = ShardSpec(
            output=output,
            index=index,
            samples=members,
            num_tokens=sum(len(sample.input_ids) for sample in samples),
            geometry=GEOMETRY,
            taps=TAPS.taps,
            dtype="float32",
            hidden_size=facts.hidden_size,
            fingerprint=manifests.fingerprint(manifest),
        )
        writer = pool.open_shard(spec)
        writer.submit(Block(states, len(samples)), samples)
        writer.finish()
    pool.close()
    return output


def run(output: Path, **options) -> tuple[int, dict, str]:
    """Exit code, the JSON object, and what was told besides."""
    stdout, stderr = io.StringIO(), io.StringIO()
    settings = {"sample": None, "against": None, "seed": 0, "quick": False, "model_folder": None} | options
    code = verify.run(output, **settings, out=Output(as_json=True, stdout=stdout, stderr=stderr))
    assert stdout.getvalue().count("\n") == 1
    return code, json.loads(stdout.getvalue()), stderr.getvalue()


def test_a_whole_data_set_is_ok(output):
    code, result, text = run(output)

    assert code == 0
    assert (result["ok"], result["shards"], result["samples"], result["damaged"]) == (True, 2, 5, [])
    assert "max_rel_err" not in result
    assert text.endswith("ok\n")


def test_recomputed_samples_are_reported_per_tap(output):
    code, result, _ = run(output, sample=3, against="transformers")

    assert code == 0
    assert result["compared_samples"] == 3
    assert result["max_rel_err"] == {"layer_001": 0.0, "layer_002": 0.0, "final": 0.0}
    assert result["bound"] == dict.fromkeys(TAPS.names, 1e-5)


def test_more_samples_than_are_stored_compares_all(output):
    assert run(output, sample=99, against="transformers")[1]["compared_samples"] == 5


def test_the_same_seed_draws_the_same_samples_and_every_shard_can_be_drawn(output):
    drawn = [tuple(sample.sample_index for sample in verify.draw(output, 2, seed)) for seed in range(40)]

    assert drawn == [
        tuple(sample.sample_index for sample in verify.draw(output, 2, seed)) for seed in range(40)
    ]
    assert {index for pair in drawn for index in pair} == {0, 1, 2, 3, 4}


def test_a_tap_that_holds_the_layer_before_is_named_and_fails(tmp_path, model_folder):
    output = write_output(tmp_path / "out", model_folder, holds={"layer_002": "layer_001"})

    code, result, text = run(output, against="transformers")

    assert code == 1
    assert result["failed_taps"] == {"layer_002": "layer_002 looks like layer_001: one layer early"}
    assert "WRONG: layer_002 looks like layer_001" in text


def test_a_damaged_file_fails_and_nothing_is_recomputed(output):
    path = names.shard_folder(output, 1) / names.tap_file("final")
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)

    code, result, _ = run(output, against="transformers")

    assert code == 1
    assert [damage["path"] for damage in result["damaged"]] == [str(path)]
    assert "max_rel_err" not in result


def test_a_missing_shard_fails(output):
    folder = names.shard_folder(output, 0)
    folder.rename(output / "elsewhere")

    code, result, text = run(output)

    assert (code, result["ok"], result["missing_shards"]) == (1, False, [0])
    assert "1 planned shards are not there: 0" in text


def test_a_model_that_has_moved_can_be_named_but_another_model_cannot(tmp_path, output, model_folder):
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in model_folder.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    assert run(output, sample=1, against="transformers", model_folder=moved)[0] == 0

    (moved / "config.json").write_text((moved / "config.json").read_text() + "\n")
    with pytest.raises(PreflightError, match="proves nothing"):
        run(output, sample=1, against="transformers", model_folder=moved)


@pytest.mark.parametrize("options", [{"sample": 4}, {"sample": 0, "against": "transformers"}])
def test_samples_without_an_oracle_are_a_usage_error(output, options):
    with pytest.raises(ConfigError, match="--sample"):
        run(output, **options)


def test_states_that_are_not_finite_are_null_in_json(output, monkeypatch):
    broken = verify.draw(output, 1, 0)[0]
    broken.states["final"][0] = float("nan")
    monkeypatch.setattr(verify, "draw", lambda *_: [broken])

    code, result, _ = run(output, against="transformers")

    assert code == 1
    assert result["max_rel_err"]["final"] is None


def test_a_manifest_that_states_a_tap_that_is_not_stored_is_damage_and_nothing_is_recomputed(output):
    stated = manifests.read(output)
    more = taps.select(
        num_layers=5, layers=[0, 1, 2], embed=False, final=True, normed=False, convention="after"
    )
    (output / names.DATASET).write_bytes(
        manifests.encode(msgspec.structs.replace(stated, taps=TapsRecord.of(more)))
    )

    code, result, text = run(output, against="transformers")

    assert code == 1
    assert [damage["kind"] for damage in result["damaged"]] == ["differs_from_shards"]
    assert "not recomputed" in text


def test_what_is_stored_as_served_without_the_residual_is_not_compared_with_transformers(output):
    stated = manifests.read(output)
    served = msgspec.structs.replace(stated.taps, as_served=True, holds="branch")
    (output / names.DATASET).write_bytes(manifests.encode(msgspec.structs.replace(stated, taps=served)))

    with pytest.raises(PreflightError, match="not the residual stream"):
        verify.recompute(output, num_samples=1, seed=0, model_folder=None, out=Output(as_json=True))


def test_a_folder_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(StoreError, match="never-made: no such folder"):
        run(tmp_path / "never-made")
