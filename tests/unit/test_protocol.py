import msgspec
import pytest

from extractor import protocol
from extractor.plan import Geometry
from extractor.taps import select

REPORTS = [
    protocol.Hello(protocol.PROTOCOL_VERSION, 12, 1.5),
    protocol.Stage("load"),
    protocol.Ready(3.5, (protocol.ProofLine("final", 0.0, 1e-5),), {"page_size": 1}, {"torch": "2"}, 10),
    protocol.ShardStarted(3),
    protocol.Held(None),
    protocol.BatchDone(3, 0, 100),
    protocol.ShardDone(3, 2, 100, 40, 5000, 0),
    protocol.ShardFailed(3, "no space", "ENOSPC"),
    protocol.StatesReady(7, 5, (None, "non_finite")),
    protocol.Failed("proof", 7, "message", None, "trace"),
    protocol.Bye(1000),
]
REQUESTS = [
    protocol.WorkShard(4),
    protocol.Finish(),
    protocol.Stop(),
    protocol.Drain(),
    protocol.Hold(),
    protocol.Resume(),
    protocol.Compute(7, (1, 2), b"\1\0\0\0" * 3),
    protocol.Taken(6),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_report_survives_the_wire(report):
    assert protocol.decode_report(protocol.encode(report)) == report


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_request_survives_the_wire(request_):
    assert protocol.decode_request(protocol.encode(request_)) == request_


def test_every_message_type_is_in_its_union_and_tested():
    for base, tested in ((protocol.Report, REPORTS), (protocol.Request, REQUESTS)):
        assert {type(message) for message in tested} == set(base.__subclasses__())


def test_request_with_an_unknown_field_is_refused():
    message = msgspec.msgpack.encode({"type": "WorkShard", "shard": 3, "faster": True})
    with pytest.raises(msgspec.ValidationError, match="faster"):
        protocol.decode_request(message)


def test_report_with_an_unknown_field_is_understood():
    message = msgspec.msgpack.encode({"type": "Bye", "peak_rss_bytes": 3, "mood": "good"})
    assert protocol.decode_report(message) == protocol.Bye(3)


def test_spec_survives_its_file():
    spec = protocol.EngineSpec(
        model_folder="/m",
        trust_remote_code=False,
        allow_unverified_sglang=False,
        dtype="bfloat16",
        device="cuda",
        attention_backend="fa3",
        mem_fraction=0.8,
        sglang_args={"quantization": None, "nested": [1, {"a": 2}]},
        taps=select(num_layers=8, layers=[1, 3], embed=True, final=True, normed=True, convention="after"),
        hidden_size=64,
        store_dtype="bfloat16",
        geometry=Geometry(8192, 10_000, 7),
        max_batch_samples=30,
        prepared="/p",
        num_samples=100,
        output="/o",
        fingerprint="f",
        replica="0",
        writer_threads=8,
        buffers=4,
        endpoint="ipc:///tmp/x",
    )
    assert msgspec.json.decode(msgspec.json.encode(spec), type=protocol.EngineSpec) == spec
