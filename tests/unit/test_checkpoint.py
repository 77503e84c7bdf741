"""Facts about model folders, and the refusals that come before any weight is read."""

import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from extractor import checkpoint
from extractor.errors import PreflightError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def write_weights(path: Path, *names: str, data: bytes = b"\0" * 8) -> None:
    entries = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in names}
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def write_model(folder: Path, config: object = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", "lm_head.weight")
    return folder


def changed(**changes: object) -> dict[str, object]:
    """CONFIG with other values; None takes a key away."""
    merged = CONFIG | changes
    return {key: value for key, value in merged.items() if value is not None}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was created")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    repository = cache / "models--acme--tiny"
    write_model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def test_a_folder_states_its_shape(tmp_path):
    folder = write_model(tmp_path / "m")

    facts = checkpoint.read(folder)

    assert (facts.architecture, facts.model_type) == ("LlamaForCausalLM", "llama")
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (4, 64, 100)
    assert (facts.num_key_value_heads, facts.head_dim) == (2, 8)
    assert facts.max_position_embeddings == 512
    assert facts.dtype == "bfloat16"
    assert facts.config_hash == xxhash.xxh3_128_hexdigest((folder / "config.json").read_bytes())
    assert facts.weight_bytes == (folder / "model.safetensors").stat().st_size
    assert facts.revision is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, None),
        ({"layer_types": ["full_attention"] * 4, "sliding_window": None, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, None),
        ({"rope_parameters": {"rope_type": "yarn"}}, None),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        (
            {"layer_types": ["linear_attention", "full_attention", "mamba"]},
            "layer_types has linear_attention, mamba",
        ),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads is set"),
        ({"mamba_d_state": 128}, "mamba_d_state is set"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern is set"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is set"),
        ({"index_topk": 2048}, "index_topk is set"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters is longrope"),
    ],
)
def test_what_keeps_layers_from_full_attention_is_named_by_its_key(tmp_path, config, said):
    assert checkpoint.read(write_model(tmp_path, CONFIG | config)).not_plain == said


TEXT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
}
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
# What a vision tower declares must never be taken for the language model.
VISION = {"num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "dtype": "float32"}


@pytest.mark.parametrize("key", ["text_config", "language_config", "llm_config"])
def test_a_multimodal_model_is_described_by_its_language_model(tmp_path, key):
    nested = KIMI | {
        key: TEXT | {"dtype": "bfloat16"},
        "vision_config": VISION,
        "vocab_size": 9,
        "hidden_size": 8,
    }

    facts = checkpoint.read(write_model(tmp_path / "m", nested))

    assert (facts.architecture, facts.model_type) == ("KimiK25ForConditionalGeneration", "kimi_k25")
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (61, 7168, 163840)
    assert (facts.max_position_embeddings, facts.dtype) == (262144, "bfloat16")


def test_the_language_model_of_an_omni_model_is_one_level_deeper(tmp_path):
    nested = KIMI | {"thinker_config": {"text_config": TEXT, "vision_config": VISION, "hidden_size": 1}}

    assert checkpoint.read(write_model(tmp_path / "m", nested)).hidden_size == 7168


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_precision_of_the_whole_is_that_of_a_part_which_states_none(tmp_path, key):
    nested = KIMI | {"text_config": TEXT, "vision_config": VISION, key: "bfloat16"}

    assert checkpoint.read(write_model(tmp_path / "m", nested)).dtype == "bfloat16"


def test_compressed_keys_and_values_imply_no_size_of_a_head(tmp_path):
    nested = KIMI | {"text_config": TEXT}
    stated = KIMI | {"text_config": TEXT | {"head_dim": 192}}

    assert checkpoint.read(write_model(tmp_path / "m", nested)).head_dim is None
    assert checkpoint.read(write_model(tmp_path / "n", stated)).head_dim == 192


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (KIMI | {"text_config": TEXT}, None),
        (KIMI | {"text_config": TEXT | {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        (KIMI | {"text_config": TEXT, "quantization_config": {"quant_method": "fp8"}}, "fp8"),
        (changed(compression_config={"quant_method": "compressed-tensors"}), "compressed-tensors"),
        (changed(quantization_config={"quant_algo": "NVFP4"}), "modelopt"),
    ],
)
def test_the_method_of_quantized_weights_is_found_in_the_whole_or_the_part(tmp_path, config, method):
    assert checkpoint.read(write_model(tmp_path / "m", config)).quantization == method


def test_a_quantization_in_a_file_of_its_own_is_found(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')

    assert checkpoint.read(folder).quantization == "modelopt"


def test_files_of_remote_code_are_named_and_not_run(tmp_path):
    folder = write_model(
        tmp_path / "m", KIMI | {"text_config": TEXT, "auto_map": {"AutoConfig": "configuration_x.C"}}
    )
    auto_map = {"AutoTokenizer": ["tokenization_x.T", None], "AutoProcessor": "acme/tools--processing_x.P"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    for name in ("configuration_x.py", "tokenization_x.py"):
        (folder / name).write_text("raise SystemExit('this ran')")

    found = checkpoint.read(folder).remote_code

    assert found == ("acme/tools: processing_x.py", "configuration_x.py", "tokenization_x.py")
    assert checkpoint.read(write_model(tmp_path / "plain")).remote_code == ()


@pytest.mark.parametrize(
    ("names", "tied"), [(["lm_head.weight"], False), (["model.embed_tokens.weight"], True)]
)
def test_tied_embeddings_are_read_from_the_weights_when_the_config_is_silent(tmp_path, names, tied):
    folder = write_model(tmp_path / "m", changed(tie_word_embeddings=None))
    write_weights(folder / "model.safetensors", *names)

    assert checkpoint.read(folder).has_tied_embeddings is tied


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(PreflightError, match=r"config\.json: No such file"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (changed(architectures=None), "architectures is missing"),
        (changed(architectures=[]), r"architectures is \[\]"),
        (changed(num_hidden_layers=None), "num_hidden_layers is missing"),
        (changed(num_hidden_layers="4"), "num_hidden_layers is '4'"),
        (changed(hidden_size=True), "hidden_size is True"),
        (changed(text_config={"hidden_size": 8}), r"text_config\.num_hidden_layers is missing"),
        (changed(thinker_config={"text_config": {}}), r"thinker_config\.text_config\.hidden_size is missing"),
        (changed(text_config="qwen3"), "text_config is 'qwen3'; expected an object"),
        (changed(quantization_config={"bits": 4}), r" quantization_config\.quant_method is missing"),
        (
            KIMI | {"text_config": TEXT | {"quantization_config": []}},
            r"text_config\.quantization_config\.quant_method is missing",
        ),
        ([1], "expected a JSON object"),
    ],
)
def test_a_wrong_config_is_refused_by_key(tmp_path, config, complaint):
    with pytest.raises(PreflightError, match=complaint) as refused:
        checkpoint.read(write_model(tmp_path / "m", config))

    assert "config.json" in str(refused.value)


def test_broken_json_says_where(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text('{"architectures": [')

    with pytest.raises(PreflightError, match=r"config\.json: not valid JSON: .* line 1"):
        checkpoint.read(folder)


def test_a_folder_without_weights_is_refused_with_a_remedy(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model.gguf")

    with pytest.raises(PreflightError, match="no weight files") as refused:
        checkpoint.read(folder)

    assert "model.gguf" in str(refused.value)
    assert refused.value.remedy == "convert the weights to safetensors"


def test_every_file_of_the_index_must_be_there(tmp_path):
    folder = write_model(tmp_path / "m")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights(folder / "model-1.safetensors", "a")

    with pytest.raises(PreflightError, match=r"1 of 2 weight files are missing: model-2\.safetensors"):
        checkpoint.read(folder)


def test_only_indexed_files_count(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "part.safetensors"}})
    )
    write_weights(folder / "part.safetensors", "a")

    assert checkpoint.read(folder).weight_bytes == (folder / "part.safetensors").stat().st_size


def test_a_weight_file_that_was_cut_off_is_found_by_its_header(tmp_path):
    folder = write_model(tmp_path / "m")
    write_weights(folder / "model.safetensors", "a", data=b"\0" * 5)

    with pytest.raises(PreflightError, match="cut off"):
        checkpoint.read(folder)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"]
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)

    with pytest.raises(PreflightError, match=r"model\.safetensors: not a safetensors file"):
        checkpoint.read(folder)


@pytest.mark.usefixtures("no_network")
def test_a_folder_resolves_to_itself(tmp_path):
    assert checkpoint.resolve(str(write_model(tmp_path / "m"))) == tmp_path / "m"


def test_a_folder_has_no_revisions(tmp_path):
    with pytest.raises(PreflightError, match="a folder has no revisions"):
        checkpoint.resolve(str(write_model(tmp_path / "m")), "main")


@pytest.mark.parametrize("path", ["/no/such/folder", "./here", "a/b/c", "owner/na me"])
def test_what_cannot_be_a_hub_id_is_a_missing_folder(path):
    with pytest.raises(PreflightError, match="no such folder"):
        checkpoint.resolve(path)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_hub_id_resolves_offline_to_its_commit(hub_cache, revision):
    folder = checkpoint.resolve("acme/tiny", revision)

    assert folder == hub_cache / "models--acme--tiny" / "snapshots" / COMMIT
    assert checkpoint.read(folder).revision == COMMIT


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("hub_id", "revision"), [("acme/other", None), ("acme/tiny", "v2")])
def test_what_is_not_cached_is_refused_with_the_cache_path(hub_cache, hub_id, revision):
    with pytest.raises(PreflightError, match="not in local cache") as refused:
        checkpoint.resolve(hub_id, revision)

    assert str(hub_cache) in str(refused.value)
    assert refused.value.remedy is not None
    assert f"hf download {hub_id}" in refused.value.remedy


def test_reading_a_model_folder_loads_no_torch(tmp_path):
    program = (
        "import sys; from pathlib import Path; from extractor import checkpoint;"
        "checkpoint.read(checkpoint.resolve(sys.argv[1]));"
        "print(sorted({'torch', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    folder = write_model(tmp_path / "m")

    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"


def test_weights_of_equal_names_and_sizes_are_told_apart_by_their_content(tmp_path):
    first = checkpoint.read(write_model(tmp_path / "a"))
    write_weights(write_model(tmp_path / "b") / "model.safetensors", "lm_head.weight", data=b"\0" * 7 + b"\1")
    other = checkpoint.read(tmp_path / "b")

    assert (first.config_hash, first.weight_bytes) == (other.config_hash, other.weight_bytes)
    assert first.weights_hash != other.weights_hash
    assert checkpoint.read(write_model(tmp_path / "copy")).weights_hash == first.weights_hash


def test_of_a_large_weight_file_header_even_blocks_and_the_end_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 10)
    monkeypatch.setattr(checkpoint, "NUM_BLOCKS", 4)
    header, data = 8 + 92, 4000
    content = bytearray((92).to_bytes(8, "little") + b"h" * 92 + b"\0" * data)
    path = tmp_path / "model.safetensors"

    def hash_with(place: int | None) -> str:
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 1
        path.write_bytes(changed)
        return checkpoint.hash_weights([path])

    whole = hash_with(None)
    for seen in (50, header, header + 1000, header + 3009, header + data - 1):
        assert hash_with(seen) != whole
    assert hash_with(header + 500) == whole
