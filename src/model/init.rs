//! Random initial weights, the same on every machine.

use super::parameters::Tensor;
use super::{Config, Parameters};

/// SplitMix64's output function: a bijective hash of 64 bits.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// FNV-1a.
fn hash_name(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A standard normal number that depends on `(seed, stream, index)` only (Box-Muller, cosine branch).
fn normal(seed: u64, stream: u64, index: u64) -> f64 {
    let state = mix(mix(seed ^ mix(stream)) ^ index);
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) * (1.0 / (1u64 << 53) as f64);
    let (u, v) = (unit(mix(state)), unit(mix(state ^ 0x5555_5555_5555_5555)));
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

fn standard_deviation(config: &Config, tensor: &Tensor) -> Option<f64> {
    let fan_in = match tensor.shape[..] {
        [_, fan_in] => fan_in as f64,
        _ => return None,
    };
    if tensor.name == "model.embed_tokens.weight" {
        return Some(0.02);
    }
    let writes_residual = tensor.name.ends_with("o_proj.weight") || tensor.name.ends_with("down_proj.weight");
    let depth = if writes_residual { 2.0 * config.num_hidden_layers as f64 } else { 1.0 };
    Some(1.0 / (fan_in * depth).sqrt())
}

/// Fills all weights: embeddings with deviation 0.02, matrices with 1/sqrt(fan_in), those that write to
/// the residual stream also divided by sqrt(2 layers), norm weights with 1.
pub(super) fn fill(config: &Config, seed: u64, parameters: &mut Parameters) {
    let layout = parameters.layout.clone();
    for tensor in &layout.tensors {
        let values = &mut parameters.flat[tensor.range.clone()];
        let Some(deviation) = standard_deviation(config, tensor) else {
            values.fill(1.0);
            continue;
        };
        let stream = hash_name(&tensor.name);
        for (index, value) in values.iter_mut().enumerate() {
            *value = (deviation * normal(seed, stream, index as u64)) as f32;
        }
    }
}
