//! Hugging Face folders: `config.json` and `model.safetensors`.

use super::cache::reserve;
use super::parameters::{Layout, Tensor};
use super::{Config, ModelError, Parameters};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

/// Reads all weights of the model that `config` describes.
pub(super) fn read(dir: &Path, config: &Config) -> Result<Parameters, ModelError> {
    let path = dir.join("model.safetensors");
    let read_error = |source| ModelError::Read { path: path.clone(), source };
    let file = std::fs::File::open(&path).map_err(read_error)?;
    // SAFETY: the map is read-only and dropped before this function returns; checkpoints are replaced by
    // rename, not rewritten in place, so the bytes under the map do not change.
    let bytes = unsafe { memmap2::Mmap::map(&file) }.map_err(read_error)?;
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|error| ModelError::Safetensors { path: path.clone(), reason: error.to_string() })?;

    // Sizes are config.json's to say, but the file has to bear them out before memory is taken for them.
    check_layers(dir, config, &tensors)?;
    let layout = Layout::new(config);
    let mut views = Vec::with_capacity(layout.tensors.len());
    for tensor in &layout.tensors {
        let view = tensors.tensor(&tensor.name).map_err(|_| ModelError::MissingTensor {
            path: path.clone(),
            tensor: tensor.name.clone(),
            expected: tensor.shape.clone(),
        })?;
        check_shape(&path, tensor, &view)?;
        views.push(view);
    }
    reserve(1, layout.len as u128, || {
        (format!("the weights of {}", path.display()), "take a smaller model".to_owned())
    })?;
    let mut flat = vec![0.0f32; layout.len];
    for (tensor, view) in layout.tensors.iter().zip(&views) {
        copy_tensor(&path, tensor, view, &mut flat[tensor.range.clone()])?;
    }
    let known: HashSet<&str> = layout.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    for name in tensors.names() {
        // Tied checkpoints may carry the head's copy of the embedding; older ones a RoPE buffer.
        let is_redundant =
            name.ends_with("rotary_emb.inv_freq") || (config.tie_word_embeddings && name == "lm_head.weight");
        if !known.contains(name) && !is_redundant {
            return Err(ModelError::UnknownTensor { path, tensor: name.to_owned() });
        }
    }
    Ok(Parameters { flat, layout: Arc::new(layout) })
}

/// The number of layers that config.json asks for is that of the file.
fn check_layers(dir: &Path, config: &Config, tensors: &SafeTensors<'_>) -> Result<(), ModelError> {
    let layer =
        |name: &str| -> Option<usize> { name.strip_prefix("model.layers.")?.split_once('.')?.0.parse().ok() };
    let layers = tensors.names().into_iter().filter_map(layer).max().map_or(0, |last| last + 1);
    if config.num_hidden_layers <= layers {
        return Ok(());
    }
    Err(ModelError::BadKey {
        path: dir.join("config.json"),
        key: "num_hidden_layers".to_owned(),
        found: config.num_hidden_layers.to_string(),
        expected: format!("{layers}, as many as model.safetensors has"),
    })
}

fn check_shape(path: &Path, tensor: &Tensor, view: &TensorView<'_>) -> Result<(), ModelError> {
    if view.shape() == tensor.shape {
        return Ok(());
    }
    Err(ModelError::Shape {
        path: path.to_owned(),
        tensor: tensor.name.clone(),
        found: view.shape().to_vec(),
        expected: tensor.shape.clone(),
    })
}

fn copy_tensor(
    path: &Path,
    tensor: &Tensor,
    view: &TensorView<'_>,
    target: &mut [f32],
) -> Result<(), ModelError> {
    let bytes = view.data();
    match view.dtype() {
        Dtype::F32 => {
            for (value, raw) in target.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*raw);
            }
        }
        Dtype::BF16 => {
            for (value, raw) in target.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*raw)) << 16);
            }
        }
        Dtype::F16 => {
            for (value, raw) in target.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f16_to_f32(u16::from_le_bytes(*raw));
            }
        }
        other => {
            return Err(ModelError::Dtype {
                path: path.to_owned(),
                tensor: tensor.name.clone(),
                found: format!("{other:?}"),
            });
        }
    }
    match target.iter().position(|value| !value.is_finite()) {
        Some(index) => {
            Err(ModelError::NotFinite { path: path.to_owned(), tensor: tensor.name.clone(), index })
        }
        None => Ok(()),
    }
}

/// IEEE 754 half precision, exactly.
fn f16_to_f32(half: u16) -> f32 {
    let sign = if half & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((half >> 10) & 0x1f);
    let fraction = f32::from(half & 0x3ff);
    match exponent {
        0 => sign * fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => sign * f32::INFINITY,
        31 => f32::NAN,
        _ => sign * (1024.0 + fraction) * 2f32.powi(exponent - 25),
    }
}

/// Writes `config.json` and `model.safetensors` (f32, sorted by name) into `dir`, each by atomic rename.
pub(super) fn write(dir: &Path, config: &Config, parameters: &Parameters) -> Result<(), ModelError> {
    std::fs::create_dir_all(dir).map_err(|source| ModelError::Write { path: dir.to_owned(), source })?;
    let mut json = config.to_json();
    if let Some(object) = json.as_object_mut() {
        for key in ["dtype", "torch_dtype"] {
            if let Some(dtype) = object.get_mut(key) {
                *dtype = "float32".into();
            }
        }
    }
    let text = serde_json::to_string_pretty(&json)
        .map_err(|source| ModelError::Json { path: dir.join("config.json"), source })?;
    replace(dir, "config.json", text.as_bytes())?;
    replace(dir, "model.safetensors", &serialize(dir, parameters)?)
}

fn serialize(dir: &Path, parameters: &Parameters) -> Result<Vec<u8>, ModelError> {
    let mut bytes = Vec::with_capacity(parameters.flat.len() * 4);
    for value in &parameters.flat {
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    let broken = |error: safetensors::SafeTensorError| ModelError::Safetensors {
        path: dir.join("model.safetensors"),
        reason: error.to_string(),
    };
    let mut views = Vec::with_capacity(parameters.layout.tensors.len());
    for tensor in &parameters.layout.tensors {
        let data = &bytes[tensor.range.start * 4..tensor.range.end * 4];
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), data).map_err(broken)?;
        views.push((tensor.name.as_str(), view));
    }
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize(views, Some(metadata)).map_err(broken)
}

fn replace(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), ModelError> {
    use std::io::Write;
    let (path, partial) = (dir.join(name), dir.join(format!("{name}.partial")));
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::File::create(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&partial, &path)
    };
    write().map_err(|source| ModelError::Write { path: path.clone(), source })
}

#[cfg(test)]
mod tests {
    use super::f16_to_f32;

    #[test]
    fn half_precision_is_read_exactly() {
        for (bits, value) in [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 5.960_464_5e-8),
            (0x0400, 6.103_515_6e-5),
            (0x3555, 0.333_251_95),
        ] {
            assert_eq!(f16_to_f32(bits), value, "{bits:#06x}");
        }
    }
}
