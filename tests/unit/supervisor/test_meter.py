import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.errors import BugError
from extractor.supervisor.meter import Meter

UTC = 1_700_000_000.0


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class Run:
    """A meter, its clock, and a supervisor that ticks once a second."""

    def __init__(self, **options):
        self.clock = Clock()
        self.meter = Meter(self.clock, **options)

    def wait(self, seconds):
        end_s = self.clock.now_s + seconds
        while self.clock.now_s + 1 < end_s:
            self.clock.now_s += 1
            self.meter.tick()
        self.clock.now_s = end_s
        self.meter.tick()

    def compute(self, *, batch_s, tokens, num_batches):
        for _ in range(num_batches):
            self.wait(batch_s)
            self.meter.on_tokens(tokens)


@pytest.fixture
def run():
    run = Run()
    run.meter.set_active(True)
    return run


def test_nothing_is_known_before_the_first_tokens(run):
    run.wait(12)
    rates = run.meter.rates(1000, UTC)
    assert (rates.tokens_per_s_now, rates.tokens_per_s_mean) == (0.0, None)
    assert (rates.eta_s, rates.eta_low_s, rates.eta_high_s, rates.finish_utc) == (None, None, None, None)
    assert rates.history == (0.0, 0.0)
    assert rates.running_s == 12


def test_a_steady_run_has_one_rate_everywhere(run):
    run.compute(batch_s=0.5, tokens=500, num_batches=120)
    rates = run.meter.rates(30_000, UTC)
    assert rates.tokens_per_s_now == pytest.approx(1000)
    assert rates.tokens_per_s_mean == pytest.approx(1000)
    assert rates.history == pytest.approx([1000] * 12)
    assert rates.history_interval_s == 5.0
    assert rates.eta_s == pytest.approx(30)
    assert rates.finish_utc == pytest.approx(UTC + 30)
    assert rates.eta_low_s < rates.eta_s < rates.eta_high_s


@given(batch_s=st.floats(0.1, 40), extra_s=st.floats(0, 0.99))
def test_batches_of_any_length_give_a_level_line_at_every_moment(batch_s, extra_s):
    run = Run()
    run.meter.set_active(True)
    run.compute(batch_s=batch_s, tokens=round(batch_s * 100_000), num_batches=4)
    for _ in range(3):
        run.wait(batch_s * extra_s)
        assert run.meter.now == pytest.approx(100_000, rel=0.1)
        assert run.meter.mean == pytest.approx(100_000, rel=0.25)
        assert run.meter.history == pytest.approx([100_000] * len(run.meter.history), rel=0.01)
        run.wait(batch_s * (1 - extra_s))
        run.meter.on_tokens(round(batch_s * 100_000))


def test_a_stall_shows_as_zero_and_lowers_the_mean(run):
    run.compute(batch_s=1, tokens=1000, num_batches=40)
    run.wait(10)
    assert 0 < run.meter.now < 500
    run.wait(10)
    assert run.meter.now == 0.0
    assert run.meter.mean == pytest.approx(1000 * 40 / 60)
    assert run.meter.history[-3:] == (0.0, 0.0, 0.0)


def test_one_stall_does_not_excuse_the_next(run):
    run.compute(batch_s=1, tokens=1000, num_batches=20)
    run.compute(batch_s=300, tokens=1000, num_batches=1)
    run.compute(batch_s=1, tokens=1000, num_batches=2)
    run.wait(20)
    assert run.meter.now == 0.0


def test_all_of_a_stall_leaves_no_eta(run):
    run.compute(batch_s=1, tokens=1000, num_batches=40)
    run.wait(60 * 5 + 5)
    assert run.meter.rates(1000, UTC).eta_s is None


def test_a_pause_is_a_gap_and_lowers_no_rate(run):
    run.compute(batch_s=1, tokens=1000, num_batches=30)
    run.meter.set_active(False)
    run.wait(20)
    paused = run.meter.rates(10_000, UTC)
    assert paused.tokens_per_s_now == 0.0
    assert paused.tokens_per_s_mean == pytest.approx(1000)
    assert paused.history[-4:] == (None,) * 4
    assert paused.eta_s == pytest.approx(10)
    assert paused.finish_utc is None
    run.meter.set_active(True)
    run.compute(batch_s=1, tokens=1000, num_batches=10)
    assert run.meter.history == pytest.approx([1000] * 6 + [None] * 4 + [1000] * 2)
    assert run.meter.now == pytest.approx(1000)
    assert run.meter.running_s == pytest.approx(40)


def test_an_interval_with_some_active_time_counts_that_time_only(run):
    run.compute(batch_s=1, tokens=1000, num_batches=2)
    run.meter.set_active(False)
    run.wait(3)
    assert run.meter.history == pytest.approx([1000])


def test_a_batch_that_ends_during_the_pause_counts(run):
    run.wait(2)
    run.meter.set_active(False)
    run.wait(1)
    run.meter.on_tokens(3000)
    run.meter.on_tokens(1000)
    assert run.meter.mean == pytest.approx(2000)


def test_tokens_before_any_active_time_wait_for_it():
    run = Run()
    run.meter.on_tokens(500)
    assert run.meter.mean is None
    run.meter.set_active(True)
    run.wait(5)
    run.meter.on_tokens(500)
    assert run.meter.mean == pytest.approx(200)
    assert run.meter.history == pytest.approx([200])


def test_reports_that_arrive_together_are_one_batch(run):
    run.wait(10)
    for _ in range(4):
        run.meter.on_tokens(250)
    assert run.meter.now == pytest.approx(100)
    assert run.meter.history == pytest.approx([100, 100])


def test_a_suspended_process_is_no_computing_time(run):
    run.compute(batch_s=1, tokens=1000, num_batches=30)
    run.clock.now_s += 3600
    run.compute(batch_s=1, tokens=1000, num_batches=15)
    assert run.meter.running_s == pytest.approx(44)
    assert run.meter.mean == pytest.approx(1000, rel=0.05)
    assert run.meter.now == pytest.approx(1000, rel=0.1)
    assert len(run.meter.history) == 60
    assert run.meter.history[:50] == (None,) * 50


def test_a_clock_that_goes_back_counts_as_no_time(run):
    run.compute(batch_s=1, tokens=1000, num_batches=30)
    run.clock.now_s -= 500
    run.compute(batch_s=1, tokens=1000, num_batches=30)
    assert run.meter.running_s == pytest.approx(59)
    assert run.meter.mean == pytest.approx(1000, rel=0.05)


def test_history_keeps_the_last_intervals_only():
    run = Run(interval_s=2.0, keep=3)
    run.meter.set_active(True)
    for tokens in (100, 200, 300, 400, 500):
        run.compute(batch_s=2, tokens=tokens, num_batches=1)
    assert run.meter.history == pytest.approx([150, 200, 250])


def test_a_negative_batch_is_a_bug(run):
    with pytest.raises(BugError):
        run.meter.on_tokens(-1)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0, 20)),
        st.tuples(st.just("jump"), st.floats(-1e5, 1e5)),
        st.tuples(st.just("tokens"), st.integers(0, 10**6)),
        st.tuples(st.just("active"), st.booleans()),
    ),
    max_size=60,
)


@given(EVENTS)
def test_no_order_of_events_breaks_the_rates(events):
    clock = Clock()
    meter = Meter(clock, keep=7)
    for kind, value in events:
        if kind in {"wait", "jump"}:
            clock.now_s += value
            meter.tick()
        elif kind == "tokens":
            meter.on_tokens(value)
        else:
            meter.set_active(value)
        rates = meter.rates(1000, UTC)
        assert 0 <= rates.tokens_per_s_now < float("inf")
        assert len(rates.history) <= 7
        assert all(rate is None or 0 <= rate < float("inf") for rate in rates.history)
        assert rates.eta_s is None or 0 < rates.eta_low_s <= rates.eta_s <= rates.eta_high_s


@given(st.lists(st.tuples(st.floats(0.01, 25), st.integers(0, 10**6), st.booleans()), max_size=40))
def test_every_token_is_in_the_history_once(batches):
    run = Run(interval_s=5.0, keep=1000)
    run.meter.set_active(True)
    run.wait(0.5)
    for batch_s, tokens, is_active in batches:
        run.meter.set_active(is_active)
        run.wait(batch_s)
        run.meter.on_tokens(tokens)
    run.meter.set_active(False)
    run.wait(5)
    spans = [*run.meter._closed, run.meter._open]
    assert sum(span.tokens for span in spans) == pytest.approx(sum(tokens for _, tokens, _ in batches))
    assert sum(span.length_s for span in spans) == pytest.approx(run.meter.running_s)
    assert all(a.end_s == b.begin_s for a, b in itertools.pairwise(spans))
