import msgspec
import pytest
from store_support import TAPS, Dataset, make_manifest

from extractor.errors import AccessError, LeaseError, StoreError
from extractor.plan import Geometry
from extractor.store import manifest, names
from extractor.store.atomic import replace_file
from extractor.store.faults import FaultyFileSystem, Killed, fail_on, kill_at, no_fault
from extractor.store.manifest import EnvVariable, ShardRange, TapsRecord
from extractor.taps import select

DATASET = Dataset([3, 4])
BASE = DATASET.manifest

OTHER_TAPS = TapsRecord.of(
    select(num_layers=8, layers=(2,), embed=True, final=True, normed=True, convention="after")
)


def test_a_manifest_survives_writing(tmp_path):
    full = msgspec.structs.replace(
        BASE,
        versions={"torch": "2.14.1"},
        sglang={"disable_radix_cache": True},
        env={"NCCL_PROTO": EnvVariable("LL", "preset")},
        shards=(ShardRange(first=0, last=1, taps=TAPS.names),),
    )
    manifest.write(tmp_path, full)
    there = manifest.read(tmp_path)
    assert there == msgspec.structs.replace(full, fingerprint=manifest.fingerprint(full))


def test_equal_manifests_have_equal_bytes():
    assert manifest.encode(make_manifest(DATASET)) == manifest.encode(make_manifest(DATASET))


def test_the_last_state_is_said_to_be_before_the_norm():
    assert msgspec.json.decode(manifest.encode(BASE))["last_state"] == "pre_norm"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"model": msgspec.structs.replace(BASE.model, path="/models/b")},
            'model.path: "/models/tiny" -> "/models/b"',
        ),
        ({"model": msgspec.structs.replace(BASE.model, config_hash="c1")}, 'model.config_hash: "c0" -> "c1"'),
        ({"model": msgspec.structs.replace(BASE.model, revision="r")}, 'model.revision: (none) -> "r"'),
        (
            {"model": msgspec.structs.replace(BASE.model, weights_hash="w1")},
            'model.weights_hash: "w0" -> "w1"',
        ),
        ({"tokenizer_hash": "x"}, 'tokenizer_hash: "t0" -> "x"'),
        ({"template_hash": "x"}, 'template_hash: "p0" -> "x"'),
        ({"data_hash": "x"}, 'data_hash: "d0" -> "x"'),
        ({"samples_hash": "x"}, 'samples_hash: "s0" -> "x"'),
        ({"mask": {"turns": "last", "end_of_turn": True}}, 'data.mask.turns: "all" -> "last"'),
        ({"geometry": Geometry(32, 24)}, "plan.max_tokens: 16 -> 32"),
        ({"geometry": Geometry(16, 24, 7)}, "plan.seed: (none) -> 7"),
        ({"dtype": "float32"}, 'dtype: "bfloat16" -> "float32"'),
        ({"compute_dtype": "float32"}, 'compute_dtype: "bfloat16" -> "float32"'),
        ({"device": "cuda"}, 'device: "cpu" -> "cuda"'),
        ({"attention_backend": "triton"}, 'attention_backend: (none) -> "triton"'),
        ({"tp": 2}, "model.tp: 1 -> 2"),
        (
            {"taps": TapsRecord.of(msgspec.structs.replace(TAPS, as_served=True), served="branch")},
            'taps.holds: (none) -> "branch"',
        ),
    ],
)
def test_what_changes_the_shards_changes_the_fingerprint_and_is_named(tmp_path, change, line):
    other = make_manifest(DATASET, **change)
    assert manifest.fingerprint(other) != manifest.fingerprint(BASE)
    assert manifest.differences(BASE, other) == [line]
    manifest.write(tmp_path, BASE)
    before = (tmp_path / names.DATASET).read_bytes()
    with pytest.raises(LeaseError) as caught:
        manifest.write(tmp_path, other)
    assert line in caught.value.message
    assert caught.value.remedy
    assert (tmp_path / names.DATASET).read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"taps": OTHER_TAPS},
        {"prepared_key": "k1"},
        {"versions": {"torch": "3"}},
        {"sglang": {"x": 1}},
        {"env": {"NCCL_ALGO": EnvVariable("Ring", "shell")}},
        {"shards": (ShardRange(first=0, last=0, taps=("final",)),)},
    ],
)
def test_what_leaves_the_shards_as_they_are_may_change(tmp_path, change):
    other = make_manifest(DATASET, **change)
    assert manifest.fingerprint(other) == manifest.fingerprint(BASE)
    assert manifest.differences(BASE, other) == []
    manifest.write(tmp_path, BASE)
    manifest.write(tmp_path, other)


def test_other_arguments_of_sglang_are_another_data_set():
    dummy = make_manifest(DATASET, sglang_args={"load_format": "dummy"})
    assert manifest.fingerprint(dummy) != manifest.fingerprint(BASE)
    assert 'model.sglang.load_format: (none) -> "dummy"' in manifest.differences(BASE, dummy)


def test_a_data_set_from_before_there_were_several_ranks_is_one_of_a_single_rank(tmp_path):
    manifest.write(tmp_path, BASE)
    path = tmp_path / names.DATASET
    path.write_bytes(path.read_bytes().replace(b'  "tp": 1,\n', b""))
    assert b'"tp"' not in path.read_bytes()
    old = manifest.read(tmp_path)
    assert (old.tp, old.fingerprint) == (1, manifest.fingerprint(BASE))


FIRST = {
    "versions": {"sglang": "0.5.1", "torch": "2"},
    "sglang": {"device": "cpu"},
    "env": {"NCCL_PROTO": EnvVariable("LL", "preset")},
}


def test_a_first_start_records_its_environment():
    first = make_manifest(DATASET, **FIRST)
    assert manifest.with_environment(None, first) == (first, [])
    assert manifest.with_environment(BASE, first) == (first, [])


def test_the_same_environment_again_leaves_the_same_bytes(tmp_path):
    first = make_manifest(DATASET, **FIRST)
    manifest.write(tmp_path, first)
    again, changes = manifest.with_environment(manifest.read(tmp_path), first)
    assert changes == []
    assert manifest.encode(again) == manifest.encode(first)


def test_another_environment_is_told_and_kept_beside_the_first(tmp_path):
    first = make_manifest(DATASET, **FIRST)
    newer = make_manifest(DATASET, **(FIRST | {"versions": {"sglang": "0.6.0", "torch": "2"}}))
    manifest.write(tmp_path, first)
    upgraded, changes = manifest.with_environment(manifest.read(tmp_path), newer)
    assert changes == ['versions.sglang: "0.5.1" -> "0.6.0"']
    assert (upgraded.versions, [later.versions for later in upgraded.later]) == (
        first.versions,
        [newer.versions],
    )
    manifest.write(tmp_path, upgraded)
    assert manifest.with_environment(manifest.read(tmp_path), newer)[1] == []
    back, changes = manifest.with_environment(manifest.read(tmp_path), first)
    assert changes == ['versions.sglang: "0.6.0" -> "0.5.1"']
    assert back.later == upgraded.later


def test_ids_are_recorded_in_both_conventions():
    assert BASE.taps.ids_after == (1, 3, 5, 7)
    assert BASE.taps.ids_before == (2, 4, 6, 8)
    assert BASE.taps.draft_config == {"sglang": (1, 3, 5), "vllm": (2, 4, 6)}


def test_what_is_held_is_the_boundary_unless_it_is_taken_as_served():
    assert TapsRecord.of(TAPS, served="branch").holds == "boundary"
    assert TapsRecord.of(msgspec.structs.replace(TAPS, as_served=True)).holds == "boundary"
    assert TapsRecord.of(msgspec.structs.replace(TAPS, as_served=True), served="branch").holds == "branch"


def test_a_missing_manifest_is_named(tmp_path):
    assert manifest.read_if_any(tmp_path) is None
    with pytest.raises(StoreError, match=r"dataset\.json: the file is missing") as caught:
        manifest.read(tmp_path)
    assert caught.value.code == "file_missing"


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"format_version": 1}', b"\xff\xfe", b"[]", b'{"format_version":"1"}']
)
def test_a_damaged_manifest_is_refused_and_never_replaced(tmp_path, data):
    (tmp_path / names.DATASET).write_bytes(data)
    with pytest.raises(StoreError, match="damaged") as caught:
        manifest.write(tmp_path, BASE)
    assert caught.value.code == "manifest_invalid"
    assert (tmp_path / names.DATASET).read_bytes() == data


def test_a_manifest_of_a_later_version_is_refused_with_both_versions(tmp_path):
    (tmp_path / names.DATASET).write_bytes(b'{"format_version": 2, "something": "new"}')
    with pytest.raises(StoreError, match="format version 2; this tapdeck reads version 1"):
        manifest.read(tmp_path)


def test_a_disk_error_leaves_the_old_manifest(tmp_path):
    manifest.write(tmp_path, BASE)
    before = (tmp_path / names.DATASET).read_bytes()
    changed = make_manifest(DATASET, versions={"torch": "3"})
    for method in ("create", "write_at", "sync", "close", "rename"):
        with pytest.raises(StoreError, match=r"dataset\.json: cannot be written"):
            manifest.write(tmp_path, changed, files=FaultyFileSystem(fail_on(method)))
        assert (tmp_path / names.DATASET).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [names.DATASET]


def test_a_folder_without_access_is_an_access_error(tmp_path):
    with pytest.raises(AccessError, match="Read-only file system"):
        manifest.write(tmp_path, BASE, files=FaultyFileSystem(fail_on("create", code=30)))


def test_a_kill_at_any_call_leaves_old_or_new_contents(tmp_path):
    probe = FaultyFileSystem(no_fault)
    replace_file(tmp_path / "f", b"old", files=probe)
    for number in range(len(probe.calls)):
        (tmp_path / "f").write_bytes(b"old")
        files = FaultyFileSystem(kill_at(number))
        with pytest.raises(Killed):
            replace_file(tmp_path / "f", b"new", files=files)
        files.close_all()
        assert (tmp_path / "f").read_bytes() in {b"old", b"new"}
    replace_file(tmp_path / "f", b"newer")
    assert (tmp_path / "f").read_bytes() == b"newer"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_shards_are_summed_up_as_ranges():
    stored = [(4, ("a",)), (0, ("a", "b")), (1, ("a", "b")), (2, ("a",)), (3, ("a",)), (6, ("a",))]
    assert manifest.shard_ranges(stored) == (
        ShardRange(first=0, last=1, taps=("a", "b")),
        ShardRange(first=2, last=4, taps=("a",)),
        ShardRange(first=6, last=6, taps=("a",)),
    )
