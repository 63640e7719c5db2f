//! The model against transformers: `tests/golden/qwen3_tiny` (or the folder that LEGO_GOLDEN_DIR names),
//! within the tolerances stated at each check.

use lego::kernels::{AdamW, Pool, adamw, l2_norm};
use lego::model::{Gradients, KvCache, Model, Row};
use serde_json::Value;
use std::path::PathBuf;

fn folder() -> PathBuf {
    std::env::var_os("LEGO_GOLDEN_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from)
        .join("qwen3_tiny")
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    floats(value).into_iter().map(|x| x as u32).collect()
}

struct Golden {
    json: Value,
    model: Model,
    pool: Pool,
    sequences: Vec<Vec<u32>>,
    prompt_lens: Vec<usize>,
    advantages: Vec<f64>,
}

impl Golden {
    fn load() -> Self {
        let folder = folder();
        let text = std::fs::read_to_string(folder.join("golden.json")).expect("golden.json");
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let list = |key: &str| json[key].as_array().expect("a list").clone();
        Self {
            model: Model::load(&folder).expect("the golden checkpoint"),
            pool: Pool::new(2),
            sequences: list("input_ids").iter().map(ids).collect(),
            prompt_lens: ids(&json["prompt_lens"]).into_iter().map(|len| len as usize).collect(),
            advantages: floats(&json["advantages"]),
            json,
        }
    }

    fn sequences(&self) -> Vec<&[u32]> {
        self.sequences.iter().map(Vec::as_slice).collect()
    }

    /// Number of response tokens.
    fn responses(&self) -> f64 {
        self.sequences.iter().zip(&self.prompt_lens).map(|(s, p)| (s.len() - p) as f64).sum()
    }

    /// -(sum advantage * log-prob of response tokens) / response tokens: the loss and its gradient at
    /// the log-probs.
    fn weighted_nll(&self, log_probs: &[Vec<f32>]) -> (f64, Vec<Vec<f32>>) {
        let mut loss = 0.0;
        let mut grads = Vec::new();
        for (sequence, log_probs) in log_probs.iter().enumerate() {
            let weight = -self.advantages[sequence] / self.responses();
            let first = self.prompt_lens[sequence] - 1;
            loss += log_probs[first..].iter().map(|&x| f64::from(x) * weight).sum::<f64>();
            let grad = |at| if at >= first { weight as f32 } else { 0.0 };
            grads.push((0..log_probs.len()).map(grad).collect());
        }
        (loss, grads)
    }

    fn run(&self, loss: impl Fn(&[Vec<f32>]) -> (f64, Vec<Vec<f32>>)) -> (f64, Gradients) {
        let pass = self.model.forward(&self.pool, &self.sequences(), 1.0).expect("valid sequences");
        let log_probs: Vec<Vec<f32>> =
            (0..pass.sequences()).map(|sequence| pass.log_probs(sequence).to_vec()).collect();
        let (loss, grads) = loss(&log_probs);
        let mut gradients = self.model.gradients();
        self.model.backward(&self.pool, pass, &grads, &mut gradients).expect("shapes fit");
        (loss, gradients)
    }

    /// Every parameter's norm and first six values to 1e-4 of its norm, the whole norm too.
    fn check_gradients(&self, key: &str, gradients: &mut Gradients) {
        let flat = gradients.total();
        let expected = &self.json[key];
        let norm = expected["grad_norm"].as_f64().expect("a number");
        assert!((l2_norm(flat) - norm).abs() < 1e-4 * norm, "{key}: {} {norm}", l2_norm(flat));
        let names = expected["grads"].as_object().expect("a map");
        assert_eq!(names.len(), self.model.parameters().tensors().len());
        for tensor in self.model.parameters().tensors() {
            let found = &flat[tensor.range.clone()];
            let expected = &names[&tensor.name];
            let norm = expected["norm"].as_f64().expect("a number");
            let difference = (l2_norm(found) - norm).abs();
            assert!(difference < 1e-4 * norm, "{key} {}: norm {} {norm}", tensor.name, l2_norm(found));
            for (&found, expected) in found.iter().zip(floats(&expected["head"])) {
                let difference = (f64::from(found) - expected).abs();
                let scale = expected.abs().max(norm / (tensor.range.len() as f64).sqrt());
                assert!(difference < 1e-4 * scale, "{key} {}: {found} {expected}", tensor.name);
            }
        }
    }
}

fn assert_close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(found) - expected).abs();
        assert!(difference < tolerance, "{what} {at}: {found} {expected}");
    }
}

#[test]
fn log_probs_and_entropy() {
    let golden = Golden::load();
    let pass = golden.model.forward(&golden.pool, &golden.sequences(), 1.0).expect("valid");
    for sequence in 0..3 {
        let expected = floats(&golden.json["logprobs"][sequence]);
        assert_close(pass.log_probs(sequence), &expected, 2e-5, "log-prob");
        // The reference also has the last row, which predicts a token that was not drawn.
        let mut expected = floats(&golden.json["entropy"][sequence]);
        expected.pop();
        assert_close(pass.entropy(sequence), &expected, 2e-5, "entropy");
    }
    let long = ids(&golden.json["long_ids"]);
    let found = golden.model.log_probs(&golden.pool, &[&long], 1.0).expect("valid");
    assert_close(&found[0], &floats(&golden.json["long_logprobs"]), 2e-5, "long log-prob");
}

#[test]
fn logits_and_greedy_decoding() {
    let golden = Golden::load();
    let mut cache = KvCache::new(golden.model.config(), 2, 64).expect("memory");
    let mut feed = |slot: usize, tokens: &[u32]| {
        let start = cache.len(slot);
        let rows: Vec<Row> =
            tokens.iter().enumerate().map(|(at, &token)| Row { slot, position: start + at, token }).collect();
        let want: Vec<bool> = (1..=rows.len()).map(|at| at == rows.len()).collect();
        golden.model.step(&golden.pool, &mut cache, &rows, &want).expect("valid rows")
    };
    let last = feed(0, &golden.sequences[0]);
    assert_close(last.row(0), &floats(&golden.json["last_logits_seq0"]), 5e-5, "logit");

    let mut logits = feed(1, &golden.sequences[0][..golden.prompt_lens[0]]);
    let mut greedy = Vec::new();
    for _ in 0..16 {
        let row = logits.row(0);
        let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a vocabulary");
        greedy.push(best as u32);
        logits = feed(1, &[best as u32]);
    }
    assert_eq!(greedy, ids(&golden.json["greedy16_from_prompt0"]));
}

#[test]
fn weighted_nll_loss_and_gradients() {
    let golden = Golden::load();
    let (loss, mut gradients) = golden.run(|log_probs| golden.weighted_nll(log_probs));
    let expected = golden.json["weighted_nll"]["loss"].as_f64().expect("a number");
    assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
    golden.check_gradients("weighted_nll", &mut gradients);
}

/// Token mean of `-(min(r A, clip(r, 0.8, 1.28) A) - 0.05 k3)`, `r = exp(new - old)`,
/// `k3 = exp(old - new) - (old - new) - 1`.
#[test]
fn grpo_loss_and_gradients() {
    let golden = Golden::load();
    let (loss, mut gradients) = golden.run(|log_probs| {
        let (mut loss, mut grads) = (0.0, Vec::new());
        for (sequence, new) in log_probs.iter().enumerate() {
            let old = floats(&golden.json["old_logprobs"][sequence]);
            let advantage = golden.advantages[sequence];
            let mut grad = vec![0.0; new.len()];
            for at in golden.prompt_lens[sequence] - 1..new.len() {
                let gap = f64::from(new[at]) - old[at];
                let ratio = gap.exp();
                let (free, clipped) = (ratio * advantage, ratio.clamp(0.8, 1.28) * advantage);
                let slope = if free <= clipped { free } else { 0.0 };
                let k3 = (-gap).exp() + gap - 1.0;
                loss -= (free.min(clipped) - 0.05 * k3) / golden.responses();
                grad[at] = (-(slope - 0.05 * (1.0 - (-gap).exp())) / golden.responses()) as f32;
            }
            grads.push(grad);
        }
        (loss, grads)
    });
    let expected = golden.json["grpo"]["loss"].as_f64().expect("a number");
    assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
    golden.check_gradients("grpo", &mut gradients);
}

#[test]
fn three_steps_of_adamw() {
    let mut golden = Golden::load();
    let len = golden.model.parameters().len();
    let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
    let options = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let steps = golden.json["adamw"]["steps"].as_array().expect("a list").clone();
    for (step, expected) in steps.iter().enumerate() {
        let expected = |key: &str| expected[key].as_f64().expect("a number");
        let (loss, mut gradients) = golden.run(|log_probs| golden.weighted_nll(log_probs));
        let grads = gradients.total();
        let norm = l2_norm(grads);
        let scale = (1.0 / (norm + 1e-6)).min(1.0) as f32;
        golden.model.update(|params| {
            adamw(params, grads, &mut m, &mut v, &options, step as u64 + 1, scale);
        });
        assert!((loss - expected("loss")).abs() < 1e-5, "step {step}: {loss}");
        let before = expected("grad_norm_before_clip");
        assert!((norm - before).abs() < 1e-4 * before, "step {step}: {norm} {before}");
        let params = l2_norm(golden.model.parameters().flat());
        let after = expected("param_l2");
        assert!((params - after).abs() < 1e-5 * after, "step {step}: {params} {after}");
    }
}
