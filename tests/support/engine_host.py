"""Runs checks against a real engine in a process of its own, since SGLang keeps process-wide state.

    python -m tests.support.engine_host MODEL_FOLDER DTYPE CHECK...

Loads the model once, runs the named functions of `CHECKS`, prints one JSON object {check: result} as the last
line of stdout. A fault is planted into the live engine, tried, and taken out again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec

from extractor import checkpoint
from extractor.engine import sglang_compat
from extractor.errors import BugError, TapdeckError
from extractor.plan import Geometry, chunk_edges
from extractor.protocol import EngineSpec
from extractor.taps import TapSelection, select

ROOT = Path(__file__).parents[2]
LAYERS = (1, 3)
DONE = "done: "


def run_checks(model: Path, dtype: str, *checks: str) -> dict[str, Any]:
    """Starts the process and returns its results."""
    command = [sys.executable, "-m", "tests.support.engine_host", str(model), dtype, *checks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def run_many(
    jobs: dict[str, tuple[Path, str, tuple[str, ...]]],
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Runs checks on several models: one process that imports SGLang, which forks one per model.

    Args:
        jobs: name -> (model folder, dtype, checks).

    Yields:
        Name and results, as they come; the end of what it wrote instead, where a process failed.
    """
    lines = [[name, str(model), dtype, *checks] for name, (model, dtype, checks) in jobs.items()]
    command = [sys.executable, "-m", "tests.support.engine_host", "--many", json.dumps(lines)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(DONE):
                name, results = json.loads(line.removeprefix(DONE))
                yield name, results


def spec_for(model: Path, dtype: str, taps: TapSelection) -> EngineSpec:
    """A spec for an engine that only computes."""
    facts = checkpoint.read(model)
    return EngineSpec(
        model_folder=str(model),
        trust_remote_code=False,
        allow_unverified_sglang=False,
        dtype=dtype,
        device="cpu",
        attention_backend=None,
        mem_fraction=None,
        sglang_args={},
        taps=taps,
        hidden_size=facts.hidden_size,
        store_dtype=dtype,
        geometry=Geometry(max_tokens=512, shard_tokens=10_000),
        max_batch_samples=16,
        prepared="",
        num_samples=0,
        output="",
        fingerprint="",
        replica="0",
        writer_threads=1,
        buffers=2,
        endpoint="",
        longest_sample=1024,
    )


def choose(num_layers: int, layers: tuple[int, ...] = LAYERS, **flags: bool) -> TapSelection:
    """A selection by "after" ids; final unless said otherwise."""
    chosen = {"embed": False, "final": True, "normed": False} | flags
    return select(num_layers=num_layers, layers=layers, convention="after", **chosen)


def main() -> None:
    if sys.argv[1] == "--many":
        serve_many(json.loads(sys.argv[2]))
    else:
        model, dtype, *checks = sys.argv[1:]
        sglang_compat.prepare_process("cpu")
        print(json.dumps(check(model, dtype, checks)))


def serve_many(jobs: list[list[str]]) -> None:
    """One forked process per model, so that SGLang's many modules are imported once."""
    sglang_compat.prepare_process("cpu")
    import sglang.benchmark.one_batch
    import sglang.srt.models.registry  # noqa: F401 -- imports every model class

    for name, model, dtype, *checks in jobs:
        folder = Path(model)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            run_forked(folder, dtype, checks)
        _, status = os.waitpid(child, 0)
        results = (folder / "log").read_text()[-4000:]
        if not status:
            results = json.loads((folder / "results.json").read_text())
        print(DONE + json.dumps([name, results]), flush=True)


def run_forked(folder: Path, dtype: str, checks: list[str]) -> NoReturn:
    """Never returns: what the parent holds is not ours to close."""
    with (folder / "log").open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    status = 1
    try:
        (folder / "results.json").write_text(json.dumps(check(str(folder), dtype, checks)))
        status = 0
    except BaseException:  # noqa: BLE001 -- the border of the process: all of it goes into the log
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def check(model: str, dtype: str, checks: list[str]) -> dict[str, Any]:
    """Loads a model and runs the checks on it; a first check "layers=2,5" says with which layers it begins."""
    from extractor.engine.model import Engine

    serve_latent_attention()
    num_layers = checkpoint.read(Path(model)).num_layers
    if checks == ["stock_capture"]:
        return {"stock_capture": stock_capture(Path(model), dtype, num_layers)}
    layers = LAYERS
    if checks[0].startswith("layers="):
        layers = tuple(int(layer) for layer in checks[0].removeprefix("layers=").split(","))
        checks = checks[1:]
    engine = Engine(spec_for(Path(model), dtype, choose(num_layers, layers)))
    results = {}
    for name in checks:
        with restored(engine):
            results[name] = CHECKS[name](engine)
    return results


def serve_latent_attention() -> None:
    """Latent attention (DeepSeek) on the CPU: SGLang has the method for it, and no CPU backend registered."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


@contextlib.contextmanager
def restored(engine: Any) -> Iterator[None]:
    """Whatever a check changes on the engine's parts is undone after it."""
    parts = [engine, engine.capture, engine.runner, engine.pool, engine.capture._adapter]
    before = [dict(vars(part)) for part in parts]
    try:
        yield
    finally:
        # Hooks that a check has left on the model are not among the attributes.
        type(engine.capture._adapter).set(engine.capture._adapter, ())
        for part, attributes in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(attributes)
        engine.capture.set_taps(engine.spec.taps)


def sequences() -> list[Any]:
    """Three token id arrays that differ."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(4, 500, length, dtype=np.int32) for length in (40, 40, 9)]


def mixed_sequences() -> list[Any]:
    """Five token id arrays of very different lengths, one of them a single token."""
    import numpy as np

    rng = np.random.default_rng(1)
    return [rng.integers(4, 500, length, dtype=np.int32) for length in (61, 1, 130, 17, 40)]


def stock_capture(model: Path, dtype: str, num_layers: int) -> str:
    """SGLang's own `--enable-return-aux-hidden-states` on every boundary it can name, into `stock.safetensors`.

    Its DFLASH convention means "after layer id" in each class that has it, so that ids 0..n-2 are B(1)..B(n-1).
    """
    import msgspec
    from safetensors.torch import save_file

    from extractor import sglang_args
    from extractor.engine.lockstep import Alone

    settings = {
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": "DFLASH",
        "return_aux_hidden_state_layer_ids": list(range(num_layers - 1)),
    }
    sglang_args.check = lambda _: None  # these are refused in a run
    spec = msgspec.structs.replace(spec_for(model, dtype, choose(num_layers)), sglang_args=settings)
    runner = sglang_compat.Runner(spec, 0, Alone())
    # As the scheduler does for requests that ask for hidden states.
    runner.anatomy.family = msgspec.structs.replace(runner.anatomy.family, needs_capture_mode=True)
    packed = runner.prefill(mixed_sequences()).logits_output.hidden_states
    parts = packed.chunk(num_layers - 1, dim=-1)
    save_file(
        {f"layer_{v:03d}": part.contiguous() for v, part in enumerate(parts)}, model / "stock.safetensors"
    )
    return str(tuple(packed.shape))


def outcome(action: Callable[[], Any]) -> dict[str, str]:
    """What an action raised: {"error": class, "code":, "message":}; or that it passed."""
    try:
        action()
    except TapdeckError as error:
        return {"error": type(error).__name__, "code": error.code, "message": error.message}
    return {"error": "", "code": "", "message": "passed"}


def _prove(engine: Any) -> dict[str, str]:
    from extractor.engine.proof import prove

    return outcome(lambda: prove(engine, sequences()))


def proof_lines(engine: Any) -> dict[str, float]:
    from extractor.engine.proof import prove

    return {line.subject: line.max_rel_err for line in prove(engine, sequences())}


def one_layer_early(engine: Any) -> dict[str, str]:
    """SGLang's capture moved by one, and the adapter believes it is right."""
    adapter = engine.capture._adapter
    set_, wanted = type(adapter).set, engine.capture._boundaries
    adapter.set = lambda boundaries: set_(adapter, [k - 1 for k in boundaries])
    adapter.active = lambda: wanted
    engine.capture.set_taps(engine.spec.taps)
    return _prove(engine)


def one_tap_missing(engine: Any) -> dict[str, str]:
    adapter = engine.capture._adapter
    set_, wanted = type(adapter).set, engine.capture._boundaries
    adapter.set = lambda boundaries: set_(adapter, boundaries[1:])
    adapter.active = lambda: wanted
    engine.capture.set_taps(engine.spec.taps)
    return _prove(engine)


def stale_flag(engine: Any) -> dict[str, str]:
    """What SGLang's own setter leaves behind when layers change."""
    engine.runner.anatomy.layers[5]._is_layer_to_capture = True
    return outcome(lambda: engine.forward(sequences()))


def stale_flag_unseen(engine: Any) -> dict[str, str]:
    """The same flag, set after the adapter has looked."""
    engine.runner.anatomy.layers[5]._is_layer_to_capture = True
    engine.capture._adapter.active = lambda: engine.capture._boundaries
    return outcome(lambda: engine.forward(sequences()))


def stale_flag_with_final_alone(engine: Any) -> dict[str, str]:
    """No tap below the last boundary, so nothing may come back."""
    engine.capture.set_taps(choose(engine.spec.taps.num_layers, ()))
    engine.runner.anatomy.layers[5]._is_layer_to_capture = True
    engine.capture._adapter.active = tuple
    return outcome(lambda: engine.forward(sequences()))


def norm_hook_removed(engine: Any) -> dict[str, str]:
    """Somebody removed the hook on the final norm."""
    norm = engine.runner.anatomy.final_norm
    hooks = dict(norm._forward_hooks)
    norm._forward_hooks.clear()
    try:
        return _prove(engine)
    finally:
        norm._forward_hooks.update(hooks)


class _PassedBy:
    """Calls a module's `forward` and not the module, as a fused path does; hooks never run."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, *args: Any) -> Any:
        return self._module.forward(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def final_norm_passed_by(engine: Any) -> dict[str, str]:
    inner, name = engine.runner.anatomy.inner, engine.runner.anatomy.family.final_norm
    module = inner._modules.pop(name)
    setattr(inner, name, _PassedBy(module))
    try:
        return _prove(engine)
    finally:
        delattr(inner, name)
        setattr(inner, name, module)


def switch_left_off(engine: Any) -> dict[str, str]:
    """The wrapper does not expect what the inner model captures."""
    engine.runner.anatomy.wrapper.capture_aux_hidden_states = False
    return outcome(lambda: engine.forward(sequences()))


def cached_prefix(engine: Any) -> dict[str, str]:
    """The first four tokens of a sample would be taken from a cache, and have no states."""
    import torch

    make = sglang_compat._make_req

    def with_prefix(index: int, ids: Any) -> Any:
        req = make(index, ids)
        if index == 0:
            req.prefix_indices = torch.arange(4)
            req.prefix_len = 4  # 0.5.23 counts it by itself
        return req

    class Cache(engine.runner._one_batch.TreeCacheNamespace):
        def prefix_device_indices(self, req: Any) -> Any:
            return torch.arange(req.prefix_len)

    sglang_compat._make_req = with_prefix
    engine.runner._one_batch = SimpleNamespace(TreeCacheNamespace=Cache)
    try:
        return outcome(lambda: engine.forward(sequences()))
    finally:
        sglang_compat._make_req = make
        engine.runner.model_runner.req_to_token_pool.clear()
        engine.runner.model_runner.token_to_kv_pool_allocator.clear()


def input_norm_hook_removed(engine: Any) -> dict[str, str]:
    """Where boundaries come from hooks: one is gone."""
    k = engine.capture._boundaries[0]
    norm = engine.runner.anatomy.input_norm(k)
    hooks = dict(norm._forward_hooks)
    norm._forward_hooks.clear()
    try:
        return outcome(lambda: engine.forward(sequences()))
    finally:
        norm._forward_hooks.update(hooks)


def taps_that_cannot_be_proven(engine: Any) -> dict[str, Any]:
    """The new selection is captured one layer early: the earlier one is in force again."""
    import torch

    n = engine.spec.taps.num_layers
    before, _ = engine.forward(sequences())
    adapter, spec, pool = engine.capture._adapter, engine.spec, engine.pool
    set_ = type(adapter).set
    adapter.set = lambda ks: set_(adapter, [k - 1 for k in ks] if tuple(ks) == (3, 5) else ks)
    adapter.active = lambda: engine.capture._boundaries
    result = outcome(lambda: engine.set_taps(choose(n, (2, 4), embed=True, normed=True), sequences()))
    del adapter.set, adapter.active
    after, _ = engine.forward(sequences())
    return {
        **result,
        "is_as_before": engine.spec is spec
        and engine.pool is pool
        and list(before) == list(after)
        and all(torch.equal(before[name], after[name]) for name in before),
    }


def taps_in_turn(engine: Any) -> list[dict[str, str]]:
    """What would be stored before and after two changes of a live engine: tap -> hash of its bytes."""
    n = engine.spec.taps.num_layers
    stored = [stored_bytes(engine)]
    for layers, flags in (((5, 9), {}), ((9,), {"final": False})):
        engine.set_taps(choose(n, layers, **flags), sequences())
        stored.append(stored_bytes(engine))
    return stored


def stored_bytes(engine: Any) -> dict[str, str]:
    """Tap -> hash of the bytes that writers would be given for a batch."""
    import xxhash

    states, _ = engine.forward(sequences())
    block = engine.pool.copy(states, [len(ids) for ids in sequences()])
    block.wait()
    found = {name: xxhash.xxh3_128_hexdigest(bytes(block.rows(name))) for name in states}
    block.release()
    return found


def as_served(engine: Any) -> dict[str, Any]:
    """What SGLang's own capture gives, and how far that is from the boundary."""
    import msgspec

    from extractor.engine.proof import token_errors

    n = engine.spec.taps.num_layers
    boundary, _ = engine.forward(sequences())
    lines = engine.set_taps(msgspec.structs.replace(choose(n), as_served=True), sequences())
    served, _ = engine.forward(sequences())
    errors = {name: float(token_errors(served[name], boundary[name]).min()) for name in served}
    engine.set_taps(choose(n), sequences())
    again, _ = engine.forward(sequences())
    back = {name: float(token_errors(again[name], boundary[name]).max()) for name in served}
    return {"proof": [line.subject for line in lines], "from boundary": errors, "switched back": back}


def norms_swapped(engine: Any) -> dict[str, str]:
    capture = engine.capture
    collect = capture.collect

    def swapped(num_tokens: int) -> Any:
        capture._final_TH, capture._normed_TH = capture._normed_TH, capture._final_TH
        return collect(num_tokens)

    capture.collect = swapped
    return _prove(engine)


def _rows_swapped(engine: Any, tap: str) -> dict[str, str]:
    """The rows of the first two samples change places in one tap."""
    capture = engine.capture
    collect = capture.collect

    def swapped(num_tokens: int) -> Any:
        states = collect(num_tokens)
        if num_tokens > 80:
            states[tap] = states[tap][[*range(40, 80), *range(40), *range(80, num_tokens)]]
        return states

    capture.collect = swapped
    return _prove(engine)


def rows_swapped_in_capture(engine: Any) -> dict[str, str]:
    return _rows_swapped(engine, "layer_003")


def rows_swapped_in_final(engine: Any) -> dict[str, str]:
    return _rows_swapped(engine, "final")


def _stored(engine: Any, change: Callable[[dict[str, Any], Any], Any]) -> dict[str, str]:
    """The proof of an engine whose stored `final` (and nothing that hooks see) is something else."""
    capture = engine.capture
    collect = capture.collect

    def changed(num_tokens: int) -> Any:
        states = collect(num_tokens)
        return states | {"final": change(states, capture)}

    capture.collect = changed
    return _prove(engine)


def final_has_the_norm(engine: Any) -> dict[str, str]:
    return _stored(engine, lambda _, capture: capture._normed_TH)


def final_is_another_layer(engine: Any) -> dict[str, str]:
    return _stored(engine, lambda states, _: states["layer_003"])


def two_rows_of_final_swapped(engine: Any) -> dict[str, str]:
    def swapped(states: dict[str, Any], _: Any) -> Any:
        rows = states["final"].clone()
        rows[[2, 5]] = rows[[5, 2]]
        return rows

    return _stored(engine, swapped)


def normed_is_final(engine: Any) -> dict[str, str]:
    """`normed` is stored, and holds what has not seen the norm."""
    from extractor.engine.model import host_pool

    taps = choose(engine.spec.taps.num_layers, normed=True)
    engine.capture.set_taps(taps)
    engine.spec = msgspec.structs.replace(engine.spec, taps=taps)
    engine.pool = host_pool(engine.spec)
    collect = engine.capture.collect
    engine.capture.collect = lambda num_tokens: (states := collect(num_tokens)) | {"normed": states["final"]}
    return _prove(engine)


def refused_settings(engine: Any) -> dict[str, str]:
    """Settings that this SGLang does not have; and that it has all those that are refused or fixed."""
    from extractor import sglang_args

    known = set(sglang_compat._server_args_fields())
    named = {*sglang_args.FIXED, *sglang_args.OWNED, *sglang_args.REFUSED}
    return {
        "unknown": outcome(lambda: sglang_compat.check_known({"quantizatoin": "fp8"}))["message"],
        "not in this release": ", ".join(sorted(named - known)),
    }


def rows_swapped_in_host_copy(engine: Any) -> dict[str, str]:
    copy = engine.pool.copy

    def swapped(states: Any, lengths: Any) -> Any:
        block = copy(states, lengths)
        rows = block.tensor("layer_001")
        rows[:80] = rows[[*range(40, 80), *range(40)]].clone()
        return block

    engine.pool.copy = swapped
    return _prove(engine)


def samples_swapped_on_the_way_in(engine: Any) -> dict[str, str]:
    """SGLang is given the samples in another order than the one we store them in."""
    runner = engine.runner
    schedule = runner._schedule
    runner._schedule = lambda reqs: schedule([reqs[1], reqs[0], *reqs[2:]])
    return outcome(lambda: engine.forward(sequences()))


def padded_rows(engine: Any) -> dict[str, str]:
    import torch

    capture = engine.capture
    unpack = capture._unpack
    capture._unpack = lambda: [torch.nn.functional.pad(state, (0, 0, 0, 3)) for state in unpack()]
    return outcome(lambda: engine.forward(sequences()))


def norm_runs_twice(engine: Any) -> dict[str, str]:
    capture = engine.capture
    collect = capture.collect

    def twice(num_tokens: int) -> Any:
        capture._norm_calls += 1
        return collect(num_tokens)

    capture.collect = twice
    return outcome(lambda: engine.forward(sequences()))


def wrong_dtype(engine: Any) -> dict[str, str]:
    import torch

    engine.capture._dtype = torch.float64
    return outcome(lambda: engine.forward(sequences()))


def foreign_token(engine: Any) -> dict[str, str]:
    ids = sequences()
    ids[0][3] = 100_000
    return outcome(lambda: engine.forward(ids))


def selections(engine: Any) -> dict[str, str]:
    """Every kind of selection, one after the other in the same process, each proven."""
    from extractor.engine.model import host_pool

    n = engine.spec.taps.num_layers
    chosen = {
        "all": choose(n, tuple(range(n)), embed=True, normed=True),
        "final alone": choose(n, ()),
        "normed alone": choose(n, (), final=False, normed=True),
        "embed alone": choose(n, (), final=False, embed=True),
        "first and last": choose(n, (0, n - 1)),
        "middle": choose(n, (2,), final=False),
    }
    results = {}
    spec = engine.spec
    for name, taps in chosen.items():
        engine.capture.set_taps(taps)
        engine.spec = msgspec.structs.replace(spec, taps=taps)
        engine.pool = host_pool(engine.spec)
        states, _ = engine.forward(sequences())
        results[name] = _prove(engine)["message"] if tuple(states) == taps.names else str(tuple(states))
    return results


def taps_changed_between_batches(engine: Any) -> dict[str, bool]:
    """The same tap is the same tensor whatever was captured before, and beside it."""
    import torch

    n = engine.spec.taps.num_layers
    first, _ = engine.forward(sequences())
    engine.capture.set_taps(choose(n, (0, 3, 4)))
    second, _ = engine.forward(sequences())
    return {name: bool(torch.equal(first[name], second[name])) for name in ("layer_003", "final")}


def _long(length: int, seed: int = 1) -> Any:
    import numpy as np

    return np.random.default_rng(seed).integers(4, 500, length, dtype=np.int32)


def _edges(length: int, chunk_tokens: int) -> Any:
    return chunk_edges(length, Geometry(chunk_tokens, length, chunk_tokens=chunk_tokens))


def _joined(engine: Any, ids: Any, chunk_tokens: int) -> dict[str, Any]:
    """Tap name to [T, H], from the host buffers."""
    block = engine.compute_chunks(ids, _edges(len(ids), chunk_tokens))
    block.wait()
    states = {name: block.tensor(name).clone() for name in engine.spec.taps.names}
    block.release()
    return states


def _worst(states: Any, others: Any) -> float:
    from extractor.engine.proof import token_errors

    return max(float(token_errors(states[name], others[name]).max()) for name in others)


def chunks(engine: Any) -> dict[str, float]:
    """The largest per-token error of a sample in chunks against the whole, by length and size of a chunk."""
    found = {}
    for length, sizes in ((40, (1, 7)), (300, (64, 100, 299)), (301, (64, 100, 150, 299, 300))):
        ids = _long(length)
        whole, _ = engine.forward([ids])
        for chunk_tokens in sizes:
            states = _joined(engine, ids, chunk_tokens)
            found[f"{length} in chunks of {chunk_tokens}"] = _worst(states, whole)
    return found


def chunks_against_transformers(engine: Any) -> float:
    """The largest per-token error of a sample longer than the budget, through the call that a run makes."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = _long(700)
    engine.spec = msgspec.structs.replace(engine.spec, geometry=Geometry(512, 10_000, chunk_tokens=233))
    block = engine.compute([ids])
    block.wait()
    model = AutoModelForCausalLM.from_pretrained(engine.spec.model_folder, dtype=torch.float32)
    inputs = []
    model.model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    with torch.no_grad():
        hidden = model(torch.tensor(ids[None].astype("int64")), output_hidden_states=True).hidden_states
    expected = {tap.name: hidden[tap.boundary][0] for tap in engine.spec.taps.taps} | {"final": inputs[0]}
    worst = _worst({name: block.tensor(name) for name in expected}, expected)
    block.release()
    return worst


def short_samples_around_a_long_one(engine: Any) -> dict[str, float]:
    """What lies in the cache after a long sample is nobody's; nor does it see what lay there before."""
    ids = _long(300)
    before, _ = engine.forward(sequences())
    first = _joined(engine, ids, 100)
    after, _ = engine.forward(sequences())
    engine.forward([_long(500, seed=2)])
    return {"short": _worst(after, before), "long": _worst(_joined(engine, ids, 100), first)}


def device_holds_one_chunk_beside_the_next(engine: Any) -> list[int]:
    """How many chunks' states are alive when the next chunk is about to be computed."""
    import gc
    import weakref

    alive: list[Any] = []
    counts = []
    collect, prefill_next = engine.capture.collect, engine.runner.prefill_next

    def collected(num_tokens: int) -> Any:
        states = collect(num_tokens)
        alive.append(weakref.ref(states["layer_001"]))
        return states

    def counted(sample: Any, end: int) -> Any:
        gc.collect()
        counts.append(sum(state() is not None for state in alive))
        return prefill_next(sample, end)

    engine.capture.collect, engine.runner.prefill_next = collected, counted
    _joined(engine, _long(500), 100)
    return counts


def queue_of_a_long_record(engine: Any) -> dict[str, Any]:
    """Nine samples of 200 tokens and one of the largest size, with writers that wait until they must write."""
    import threading

    from extractor.engine.model import host_pool
    from extractor.estimate import block_bytes

    spec = engine.spec
    engine.pool = host_pool(spec)
    blocks: list[Any] = []
    stored: list[int] = []
    is_done = threading.Event()

    def write() -> None:
        # Asked in this order: once all are computed, no further block comes.
        while not is_done.wait(0.001) or blocks:
            if blocks and (engine.pool.arena.num_waiting or is_done.is_set()):
                block = blocks.pop(0)
                block.wait()
                stored.append(block.num_tokens)
                block.release()

    writer = threading.Thread(target=write)
    writer.start()
    geometry = Geometry(spec.geometry.max_tokens, 10_000, chunk_tokens=300)
    engine.spec = msgspec.structs.replace(spec, geometry=geometry)
    for length in [200] * 9 + [spec.longest_sample]:
        blocks.append(engine.compute([_long(length)]))
    is_done.set()
    writer.join()
    shape = {
        "hidden_size": spec.hidden_size,
        "num_taps": len(spec.taps.taps),
        "dtype": spec.store_dtype,
    }
    return {
        "stored": stored,
        "peak": engine.pool.arena.peak_bytes,
        "limit": spec.buffers * block_bytes(spec.geometry.max_tokens, **shape),
        "largest": block_bytes(spec.longest_sample, **shape),
    }


def chunk_proof_lines(engine: Any) -> dict[str, float]:
    from extractor.engine.proof import prove

    lines = prove(engine, sequences(), _long(450))
    return {line.subject: line.max_rel_err for line in lines if "chunks" in line.subject}


def _prove_in_chunks(engine: Any, length: int = 450) -> dict[str, str]:
    from extractor.engine.proof import prove

    return outcome(lambda: prove(engine, sequences(), _long(length)))


def prefix_is_too_short(engine: Any) -> dict[str, str]:
    """The second chunk is to be computed over one token less than there is."""
    set_range = sglang_compat._set_extend_range

    def shorter(req: Any, begin: int, end: int, pool: Any) -> None:
        set_range(req, max(0, begin - 1), end, pool)

    sglang_compat._set_extend_range = shorter
    try:
        return outcome(lambda: _joined(engine, _long(300), 100))
    finally:
        sglang_compat._set_extend_range = set_range


def prefix_of_a_packed_sample(engine: Any) -> dict[str, str]:
    """A sample that is to be computed as a whole comes with a prefix: SGLang's prefix cache would do that."""
    make_req = sglang_compat._make_req

    def cached(index: int, ids: Any) -> Any:
        req = make_req(index, ids)
        if index == 1:
            req.kv.req_pool_idx, req.kv.kv_allocated_len, req.prefix_len = 1, 8, 8
        return req

    sglang_compat._make_req = cached
    try:
        return outcome(lambda: engine.forward(sequences()))
    finally:
        sglang_compat._make_req = make_req


def _with_forward_batch(engine: Any, change: Callable[[Any, int], None]) -> None:
    """Changes what SGLang is about to run, from the second chunk on; `change` gets the chunk's first token."""
    forward_batch = engine.runner._forward_batch

    def changed(batch: Any) -> Any:
        made = forward_batch(batch)
        if batch.prefix_lens[0]:
            change(made, batch.prefix_lens[0])
        return made

    engine.runner._forward_batch = changed


def _restart_positions(forward_batch: Any, begin: int) -> None:
    forward_batch.positions = forward_batch.positions - begin


def positions_restarted(engine: Any) -> dict[str, str]:
    _with_forward_batch(engine, _restart_positions)
    return outcome(lambda: _joined(engine, _long(300), 100))


def positions_restarted_unseen(engine: Any) -> dict[str, str]:
    """The same, and the comparison of positions sees nothing."""
    sglang_compat.LongSample.check, check = lambda _: None, sglang_compat.LongSample.check
    _with_forward_batch(engine, _restart_positions)
    try:
        return _prove_in_chunks(engine)
    finally:
        sglang_compat.LongSample.check = check


def _point_elsewhere(engine: Any) -> None:
    """The second chunk's row of the cache names the slots of a sample that was computed before."""
    pool = engine.runner.model_runner.req_to_token_pool

    def elsewhere(forward_batch: Any, begin: int) -> None:
        row = pool.req_to_token[forward_batch.req_pool_indices[0]]
        row[:begin] = row[:begin] + 500

    engine.forward([_long(512, seed=3)])
    _with_forward_batch(engine, elsewhere)


def cache_of_another_sample(engine: Any) -> dict[str, str]:
    _point_elsewhere(engine)
    return outcome(lambda: _joined(engine, _long(300), 100))


def cache_of_another_sample_unseen(engine: Any) -> dict[str, str]:
    """Keys and values of the chunks so far are overwritten by others, where no comparison looks."""
    pool = engine.runner.model_runner.token_to_kv_pool

    def overwritten(forward_batch: Any, begin: int) -> None:
        row = engine.runner.model_runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[0]]
        for layer in range(engine.spec.taps.num_layers):
            for cache in pool.get_kv_buffer(layer):
                # Other slots of the pool still hold what a sample before left there.
                cache[row[:begin].long()] = cache[row[:begin].long() + 500]

    engine.forward([_long(512, seed=4)])
    engine.forward([_long(512, seed=3)])
    _with_forward_batch(engine, overwritten)
    return _prove_in_chunks(engine)


def chunks_in_another_order(engine: Any) -> dict[str, str]:
    from extractor.engine.hostcopy import CopiedBatch

    fill = CopiedBatch.fill

    def elsewhere(block: Any, states: Any) -> None:
        # The first two of three chunks of 150 change places.
        num_filled = block._num_filled
        if block.num_tokens == 450:
            block._num_filled = {0: 150, 150: 0}.get(num_filled, num_filled)
        fill(block, states)
        block._num_filled = num_filled + len(next(iter(states.values())))

    CopiedBatch.fill = elsewhere
    try:
        return _prove_in_chunks(engine)
    finally:
        CopiedBatch.fill = fill


def batch_between_chunks(engine: Any) -> dict[str, str]:
    """A batch that would overwrite the keys and values of an open sample."""
    ids = _long(300)
    with contextlib.suppress(BugError), engine.runner.long_sample(ids) as sample:
        engine.capture.begin_batch()
        engine.runner.prefill_next(sample, 100)
        found = outcome(lambda: engine.forward(sequences()))
        found["second"] = outcome(lambda: engine.runner.long_sample(ids).__enter__())["message"]
    return found


def sample_without_its_end(engine: Any) -> dict[str, str]:
    return outcome(lambda: engine.compute_chunks(_long(300), [(0, 100), (100, 200)]))


def blocks_after_faults(engine: Any) -> int:
    """Bytes of host memory that nobody gave back, after the faults so far."""
    return engine.pool.arena.used_bytes


def every_boundary(engine: Any) -> dict[str, Any]:
    """All boundaries and `normed` of a batch of mixed lengths, into `states.safetensors` of the model folder.

    Returns the proof's lines, and how far each tap of a sample alone is from itself in the batch.
    """
    from safetensors.torch import save_file

    from extractor.engine.proof import token_errors

    n = engine.spec.taps.num_layers
    lines = engine.set_taps(choose(n, tuple(range(n)), embed=True, normed=True), mixed_sequences())
    states, _ = engine.forward(mixed_sequences())
    states = {name: state.clone() for name, state in states.items()}
    save_file(states, Path(engine.spec.model_folder) / "states.safetensors")
    worst, start = 0.0, 0
    for ids in mixed_sequences():
        alone, _ = engine.forward([ids])
        rows = {name: state[start : start + len(ids)] for name, state in states.items()}
        worst = max(worst, *(float(token_errors(alone[name], rows[name]).max()) for name in rows))
        start += len(ids)
    return {"proof": {line.subject: line.max_rel_err for line in lines}, "alone": worst}


def verdicts(engine: Any) -> list[str | None]:
    """Values that may not be stored, in the second and third sample."""
    states, _ = engine.forward(sequences())
    states["layer_003"][41, 7] = float("nan")
    states["final"][80:] = 0
    block = engine.pool.copy(states, [40, 40, 9])
    block.wait()
    found = list(block.verdicts())
    block.release()
    return found


CHECKS: dict[str, Callable[[Any], Any]] = {
    function.__name__: function
    for function in (
        proof_lines,
        one_layer_early,
        one_tap_missing,
        stale_flag,
        stale_flag_unseen,
        stale_flag_with_final_alone,
        norms_swapped,
        rows_swapped_in_capture,
        rows_swapped_in_final,
        final_has_the_norm,
        final_is_another_layer,
        two_rows_of_final_swapped,
        normed_is_final,
        refused_settings,
        rows_swapped_in_host_copy,
        samples_swapped_on_the_way_in,
        padded_rows,
        norm_runs_twice,
        wrong_dtype,
        foreign_token,
        selections,
        taps_changed_between_batches,
        chunks,
        chunks_against_transformers,
        short_samples_around_a_long_one,
        device_holds_one_chunk_beside_the_next,
        queue_of_a_long_record,
        chunk_proof_lines,
        prefix_is_too_short,
        prefix_of_a_packed_sample,
        positions_restarted,
        positions_restarted_unseen,
        cache_of_another_sample,
        cache_of_another_sample_unseen,
        chunks_in_another_order,
        batch_between_chunks,
        sample_without_its_end,
        blocks_after_faults,
        norm_hook_removed,
        final_norm_passed_by,
        switch_left_off,
        cached_prefix,
        input_norm_hook_removed,
        taps_that_cannot_be_proven,
        taps_in_turn,
        stored_bytes,
        as_served,
        every_boundary,
        verdicts,
    )
}


if __name__ == "__main__":
    main()
