//! `config.json` of a Qwen3 checkpoint: what the decoder needs, and the untouched rest.

use super::ModelError;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Shape and constants of the decoder. Keys that lego does not know are kept for [`Config::to_json`].
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    json: serde_json::Map<String, Value>,
}

/// The numbers of a new model; see [`Config::new`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rope_theta: f64,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
}

/// Weights of the largest part of a model: 4 TiB.
const MAX_WEIGHTS: u128 = 1 << 40;
/// Cosines and sines of all positions: 8 GiB.
const MAX_ANGLES: u128 = 1 << 31;

/// Keys that change the math in other architectures; each must be absent, null, false or 0 here.
const FOREIGN_KEYS: [&str; 15] = [
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "attention_dropout",
    "quantization_config",
    "num_experts",
    "num_local_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "logits_scaling",
    "residual_multiplier",
    "embedding_multiplier",
    "attention_multiplier",
    "attn_output_gate",
];

impl Config {
    /// A fresh Qwen3 configuration, as transformers would write it.
    ///
    /// # Errors
    /// [`ModelError::BadKey`] when sizes do not fit together.
    pub fn new(shape: Shape) -> Result<Self, ModelError> {
        let json = serde_json::json!({
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "dtype": "float32",
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": shape.intermediate_size,
            "layer_types": vec!["full_attention"; shape.num_hidden_layers],
            "max_position_embeddings": shape.max_position_embeddings,
            "model_type": "qwen3",
            "num_attention_heads": shape.num_attention_heads,
            "num_hidden_layers": shape.num_hidden_layers,
            "num_key_value_heads": shape.num_key_value_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": { "rope_theta": shape.rope_theta, "rope_type": "default" },
            "rope_theta": shape.rope_theta,
            "sliding_window": null,
            "tie_word_embeddings": shape.tie_word_embeddings,
            "use_cache": true,
            "use_sliding_window": false,
            "vocab_size": shape.vocab_size,
        });
        Self::from_json(Path::new("config.json"), json)
    }

    /// Reads `config.json` in `dir`.
    ///
    /// # Errors
    /// An unreadable file, a missing key, or a key whose value asks for math that is not built.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let bytes = std::fs::read(&path).map_err(|source| {
            if dir.is_dir() && source.kind() == std::io::ErrorKind::NotFound {
                return ModelError::NotAModel { path: dir.to_owned(), inside: model_folders(dir) };
            }
            ModelError::Read { path: path.clone(), source }
        })?;
        let json = serde_json::from_slice(&bytes)
            .map_err(|source| ModelError::Json { path: path.clone(), source })?;
        Self::from_json(&path, json)
    }

    /// Reads a parsed `config.json`; `path` only names it in errors.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_json(path: &Path, json: Value) -> Result<Self, ModelError> {
        let Value::Object(json) = json else {
            return Err(ModelError::BadKey {
                path: path.to_owned(),
                key: ".".to_owned(),
                found: json.to_string(),
                expected: "an object".to_owned(),
            });
        };
        let reader = Reader { path, json: &json };
        reader.refuse_foreign_math()?;
        let hidden_size = reader.size("hidden_size")?;
        let num_attention_heads = reader.size("num_attention_heads")?;
        let config = Self {
            vocab_size: reader.size("vocab_size")?,
            hidden_size,
            intermediate_size: reader.size("intermediate_size")?,
            num_hidden_layers: reader.size("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads: reader.size("num_key_value_heads")?,
            head_dim: reader.size("head_dim")?,
            rms_norm_eps: reader.float("rms_norm_eps")? as f32,
            rope_theta: reader.rope_theta()?,
            max_position_embeddings: reader.size("max_position_embeddings")?,
            tie_word_embeddings: reader.flag("tie_word_embeddings")?,
            json: json.clone(),
        };
        if !config.num_attention_heads.is_multiple_of(config.num_key_value_heads) {
            return Err(reader.bad("num_key_value_heads", "a divisor of num_attention_heads"));
        }
        if !config.head_dim.is_multiple_of(2) {
            return Err(reader.bad("head_dim", "an even number"));
        }
        if let Some((key, most)) = config.beyond_reason() {
            return Err(reader.bad(key, &format!("a model {most}")));
        }
        Ok(config)
    }

    /// A size that no machine has the memory for: its key, and what is too much. Products of sizes that pass fit a
    /// `usize`.
    fn beyond_reason(&self) -> Option<(&'static str, String)> {
        let [vocab, hidden, ffn, layers] =
            [self.vocab_size, self.hidden_size, self.intermediate_size, self.num_hidden_layers]
                .map(|size| size as u128);
        let heads = (self.num_attention_heads + self.num_key_value_heads) as u128 * self.head_dim as u128;
        let parts = [
            (if vocab > hidden { "vocab_size" } else { "hidden_size" }, vocab * hidden),
            (if ffn > hidden { "intermediate_size" } else { "hidden_size" }, 3 * ffn * hidden),
            (if heads > hidden { "num_attention_heads" } else { "hidden_size" }, 2 * heads * hidden),
            ("num_hidden_layers", layers * (3 * ffn + 2 * heads + 2) * hidden),
        ];
        if let Some((key, _)) = parts.into_iter().find(|(_, weights)| *weights > MAX_WEIGHTS) {
            return Some((key, format!("of at most {MAX_WEIGHTS} weights")));
        }
        let angles = self.max_position_embeddings as u128 * self.head_dim as u128;
        let key = "max_position_embeddings";
        (angles > MAX_ANGLES)
            .then(|| (key, format!("whose positions times head_dim are at most {MAX_ANGLES}")))
    }

    /// The whole `config.json`, unknown keys included, in the order it was read.
    #[must_use]
    pub fn to_json(&self) -> Value {
        Value::Object(self.json.clone())
    }

    /// Width of all query heads together.
    #[must_use]
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    #[must_use]
    pub fn key_value_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}

struct Reader<'a> {
    path: &'a Path,
    json: &'a serde_json::Map<String, Value>,
}

impl Reader<'_> {
    fn path(&self) -> PathBuf {
        self.path.to_owned()
    }

    fn get(&self, key: &str) -> Result<&Value, ModelError> {
        self.json.get(key).ok_or_else(|| ModelError::MissingKey { path: self.path(), key: key.to_owned() })
    }

    fn bad(&self, key: &str, expected: &str) -> ModelError {
        ModelError::BadKey {
            path: self.path(),
            key: key.to_owned(),
            found: self.json.get(key).map_or_else(|| "absent".to_owned(), Value::to_string),
            expected: expected.to_owned(),
        }
    }

    fn size(&self, key: &str) -> Result<usize, ModelError> {
        match self.get(key)?.as_u64() {
            Some(value @ 1..=0x7fff_ffff) => Ok(value as usize),
            _ => Err(self.bad(key, "a positive whole number")),
        }
    }

    fn float(&self, key: &str) -> Result<f64, ModelError> {
        self.get(key)?.as_f64().filter(|value| *value > 0.0).ok_or_else(|| self.bad(key, "a positive number"))
    }

    /// Absent means false, as in transformers.
    fn flag(&self, key: &str) -> Result<bool, ModelError> {
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(value)) => Ok(*value),
            Some(_) => Err(self.bad(key, "true or false")),
        }
    }

    fn unsupported(&self, key: &str, found: &Value, supported: &str) -> ModelError {
        ModelError::Unsupported {
            path: self.path(),
            key: key.to_owned(),
            found: found.to_string(),
            supported: supported.to_owned(),
        }
    }

    /// transformers 5 writes `rope_parameters`, older files `rope_theta` and `rope_scaling`.
    fn rope_theta(&self) -> Result<f64, ModelError> {
        let mut found = None;
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(Value::Object(rope)) = self.json.get(key) else {
                continue;
            };
            for (name, value) in rope {
                let is_plain = match name.as_str() {
                    "rope_theta" => true,
                    "rope_type" | "type" => value == "default",
                    "partial_rotary_factor" | "factor" => value.as_f64() == Some(1.0),
                    _ => value.is_null(),
                };
                if !is_plain {
                    return Err(self.unsupported(
                        &format!("{key}.{name}"),
                        value,
                        "rope_type \"default\" with rope_theta",
                    ));
                }
            }
            if let Some(theta) = rope.get("rope_theta") {
                let theta = theta.as_f64().filter(|theta| *theta > 0.0);
                found = found.or(Some(theta.ok_or_else(|| self.bad(key, "a positive rope_theta"))?));
            }
        }
        match found {
            Some(theta) => Ok(theta),
            None => self.float("rope_theta"),
        }
    }

    fn refuse_foreign_math(&self) -> Result<(), ModelError> {
        let model_type = self.get("model_type")?;
        if model_type != "qwen3" {
            return Err(self.unsupported("model_type", model_type, "\"qwen3\""));
        }
        let activation = self.get("hidden_act")?;
        if activation != "silu" {
            return Err(self.unsupported("hidden_act", activation, "\"silu\""));
        }
        for key in FOREIGN_KEYS {
            match self.json.get(key) {
                None | Some(Value::Null | Value::Bool(false)) => {}
                Some(Value::Number(number)) if number.as_f64() == Some(0.0) => {}
                Some(found) => return Err(self.unsupported(key, found, "absent")),
            }
        }
        if let Some(Value::Array(layers)) = self.json.get("layer_types")
            && let Some(other) = layers.iter().find(|kind| *kind != "full_attention")
        {
            return Err(self.unsupported("layer_types", other, "\"full_attention\""));
        }
        Ok(())
    }
}

/// The model folders in `dir` and in its folders, which are those of a run's checkpoints.
fn model_folders(dir: &Path) -> Vec<PathBuf> {
    let folders_of = |dir: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    };
    let children = folders_of(dir);
    let grandchildren: Vec<PathBuf> = children.iter().flat_map(|child| folders_of(child)).collect();
    let mut found: Vec<PathBuf> =
        children.into_iter().chain(grandchildren).filter(|path| path.join("config.json").is_file()).collect();
    // step_2 comes before step_10.
    found.sort_by_key(|path| (path.as_os_str().len(), path.clone()));
    found
}
