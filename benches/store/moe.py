"""Samples replies of a tiny Qwen3-MoE (a Hugging Face checkpoint) with the expert routing of every token, one JSON object a
line for `cargo bench --bench store -- replies FILE`. Before, its own router choices are compared with the model's golden
ones. Needs numpy.

    python benches/store/moe.py ../shared/golden/qwen3_moe_tiny TEXT-FILE 200 > replies.jsonl
"""

import json
import struct
import sys

import numpy as np

folder, text, replies = sys.argv[1], open(sys.argv[2], "rb").read(), int(sys.argv[3])
config = json.load(open(f"{folder}/config.json"))
heads, kv_heads, size = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
layers, top_k, eps = (config[k] for k in ("num_hidden_layers", "num_experts_per_tok", "rms_norm_eps"))
experts = config["num_local_experts"]

raw = open(f"{folder}/model.safetensors", "rb").read()
head_bytes = struct.unpack("<Q", raw[:8])[0]
weights = {}
for name, entry in json.loads(raw[8 : 8 + head_bytes]).items():
    if name != "__metadata__":
        begin, end = (8 + head_bytes + at for at in entry["data_offsets"])
        weights[name] = np.frombuffer(raw[begin:end], "<f4").reshape(entry["shape"])


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rope(x, at):
    half = size // 2
    angle = at[:, None] / config["rope_parameters"]["rope_theta"] ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Run:
    """One sequence, read on from where it is."""

    def __init__(self):
        self.length, self.keys, self.values = 0, [None] * layers, [None] * layers

    def read(self, ids):
        """Logits and the experts of each position: [token][layer][k]."""
        x, at = weights["model.embed_tokens.weight"][ids], np.arange(self.length, self.length + len(ids))
        chosen = np.zeros((len(ids), layers, top_k), int)
        for layer in range(layers):
            w = {k.split(".", 3)[3]: v for k, v in weights.items() if k.startswith(f"model.layers.{layer}.")}
            h = norm(x, w["input_layernorm.weight"])
            q = (h @ w["self_attn.q_proj.weight"].T).reshape(len(ids), heads, size)
            k = (h @ w["self_attn.k_proj.weight"].T).reshape(len(ids), kv_heads, size)
            v = (h @ w["self_attn.v_proj.weight"].T).reshape(len(ids), kv_heads, size)
            q = rope(norm(q, w["self_attn.q_norm.weight"]), at)
            k = rope(norm(k, w["self_attn.k_norm.weight"]), at)
            if self.length:
                k, v = np.concatenate([self.keys[layer], k]), np.concatenate([self.values[layer], v])
            self.keys[layer], self.values[layer] = k, v
            k, v = (np.repeat(kv, heads // kv_heads, 1) for kv in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
            scores = np.where(at[None, :, None] >= np.arange(len(k))[None, None, :], scores, -np.inf)
            mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(ids), -1)
            x = x + mixed @ w["self_attn.o_proj.weight"].T
            h = norm(x, w["post_attention_layernorm.weight"])
            odds = softmax(h @ w["mlp.gate.weight"].T)
            best = np.argsort(-odds, -1, kind="stable")[:, :top_k]
            chosen[:, layer] = best
            share = np.take_along_axis(odds, best, -1)
            share = share / share.sum(-1, keepdims=True)
            out = np.zeros_like(x)
            for token, (of, parts) in enumerate(zip(best, share)):
                for expert, part in zip(of, parts):
                    gate, up = feed_forward(w, expert, h[token])
                    out[token] += part * down(w, expert, gate / (1 + np.exp(-gate)) * up)
            x = x + out
        self.length += len(ids)
        return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T, chosen


def feed_forward(w, expert, x):
    if "mlp.experts.gate_up_proj" in w:
        both = x @ w["mlp.experts.gate_up_proj"][expert].T
        return np.split(both, 2)
    return tuple(w[f"mlp.experts.{expert}.{name}_proj.weight"] @ x for name in ("gate", "up"))


def down(w, expert, x):
    if "mlp.experts.down_proj" in w:
        return w["mlp.experts.down_proj"][expert] @ x
    return w[f"mlp.experts.{expert}.down_proj.weight"] @ x


golden = json.load(open(f"{folder}/golden.json"))
for ids, wanted in zip(golden["input_ids"], golden["routing"]):
    found = Run().read(np.array(ids))[1]
    for layer in range(layers):
        wanted_ids = np.array(wanted[f"model.layers.{layer}.mlp.gate"]["topk_ids"])
        assert (found[: len(wanted_ids), layer] == wanted_ids).all(), "not the golden router choices"

random, vocabulary = np.random.default_rng(7), config["vocab_size"]
for number in range(replies):
    # Bytes of a text are ids of its letters.
    start = random.integers(0, len(text) - 1000)
    prompt = np.frombuffer(text[start : start + random.integers(20, 200)], np.uint8).astype(int)
    run, ids, log_probs, rows = Run(), [], [], []
    logits, chosen = run.read(prompt)
    rows.extend(chosen)
    for _ in range(200):
        odds = softmax(logits[-1].astype(float))
        ids.append(int(random.choice(vocabulary, p=odds)))
        log_probs.append(float(np.float32(np.log(odds[ids[-1]]))))
        if len(ids) < 200:
            logits, chosen = run.read(np.array(ids[-1:]))
            rows.extend(chosen)
    line = {"session": f"moe-{number}", "prompt_ids": prompt.tolist(), "ids": ids, "logprobs": log_probs}
    flat = [int(expert) for row in rows for layer in row for expert in layer]
    print(json.dumps({**line, "routing": flat, "layers": layers, "top_k": top_k, "experts": experts}))
