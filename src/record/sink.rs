//! Where finished calls go: the one thing that the proxy needs to know of a store.

use async_trait::async_trait;

use super::Call;

/// A call could not be made durable. The message names the store and the remedy.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the capture could not be written: {0}")]
pub struct SinkError(pub String);

/// Takes calls and says when they are durable.
#[async_trait]
pub trait CallSink: Send + Sync {
    /// Stores the choices of one call. Resolves when they would survive a power loss.
    ///
    /// # Errors
    /// [`SinkError`] when they could not be stored: the caller must not tell its client that the call is done.
    async fn append(&self, calls: Vec<Call>) -> Result<(), SinkError>;
}
