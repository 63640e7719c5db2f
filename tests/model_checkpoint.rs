//! Checkpoints: what is written can be read, what is broken is refused by name.

use lego::kernels::Pool;
use lego::model::{Config, KvCache, Model, ModelError, Row, Shape};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

fn tiny(tie_word_embeddings: bool) -> Model {
    let config = Config::new(Shape {
        vocab_size: 40,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        rope_theta: 1e4,
        max_position_embeddings: 64,
        tie_word_embeddings,
    })
    .expect("sizes fit");
    Model::init(config, 3)
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(model: &Model) -> Tensors {
    let parameters = model.parameters();
    let bytes = |range: std::ops::Range<usize>| {
        parameters.flat()[range].iter().flat_map(|x| x.to_le_bytes()).collect()
    };
    let entry =
        |t: &lego::model::Tensor| (t.name.clone(), (Dtype::F32, t.shape.clone(), bytes(t.range.clone())));
    parameters.tensors().iter().map(entry).collect()
}

fn write(dir: &Path, config: &Value, tensors: &Tensors) {
    std::fs::write(dir.join("config.json"), config.to_string()).expect("written");
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).expect("a tensor"))
    });
    let bytes = serialize(views, None).expect("serialised");
    std::fs::write(dir.join("model.safetensors"), bytes).expect("written");
}

/// Loads a checkpoint that `change` has broken and gives the error's text.
fn refusal(change: impl FnOnce(&mut Value, &mut Tensors)) -> String {
    let model = tiny(true);
    let (mut config, mut tensors) = (model.config().to_json(), tensors(&model));
    change(&mut config, &mut tensors);
    let dir = tempfile::tempdir().expect("a folder");
    write(dir.path(), &config, &tensors);
    Model::load(dir.path()).expect_err("broken").to_string()
}

fn assert_names(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "`{error}` does not name `{part}`");
    }
}

#[test]
fn save_then_load_gives_the_same_model_and_keeps_unknown_keys() {
    for tied in [true, false] {
        let model = tiny(tied);
        let mut config = model.config().to_json();
        config["a_key_of_tomorrow"] = json!({"x": [1, 2]});
        let (first, second) =
            (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        write(first.path(), &config, &tensors(&model));
        let loaded = Model::load(first.path()).expect("valid");
        loaded.save(second.path()).expect("saved");
        let again = Model::load(second.path()).expect("valid");
        assert_eq!(again.parameters().flat(), model.parameters().flat());
        assert_eq!(again.config().to_json(), config);
        let names: Vec<String> = std::fs::read_dir(second.path())
            .expect("a folder")
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
            .collect();
        assert_eq!(names.len(), 2, "{names:?}");
    }
}

#[test]
fn half_precision_checkpoints_are_widened_exactly() {
    let model = tiny(true);
    for dtype in [Dtype::BF16, Dtype::F16] {
        // 1.5 and -0.25 are the same number in every format.
        let pattern = if dtype == Dtype::BF16 { [0x3fc0u16, 0xbe80] } else { [0x3e00, 0xb400] };
        let narrow = tensors(&model)
            .into_iter()
            .map(|(name, (_, shape, data))| {
                let halves = (0..data.len() / 4).flat_map(|at| pattern[at % 2].to_le_bytes());
                (name, (dtype, shape, halves.collect()))
            })
            .collect();
        let dir = tempfile::tempdir().expect("a folder");
        write(dir.path(), &model.config().to_json(), &narrow);
        let loaded = Model::load(dir.path()).expect("valid");
        assert_eq!(loaded.parameters().flat()[..4], [1.5, -0.25, 1.5, -0.25]);
    }
}

#[test]
fn a_broken_checkpoint_is_refused_by_name() {
    let name = "model.layers.1.mlp.down_proj.weight";
    let error = refusal(|_, tensors| {
        tensors.get_mut(name).expect("there").1 = vec![24, 16];
    });
    assert_names(&error, &["model.safetensors", name, "[24, 16]", "[16, 24]"]);
    let error = refusal(|_, tensors| {
        tensors.remove(name);
    });
    assert_names(&error, &["model.safetensors", name, "missing", "[16, 24]"]);
    let error = refusal(|_, tensors| {
        let bias = (Dtype::F32, vec![1], vec![0; 4]);
        tensors.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), bias);
    });
    assert_names(&error, &["q_proj.bias", "config.json"]);
    let error = refusal(|_, tensors| {
        let tensor = tensors.get_mut(name).expect("there");
        (tensor.0, tensor.1, tensor.2) = (Dtype::I8, vec![16, 24], vec![0; 16 * 24]);
    });
    assert_names(&error, &[name, "I8", "BF16"]);
    let error = refusal(|_, tensors| {
        tensors.get_mut(name).expect("there").2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert_names(&error, &[name, "not finite", "index 0"]);

    let dir = tempfile::tempdir().expect("a folder");
    write(dir.path(), &tiny(true).config().to_json(), &tensors(&tiny(true)));
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).expect("there");
    std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("written");
    let error = Model::load(dir.path()).expect_err("cut short").to_string();
    assert_names(&error, &["model.safetensors", "safetensors"]);
    std::fs::remove_file(&path).expect("removed");
    assert!(matches!(Model::load(dir.path()), Err(ModelError::Read { .. })));
}

#[test]
fn a_config_that_asks_for_other_math_is_refused_by_key() {
    for (key, value) in [
        ("model_type", json!("llama")),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("use_sliding_window", json!(true)),
        ("quantization_config", json!({"bits": 4})),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})),
        ("rope_parameters", json!({"rope_type": "llama3", "rope_theta": 1e4})),
        ("hidden_size", json!("many")),
        ("num_key_value_heads", json!(0)),
    ] {
        let error = refusal(|config, _| config[key] = value);
        assert_names(&error, &["config.json", key]);
    }
    let error = refusal(|config, _| {
        config.as_object_mut().expect("a map").remove("head_dim");
    });
    assert_names(&error, &["config.json", "head_dim", "missing"]);
}

#[test]
fn sizes_that_no_file_bears_out_are_refused_before_memory_is_taken() {
    let huge = i64::from(i32::MAX);
    for (key, value, names) in [
        ("num_hidden_layers", 2_000_000_000, &["config.json", "num_hidden_layers", "2000000000"][..]),
        ("num_hidden_layers", 3, &["config.json", "num_hidden_layers", "as many as model.safetensors has"]),
        (
            "vocab_size",
            huge,
            &["model.safetensors", "model.embed_tokens.weight", "config.json asks for [2147483647"],
        ),
        ("hidden_size", huge, &["model.embed_tokens.weight", "config.json asks for [40, 2147483647]"]),
        ("intermediate_size", huge, &["mlp.gate_proj", "config.json asks for [2147483647"]),
        ("head_dim", huge - 1, &["config.json"]),
        ("num_attention_heads", huge, &["config.json"]),
        ("max_position_embeddings", huge, &["config.json", "max_position_embeddings"]),
    ] {
        let error = refusal(|config, _| config[key] = json!(value));
        assert_names(&error, names);
    }
    let model = tiny(true);
    for (slots, tokens) in [(1 << 40, 64), (usize::MAX, 64), (4, usize::MAX), (usize::MAX, usize::MAX)] {
        let error = KvCache::new(model.config(), slots, tokens).expect_err("more than there is");
        assert_names(&error.to_string(), &["keys and values", &slots.to_string(), "fewer or shorter"]);
    }
}

#[test]
fn bad_requests_are_errors_and_change_nothing() {
    let model = tiny(true);
    let pool = Pool::serial();
    let refused = |sequence: &[u32]| model.log_probs(&pool, &[sequence], 1.0).expect_err("bad");
    assert!(matches!(refused(&[]), ModelError::EmptySequence));
    assert!(matches!(refused(&[40]), ModelError::TokenOutOfRange { token: 40, .. }));
    assert!(matches!(refused(&[0; 65]), ModelError::PositionOutOfRange { position: 64, .. }));
    assert!(model.forward(&pool, &[&[1, 2]], 0.0).is_err());

    let mut cache = KvCache::new(model.config(), 1, 4).expect("memory");
    let mut step = |slot, position, token| {
        let row = Row { slot, position, token };
        model.step(&pool, &mut cache, &[row], &[true]).map(|logits| logits.rows())
    };
    assert!(matches!(step(1, 0, 0), Err(ModelError::Slot { slot: 1, slots: 1 })));
    assert!(matches!(step(0, 1, 0), Err(ModelError::Position { held: 0, .. })));
    assert!(matches!(step(0, 0, 99), Err(ModelError::TokenOutOfRange { .. })));
    for position in 0..4 {
        assert_eq!(step(0, position, 7).expect("fits"), 1);
    }
    assert!(matches!(step(0, 4, 7), Err(ModelError::CacheFull { capacity: 4, .. })));
}

#[test]
fn initial_weights_depend_on_the_seed_alone() {
    let (first, second) = (tiny(true), tiny(true));
    assert_eq!(first.parameters().flat(), second.parameters().flat());
    let other = Model::init(first.config().clone(), 4);
    assert_ne!(first.parameters().flat(), other.parameters().flat());
    let deviation = |model: &Model, name: &str| {
        let values = model.parameters().get(name).expect("there");
        let sum: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        (sum / values.len() as f64).sqrt()
    };
    let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.2, "{found}");
    near(deviation(&first, "model.embed_tokens.weight"), 0.02);
    near(deviation(&first, "model.layers.0.mlp.gate_proj.weight"), 0.25);
    near(deviation(&first, "model.layers.0.self_attn.o_proj.weight"), 0.125);
    assert_eq!(deviation(&first, "model.norm.weight"), 1.0);
}
