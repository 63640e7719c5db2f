"""Makes tests/fixtures/text/sentencepiece_like.json: small tokenizers of the kinds that Llama 2, Mistral and Gemma
have, with what the Python package `tokenizers` (0.23.3) encodes and decodes with them.

    pip install tokenizers==0.23.3 && python tests/python/sentencepiece_like.py tests/fixtures/text/sentencepiece_like.json
"""

import json
import random
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = """def parse(line):
    # The parser keeps what it cannot read, and says where.
    return [int(part) for part in line.split(',') if part.strip()]
The quick brown fox jumps over the lazy dog. The dog, tired of all the jumping, sleeps on the porch.
A tool's result is a user's turn; the assistant's answer ends with a token of its own. Naïve café, déjà vu.
def test_parse():
    assert parse('1, 2,3') == [1, 2, 3]
for number in range(100):
        print(number, number * number, sep='\\t')
""".splitlines()

SPACE = "▁"
REPLACE = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
DECODE = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
NORMALIZE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
KINDS = {
    "llama2": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, NORMALIZE]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*DECODE, STRIP]},
    },
    "mistral": {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False},
        "decoder": {"type": "Sequence", "decoders": [*DECODE, STRIP]},
    },
    "gemma": {
        "normalizer": NORMALIZE,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": DECODE},
    },
}
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>"]
TEXTS = [
    "", " ", "  ", "   x", "The dog", " The dog", "  The dog ", "def f(x):\n    return x + 1\n", "\n", "\n\nThe", "\t\tx",
    "naïve café", "🎉", "a🎉b🎉", "日本語のテキスト", "▁", "▁▁x", "x▁y", "<0x0A>", "a<0x41>b", "é", "The </s> dog", "<s>The dog",
    "<s> The dog", "<s>[INST] The dog [/INST] sleeps</s>", "[INST]The[/INST]dog", "<tool_call>\n{\"name\": 1}\n</tool_call>",
    "x<tool_call> y </tool_call>z", "<|im_start|>user\nThe dog<|im_end|>\n<|im_start|>assistant\n", "<|im_", "</s", "\u00a0x",
]


def train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = sorted({c for line in CORPUS for c in line if c.isascii()} | {SPACE})
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())["model"]


def build(kind, trained):
    pieces = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += sorted(trained["vocab"], key=trained["vocab"].get)
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    added = [
        {"id": vocab.setdefault(token, len(vocab)), "content": token, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": token in SPECIAL}
        for token in SPECIAL + MARKUP
    ]
    model = {**trained, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None,
            "model": model, **KINDS[kind]}


def main(path):
    trained = train()
    chance = random.Random(7)
    made = {}
    for kind in KINDS:
        source = build(kind, trained)
        tokenizer = Tokenizer.from_str(json.dumps(source))
        encoded = [[text, tokenizer.encode(text, add_special_tokens=False).ids] for text in TEXTS]
        # Sequences as a model samples them: cut characters, bytes that are none, special tokens between bytes.
        ids = list(range(tokenizer.get_vocab_size()))
        of_bytes = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é🎉▁A".encode()]
        sequences = [ids for _, ids in encoded] + [
            [chance.choice(chance.choice([ids, of_bytes])) for _ in range(chance.randrange(1, 9))] for _ in range(200)
        ]
        decoded = [[s, tokenizer.decode(s, skip_special_tokens=False), tokenizer.decode(s)] for s in sequences]
        made[kind] = {"tokenizer": source, "encoded": encoded, "decoded": decoded}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(made, file, ensure_ascii=False, separators=(",", ":"))
        file.write("\n")


main(sys.argv[1])
