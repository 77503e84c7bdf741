"""Tokens over text: offsets, byte lengths, and the rule for tokens on a border."""

from __future__ import annotations

import numpy as np
import pytest
from dataset_bench import answer, talk, user
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from extractor.dataset.masks import LossMasker, MaskOptions
from extractor.dataset.rejects import RecordRejectedError
from extractor.dataset.tokens import TextTokenizer, byte_extents, merge_spans, token_mask


def wrap(tokenizer: Tokenizer) -> TextTokenizer:
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def byte_level(**options) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u0120", "a"), ("\u0120", "b"), ("\u010a", "\u010a")]
    vocab = {piece: number for number, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if options.get("trim"):
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if options.get("lower"):
        tokenizer.normalizer = normalizers.Lowercase()
    if options.get("nfc"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def test_offsets_without_their_white_space_are_replaced_by_byte_positions():
    trimming, plain = wrap(byte_level(trim=True)), wrap(byte_level())
    text = "x a b\n\nc"

    ids, starts, ends = trimming.encode(text)

    assert [text[a:b] for a, b in zip(starts, ends, strict=True)] == ["x", " a", " b", "\n\n", "c"]
    assert ids.tolist() == plain.encode(text)[0].tolist()


def test_a_token_with_a_blank_of_the_header_is_not_supervised():
    for tokenizer in (wrap(byte_level(trim=True)), wrap(byte_level())):
        _, starts, ends = tokenizer.encode("x a b")
        assert token_mask(starts, ends, [(2, 5)]).tolist() == [0, 0, 1]


def test_tokens_that_hold_part_of_a_character_cover_all_of_it():
    text = "a\u00e9\U0001f642b"
    tokenizer = wrap(byte_level())
    ids, starts, ends = tokenizer.encode(text)

    by_bytes = tokenizer._by_bytes(ids.tolist(), text)

    assert starts.tolist() == by_bytes[0].tolist() == [0, 1, 1, 2, 2, 2, 2, 3]
    assert ends.tolist() == by_bytes[1].tolist() == [1, 2, 2, 3, 3, 3, 3, 4]


def test_a_normalising_tokenizer_keeps_its_offsets():
    ids, starts, ends = wrap(byte_level(lower=True)).encode("AbC")

    assert (starts.tolist(), ends.tolist()) == ([0, 1, 2], [1, 2, 3])
    assert len(ids) == 3


def test_bytes_that_do_not_add_up_to_the_text_are_rejected():
    with pytest.raises(RecordRejectedError, match="do not add up") as caught:
        byte_extents([(b"ab", b"ab")], "abc")

    assert caught.value.reason == "mask_uncertain"


def test_sentencepiece_pieces_and_byte_fallback_are_understood():
    vocab = {"<unk>": 0, "\u2581": 1, "a": 2, "b": 3, "\u2581a": 4}
    vocab.update({f"<0x{byte:02X}>": 5 + byte for byte in range(256)})
    tokenizer = Tokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    wrapped = wrap(tokenizer)
    text = "a b\u00e9"

    ids = wrapped._tokenizer.encode(text, add_special_tokens=False)
    starts, ends = byte_extents(wrapped.pieces(ids), text)

    assert [text.encode()[a:b] for a, b in zip(starts, ends, strict=True)] == [
        b"a",
        b" ",
        b"b",
        b"\xc3",
        b"\xa9",
    ]


class WithoutOffsets(PreTrainedTokenizer):
    """A tokenizer in Python, as model folders bring along: byte-level pieces, no offsets."""

    def __init__(self, fast, **options):
        self._fast = fast
        self._vocab = fast.get_vocab()
        super().__init__(**options)

    vocab_size = property(lambda self: len(self._vocab))

    def get_vocab(self):
        return dict(self._vocab)

    def _tokenize(self, text, **_):
        return self._fast.convert_ids_to_tokens(self._fast.encode(text, add_special_tokens=False))

    def _convert_token_to_id(self, token):
        return self._vocab[token]

    def _convert_id_to_token(self, index):
        return self._fast.convert_ids_to_tokens(index)


@pytest.mark.parametrize("name", ["chatml", "think_rewrite", "system_moved", "marked"])
def test_a_tokenizer_without_offsets_gives_the_same_mask(bench, tokenizer, name):
    special = {"additional_special_tokens": list(tokenizer.get_added_vocab())}
    slow = TextTokenizer(WithoutOffsets(tokenizer, eos_token="<|eos|>", bos_token="<|bos|>", **special))
    conversation = talk(
        user("H\u00e9?\n"), answer("\n\n\U0001f642 a  b"), user("x"), answer("<think>\ny\n</think>\n\nz ")
    )

    masked = LossMasker(bench.template(name), slow, MaskOptions()).mask(conversation)

    expected = bench.masker(name).mask(conversation)
    assert not slow.has_offsets
    assert masked.input_ids.tolist() == expected.input_ids.tolist()
    assert masked.loss_mask.tolist() == expected.loss_mask.tolist()


def test_an_empty_text_has_no_tokens():
    ids, starts, ends = wrap(byte_level()).encode("")

    assert len(ids) == len(starts) == len(ends) == 0


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(1, 1)], []),
        ([(3, 5), (0, 2)], [(0, 2), (3, 5)]),
        ([(0, 2), (2, 3)], [(0, 3)]),
        ([(0, 5), (1, 2)], [(0, 5)]),
    ],
)
def test_spans_that_touch_are_one(spans, expected):
    assert merge_spans(spans) == expected


def test_a_token_over_two_touching_spans_is_supervised():
    starts, ends = np.array([0, 1, 3]), np.array([1, 3, 4])

    assert token_mask(starts, ends, [(0, 2), (2, 3)]).tolist() == [1, 1, 0]
