"""A tokenizer of its own code on top of tiktoken, as Kimi models bring along: no fast version, no offsets.

The vocabulary is the 256 bytes and a few merges, so that ids can be worked out by hand: a byte is its own id,
merge number i is 256 + i, and special tokens follow. Like the real one its `encode` takes other arguments than
transformers', and its `apply_chat_template` turns tools into text for the template.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

MERGES = (b" a", b" b", b"ab", b"  ", b"\n\n", "\u4f60".encode()[:2], "\u4f60".encode())
"""In order of rank; id 256 + i."""
RESERVED = 16
SPECIALS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "[PAD]",
    "[UNK]",
)
"""Ids from `FIRST_SPECIAL`, in this order; the rest of the `RESERVED` ones have no name."""
FIRST_SPECIAL = 256 + len(MERGES)
VOCAB_SIZE = FIRST_SPECIAL + RESERVED
TEMPLATE = (
    "{% if tool_text %}<|im_system|>tool_declare<|im_middle|>{{ tool_text }}<|im_end|>{% endif %}"
    "{% for m in messages %}"
    "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
CODE = """\
from pathlib import Path

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.tokenization_utils import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

RAN_MARK


class SmallTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        named = {number: token.content for number, token in (added_tokens_decoder or {}).items()}
        ids = range(len(ranks), len(ranks) + NUM_RESERVED)
        self.special = {named.get(number, f"<|reserved_token_{number}|>"): number for number in ids}
        self.model = tiktoken.Encoding(
            "small", pat_str=r" ?\\S+|\\s+", mergeable_ranks=ranks, special_tokens=self.special
        )
        letters = bytes_to_unicode()
        self.bytes_of = {letter: byte for byte, letter in letters.items()}
        self.names = {
            number: "".join(letters[byte] for byte in self.model.decode_single_token_bytes(number))
            for number in range(self.model.n_vocab)
        }
        self.numbers = {name: number for number, name in self.names.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self.numbers

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs:
            return super().encode(text, **kwargs)
        if allow_special_tokens:
            return self.model.encode(text, allowed_special="all")
        return self.model.encode(text, disallowed_special=())

    def _tokenize(self, text, **kwargs):
        return [self.names[number] for number in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.numbers[token]

    def _convert_id_to_token(self, index):
        return self.names[index]

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes_of[letter] for letter in "".join(tokens)).decode("utf-8", "replace")

    def apply_chat_template(self, conversation, tools=None, tokenize=False, **kwargs):
        print("this tokenizer talks")
        if tools:
            kwargs["tool_text"] = "; ".join("function " + tool["function"]["name"] for tool in tools)
        return super().apply_chat_template(conversation, tools=tools, tokenize=tokenize, **kwargs)
"""


def add_tiktoken_tokenizer(folder: Path, *, ran: Path | None = None) -> Path:
    """Writes `tiktoken.model`, the code and its configuration into a model folder.

    Args:
        folder: of the model.
        ran: a file that the code writes when it is imported.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [*(bytes([byte]) for byte in range(256)), *MERGES]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("".join(lines))
    mark = "" if ran is None else f"Path({str(ran)!r}).write_text('ran')"
    code = CODE.replace("RAN_MARK", mark).replace("NUM_RESERVED", str(RESERVED))
    (folder / "tokenization_small.py").write_text(code)
    added = {
        str(FIRST_SPECIAL + index): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, name in enumerate(SPECIALS)
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIALS[2:7]),
        "auto_map": {"AutoTokenizer": ["tokenization_small.SmallTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "SmallTokenizer",
        "model_max_length": 1000000,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
