//! All weights as one flat `f32` buffer with named tensors in it.

use super::Config;
use std::ops::Range;

/// A named tensor inside the flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The checkpoint's own (Hugging Face) name.
    pub name: String,
    /// Row-major shape: `[out, in]` for matrices, `[n]` for norm weights.
    pub shape: Vec<usize>,
    /// Where it lies in the flat buffer, in floats.
    pub range: Range<usize>,
}

/// Ranges of one layer's tensors. `qkv` spans q, k and v, `gate_up` spans gate and up: they are neighbours.
#[derive(Debug, Clone)]
pub(super) struct LayerRanges {
    pub input_norm: Range<usize>,
    pub qkv: Range<usize>,
    pub q_norm: Range<usize>,
    pub k_norm: Range<usize>,
    pub o: Range<usize>,
    pub post_norm: Range<usize>,
    pub gate_up: Range<usize>,
    pub down: Range<usize>,
}

/// Where every tensor lies; derived from the [`Config`] alone.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub tensors: Vec<Tensor>,
    pub embedding: Range<usize>,
    pub layers: Vec<LayerRanges>,
    pub norm: Range<usize>,
    /// The embedding's range when tied.
    pub head: Range<usize>,
    pub len: usize,
}

impl Layout {
    pub fn new(config: &Config) -> Self {
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut len = 0;
        let mut add = |name: String, shape: &[usize]| {
            let range = len..len + shape.iter().product::<usize>();
            len = range.end;
            tensors.push(Tensor { name, shape: shape.to_vec(), range: range.clone() });
            range
        };
        let (hidden, ffn) = (config.hidden_size, config.intermediate_size);
        let (query, key_value) = (config.query_size(), config.key_value_size());
        let embedding = add("model.embed_tokens.weight".to_owned(), &[config.vocab_size, hidden]);
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for layer in 0..config.num_hidden_layers {
            let mut tensor =
                |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}.weight"), shape);
            let input_norm = tensor("input_layernorm", &[hidden]);
            let q = tensor("self_attn.q_proj", &[query, hidden]);
            let _k = tensor("self_attn.k_proj", &[key_value, hidden]);
            let v = tensor("self_attn.v_proj", &[key_value, hidden]);
            let q_norm = tensor("self_attn.q_norm", &[config.head_dim]);
            let k_norm = tensor("self_attn.k_norm", &[config.head_dim]);
            let o = tensor("self_attn.o_proj", &[hidden, query]);
            let post_norm = tensor("post_attention_layernorm", &[hidden]);
            let gate = tensor("mlp.gate_proj", &[ffn, hidden]);
            let up = tensor("mlp.up_proj", &[ffn, hidden]);
            let down = tensor("mlp.down_proj", &[hidden, ffn]);
            layers.push(LayerRanges {
                input_norm,
                qkv: q.start..v.end,
                q_norm,
                k_norm,
                o,
                post_norm,
                gate_up: gate.start..up.end,
                down,
            });
        }
        let norm = add("model.norm.weight".to_owned(), &[hidden]);
        let head = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            add("lm_head.weight".to_owned(), &[config.vocab_size, hidden])
        };
        Self { tensors, embedding, layers, norm, head, len }
    }
}

/// All weights of a model: one flat buffer, and the tensors in it.
#[derive(Debug, Clone)]
pub struct Parameters {
    pub(super) flat: Vec<f32>,
    pub(super) layout: std::sync::Arc<Layout>,
}

impl Parameters {
    /// Every weight, tensor after tensor in the order of [`Parameters::tensors`].
    #[must_use]
    pub fn flat(&self) -> &[f32] {
        &self.flat
    }

    /// Names, shapes and places of all tensors.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.layout.tensors
    }

    /// Values of a tensor by its Hugging Face name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        let tensor = self.layout.tensors.iter().find(|tensor| tensor.name == name)?;
        Some(&self.flat[tensor.range.clone()])
    }

    /// Number of weights.
    #[must_use]
    pub fn len(&self) -> usize {
        self.flat.len()
    }

    /// True for a model without weights, which no configuration describes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.flat.is_empty()
    }

    pub(super) fn slice(&self, range: &Range<usize>) -> &[f32] {
        &self.flat[range.clone()]
    }
}

/// Gradients of a loss, laid out as [`Parameters`]. They add up until [`Gradients::clear`].
///
/// With tied embeddings the head's part is kept apart until [`Gradients::total`], so that the sum does
/// not depend on how a batch was split.
#[derive(Debug, Clone)]
pub struct Gradients {
    pub(super) flat: Vec<f32>,
    pub(super) tied_head: Vec<f32>,
}

impl Gradients {
    pub(super) fn new(layout: &Layout) -> Self {
        let is_tied = layout.head == layout.embedding;
        let tied_head = if is_tied { layout.head.len() } else { 0 };
        Self { flat: vec![0.0; layout.len], tied_head: vec![0.0; tied_head] }
    }

    /// Sets every gradient to 0.
    pub fn clear(&mut self) {
        self.flat.fill(0.0);
        self.tied_head.fill(0.0);
    }

    /// The whole gradient, in the order of [`Parameters::flat`]. Call it once the batch is complete.
    pub fn total(&mut self) -> &mut [f32] {
        // The embedding is the first tensor, so the tied head's part lies at the front.
        for (sum, part) in self.flat.iter_mut().zip(&mut self.tied_head) {
            *sum += std::mem::take(part);
        }
        &mut self.flat
    }
}
