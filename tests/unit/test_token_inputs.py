import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extractor.errors import ArgumentError, TapdeckError
from extractor.token_inputs import WINDOW, as_sequences, pack


def read(token_ids, max_tokens=8, vocab_size=100):
    return [ids.tolist() for ids in as_sequences(token_ids, max_tokens=max_tokens, vocab_size=vocab_size)]


@given(
    st.lists(st.integers(1, 40), max_size=200),
    st.integers(40, 100),
    st.integers(1, 12),
)
def test_every_input_is_in_one_batch_and_batches_keep_both_bounds(lengths, max_tokens, max_sequences):
    batches = list(pack(lengths, max_tokens=max_tokens, max_sequences=max_sequences))

    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= max_sequences
        assert sum(lengths[i] for i in batch) <= max_tokens


def test_short_inputs_share_a_batch_and_are_not_padded():
    assert list(pack([30, 10, 20, 40], max_tokens=60, max_sequences=9)) == [(3, 2), (0, 1)]


def test_inputs_are_packed_within_windows():
    batches = list(pack([1] * (WINDOW + 1), max_tokens=10**6, max_sequences=10**6))

    assert [len(batch) for batch in batches] == [WINDOW, 1]


@pytest.mark.parametrize(
    "given_ids",
    [
        [[1, 2, 3], [4, 5, 6]],
        ([1, 2, 3], (4, 5, 6)),
        torch.tensor([[1, 2, 3], [4, 5, 6]]),
        torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32),
        np.array([[1, 2, 3], [4, 5, 6]]),
        [torch.tensor([1, 2, 3]), np.array([4, 5, 6], dtype=np.uint16)],
    ],
)
def test_lists_tensors_and_arrays_mean_the_same(given_ids):
    assert read(given_ids) == [[1, 2, 3], [4, 5, 6]]


def test_what_was_given_is_neither_kept_nor_changed():
    ids = np.arange(5, dtype=np.int32)
    (taken,) = as_sequences([ids], max_tokens=5, vocab_size=9)
    taken[:] = 0

    assert ids.tolist() == [0, 1, 2, 3, 4]


def test_long_inputs_are_cut_on_the_right():
    assert read([list(range(20)), [7]], max_tokens=3) == [[0, 1, 2], [7]]


@pytest.mark.parametrize("none_at_all", [[], (), torch.empty(0, 3, dtype=torch.int64)])
def test_no_input_is_a_value_error(none_at_all):
    with pytest.raises(ValueError, match="token_ids cannot be empty") as caught:
        read(none_at_all)
    assert isinstance(caught.value, TapdeckError)


def test_an_empty_input_is_named():
    with pytest.raises(ArgumentError, match=r"token_ids\[1\] is empty"):
        read([[1], []])


@pytest.mark.parametrize("token", [100, -1, 2**40])
def test_a_token_outside_the_vocabulary_is_named_with_its_place(token):
    with pytest.raises(ArgumentError, match=rf"token_ids\[1\]\[2\] is {token}, .* vocabulary of 100"):
        read([[1], [1, 2, token]])


def test_a_token_that_is_cut_off_is_not_judged():
    assert read([[1, 2, 999]], max_tokens=2) == [[1, 2]]


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        5,
        "text",
        [1, 2, 3],
        torch.tensor([1, 2, 3]),
        [[1.0, 2.0]],
        [["a"]],
        [[[1], [2]]],
        {"input_ids": [[1]]},
        [[True]],
    ],
)
def test_what_are_no_sequences_of_integers_is_a_type_error(nonsense):
    with pytest.raises(TypeError, match="token_ids"):
        read(nonsense)
