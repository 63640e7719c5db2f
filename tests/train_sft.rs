//! `lego sft` end to end on twenty conversations, and exactly which tokens count as sampled.

use std::path::Path;
use std::process::Command;

use lego::model::Model;
use lego::text::{ChatTemplate, Tokenizer};
use lego::train::sft::{encode, read_conversations};
use serde_json::{Value, json};

const TEMPLATE: &str = include_str!("../models/lego-tiny/recipe/chat_template.jinja");

fn conversation(i: usize) -> Value {
    let call = |number: usize, name: &str, arguments: Value| {
        json!({
            "role": "assistant",
            "content": null,
            "tool_calls": [{
                "id": format!("call_{number}"), "type": "function",
                "function": { "name": name, "arguments": arguments.to_string() },
            }],
        })
    };
    json!({ "messages": [
        { "role": "user", "content": format!("count_{i} should return the sum of {i} and x\n1|def count_{i}(x):\n2|    return x") },
        call(1, "edit", json!({ "line": 2, "new": format!("return x + {i}") })),
        { "role": "tool", "tool_call_id": "call_1", "content": "PASS" },
        call(2, "submit", json!({})),
    ] })
}

fn write_inputs(dir: &Path) {
    let lines: Vec<String> = (0..20).map(|i| conversation(i).to_string()).collect();
    std::fs::write(dir.join("data.jsonl"), lines.join("\n")).expect("written");
    std::fs::write(dir.join("chat_template.jinja"), TEMPLATE).expect("written");
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "vocab_size": 280, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "max_position_embeddings": 256, "tie_word_embeddings": true,
        "eos_token_id": 2,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).expect("written");
}

/// Runs `lego sft` in `dir`; standard error, and whether it succeeded.
fn sft(dir: &Path, args: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_lego"))
        .arg("sft")
        .args(args)
        .current_dir(dir)
        .output()
        .expect("lego runs");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

const FRESH: [&str; 12] = [
    "--data",
    "data.jsonl",
    "--init-config",
    "config.json",
    "--train-tokenizer",
    "vocab=280",
    "--steps",
    "60",
    "--batch-size",
    "4",
    "--lr",
    "1e-2",
];

fn fresh(dir: &Path, output: &str, more: &[&str]) -> (bool, String) {
    sft(dir, &[&FRESH[..], &["--warmup", "5", "--output-dir", output], more].concat())
}

#[test]
fn a_warm_start_gives_a_hugging_face_folder_and_repeats_to_the_bit() {
    let folder = tempfile::tempdir().expect("temp folder");
    let dir = folder.path();
    write_inputs(dir);
    let (is_ok, log) = fresh(dir, "one", &["--seed", "3", "--threads", "1"]);
    assert!(is_ok, "{log}");
    let mut names: Vec<String> = std::fs::read_dir(dir.join("one"))
        .expect("written")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    );
    let losses: Vec<f64> = log
        .lines()
        .filter_map(|line| line.split_once("assistant ")?.1.split(' ').next()?.parse().ok())
        .collect();
    assert!(losses.last().is_some_and(|&loss| loss < 2.5), "it learns: {log}");

    let (is_ok, log) = fresh(dir, "two", &["--seed", "3", "--threads", "2"]);
    assert!(is_ok, "{log}");
    let (is_ok, log) = fresh(dir, "other", &["--seed", "4", "--threads", "2"]);
    assert!(is_ok, "{log}");
    let read = |run: &str, name: &str| std::fs::read(dir.join(run).join(name)).expect("file");
    for name in &names {
        assert_eq!(read("one", name), read("two", name), "{name}");
    }
    assert_ne!(read("one", "model.safetensors"), read("other", "model.safetensors"));

    let (is_ok, log) = sft(
        dir,
        &["--data", "data.jsonl", "--model-path", "one", "--output-dir", "continued", "--prompt-weight", "0"],
    );
    assert!(is_ok, "{log}");
    assert!(log.contains("3 steps"), "one pass over the data, eight a step: {log}");
    assert_eq!(read("one", "tokenizer.json"), read("continued", "tokenizer.json"));
    assert_ne!(read("one", "model.safetensors"), read("continued", "model.safetensors"));
    assert!(Model::load(&dir.join("continued")).is_ok());

    let (is_ok, log) =
        sft(dir, &["--data", "data.jsonl", "--model-path", "one", "--output-dir", "continued"]);
    assert!(
        !is_ok && log.contains("continued already holds a model") && log.contains("--overwrite"),
        "{log}"
    );
    let again = ["--data", "data.jsonl", "--model-path", "one", "--output-dir", "continued", "--overwrite"];
    let (is_ok, log) = sft(dir, &[&again[..], &["--steps", "1"]].concat());
    assert!(is_ok && log.contains("replaced continued") && log.contains(", 1 step, "), "{log}");

    sampled_tokens_are_exactly_the_assistants(&dir.join("one"), &dir.join("data.jsonl"));
    broken_data_is_refused_by_line(dir);
}

fn sampled_tokens_are_exactly_the_assistants(model: &Path, data: &Path) {
    let tokenizer = Tokenizer::load(model).expect("tokenizer");
    let template = ChatTemplate::load(model).expect("template");
    let end = tokenizer.token_to_id("<|im_end|>").expect("in the vocabulary");
    assert_eq!(end, 2);
    assert_eq!(tokenizer.eos_token_ids(), [2]);
    assert_eq!(tokenizer.vocab_size(), 280);
    for conversation in &read_conversations(data).expect("valid") {
        let encoded = encode(conversation, &tokenizer, &template).expect("encodes");
        let mut stretches: Vec<(bool, Vec<u32>)> = Vec::new();
        for (&id, &is_sampled) in encoded.token_ids.iter().zip(&encoded.is_sampled) {
            match stretches.last_mut() {
                Some((last, ids)) if *last == is_sampled => ids.push(id),
                _ => stretches.push((is_sampled, vec![id])),
            }
        }
        let texts: Vec<String> = stretches.iter().map(|(_, ids)| tokenizer.decode(ids, false)).collect();
        assert_eq!(stretches.iter().map(|s| s.0).collect::<Vec<_>>(), [false, true, false, true]);
        assert!(texts[0].starts_with("<|im_start|>user\ncount_"));
        assert!(texts[0].ends_with("<|im_end|>\n<|im_start|>assistant\n"));
        let arguments = conversation.messages[1]["tool_calls"][0]["function"]["arguments"].as_str();
        let arguments = arguments.expect("text");
        assert_eq!(
            texts[1],
            format!(
                "<tool_call>\n{{\"name\": \"edit\", \"arguments\": {arguments}}}\n</tool_call><|im_end|>"
            )
        );
        assert_eq!(texts[2], "\n<|im_start|>user\nPASS<|im_end|>\n<|im_start|>assistant\n");
        assert_eq!(
            texts[3],
            "<tool_call>\n{\"name\": \"submit\", \"arguments\": {}}\n</tool_call><|im_end|>"
        );
        assert_eq!(stretches[1].1.last(), Some(&end), "the end token is sampled");
    }
}

fn broken_data_is_refused_by_line(dir: &Path) {
    let good = conversation(1).to_string();
    for (line, needle) in [
        ("{\"messages\": 3}", "not a conversation"),
        ("{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}", "no message of role"),
        ("nonsense", "not a conversation"),
    ] {
        std::fs::write(dir.join("bad.jsonl"), format!("{good}\n\n{line}\n")).expect("written");
        let (is_ok, log) = sft(dir, &["--data", "bad.jsonl", "--model-path", "one", "--output-dir", "x"]);
        assert!(!is_ok);
        assert!(log.contains("bad.jsonl, line 3") && log.contains(needle), "{log}");
    }
    let (is_ok, log) =
        sft(dir, &["--data", "data.jsonl", "--init-config", "config.json", "--output-dir", "x"]);
    assert!(!is_ok && log.contains("--train-tokenizer"), "{log}");
    let (is_ok, log) = sft(
        dir,
        &[
            "--data",
            "data.jsonl",
            "--init-config",
            "config.json",
            "--train-tokenizer",
            "vocab=9000",
            "--output-dir",
            "x",
        ],
    );
    assert!(!is_ok && log.contains("smaller vocab"), "{log}");
}
