//! Memory for activations that is used again by the next pass: fresh pages cost more than the math of a
//! small model.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

/// Idle buffers of a model and its clones.
#[derive(Debug, Default)]
pub(super) struct Arena(Mutex<Vec<Vec<f32>>>);

/// Idle buffers kept at most; a pass of a deep model returns about a dozen per layer.
const KEPT: usize = 1024;

impl Arena {
    /// `len` floats of arbitrary content.
    pub fn take(self: &Arc<Self>, len: usize) -> Buffer {
        let reused = self.0.lock().ok().and_then(|mut idle| {
            let fitting = (0..idle.len())
                .filter(|&at| (len..=2 * len + 4096).contains(&idle[at].capacity()))
                .min_by_key(|&at| idle[at].capacity())?;
            Some(idle.swap_remove(fitting))
        });
        let mut data = reused.unwrap_or_else(|| Vec::with_capacity(len + len / 8));
        data.resize(len, 0.0);
        Buffer { data, arena: self.clone() }
    }
}

/// Floats that go back to their [`Arena`] when dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    data: Vec<f32>,
    arena: Arc<Arena>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Ok(mut idle) = self.arena.0.lock()
            && idle.len() < KEPT
        {
            idle.push(std::mem::take(&mut self.data));
        }
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.data
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }
}
