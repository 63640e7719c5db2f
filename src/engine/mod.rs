//! The embedded engine: token ids in, sampled token ids and log-probs out.
//!
//! One thread owns the K/V cache and runs [`crate::model::Model::step`] over all running requests at once (continuous
//! batching): requests join and leave between steps, long prompts are read in chunks beside running ones, and a prompt
//! that begins like one seen before takes over its keys and values instead of reading them again. Without requests the
//! thread sleeps.
//!
//! Invariants:
//! - **The batch does not matter.** A request's tokens and log-probs depend on its prompt, its sampling parameters and
//!   the weights, to the bit: never on what runs beside it, on chunks, on reused prefixes or on threads. Randomness is
//!   counted, not streamed: `hash(seed, position)`.
//! - **One request, one policy version.** A publication takes its place in the queue: requests submitted before it
//!   finish on the weights before it, then the weights change and all cached prefixes are dropped, then requests
//!   submitted after it start.
//! - A receiver gets every sampled token once, and then [`Event::Last`] with the last one, or [`Event::Aborted`].
//!   Dropping it ends the request at the next step and frees its slot.
//! - The log-prob is the model's own ([`crate::kernels::log_softmax`]), the same as in replay and training.

mod error;
mod random;
mod request;
mod sampler;
mod scheduler;
mod slots;

pub use error::EngineError;
pub use random::derive_seed;
pub use request::{
    EngineOptions, EngineStats, Event, FinishReason, GenerateRequest, LogprobsMode, SampledToken,
    SamplingParams,
};

use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::mpsc;

use crate::model::Model;
use crate::record::PolicyVersion;
use scheduler::{Command, Pending, Scheduler, Shared};

/// Handle of a running engine; clones share it. Dropping the last one ends the engine and aborts its requests.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    options: EngineOptions,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the engine's thread, and `options.threads - 1` more for its arithmetic.
    ///
    /// # Errors
    /// Options that cannot work, or a system that cannot start a thread.
    pub fn start(model: Arc<Model>, options: EngineOptions) -> Result<Self, EngineError> {
        options.check(&model)?;
        let shared = Arc::new(Shared::new(model.clone(), options.first_version));
        let scheduler = Scheduler::new(model, options.clone(), shared.clone())?;
        let thread = std::thread::Builder::new()
            .name("lego-engine".to_owned())
            .spawn(move || scheduler.run())
            .map_err(EngineError::Thread)?;
        Ok(Self { inner: Arc::new(Inner { shared, options, thread: Some(thread) }) })
    }

    /// Queues a request. Its events arrive on the receiver; dropping the receiver aborts it.
    ///
    /// # Errors
    /// A request that cannot run (each names the limit), a full queue, an engine that has ended.
    pub fn submit(&self, request: GenerateRequest) -> Result<mpsc::Receiver<Event>, EngineError> {
        request.check(&self.inner.options, self.inner.shared.vocab_size)?;
        // One place for every event there can be: the engine never waits for a reader.
        let (events, receiver) = mpsc::channel(request.max_tokens + 1);
        let limit = self.inner.options.max_queue;
        self.inner.shared.push(Command::Generate(Box::new(Pending { request, events })), Some(limit))?;
        Ok(receiver)
    }

    /// Publishes new weights and gives their version: one more than the last. Returns at once; requests submitted from
    /// now on are sampled by them, those submitted before by the weights before.
    ///
    /// # Errors
    /// A model of another architecture, an engine that has ended.
    pub fn publish(&self, model: Arc<Model>) -> Result<PolicyVersion, EngineError> {
        self.inner.shared.publish(model)
    }

    /// The version that a request submitted now is sampled by.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.inner.shared.version()
    }

    /// What the engine was started with.
    #[must_use]
    pub fn options(&self) -> &EngineOptions {
        &self.inner.options
    }

    /// Counters, and how many requests run and wait.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        self.inner.shared.stats()
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("options", &self.inner.options).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed, and its requests have seen their channels close.
            let _ = thread.join();
        }
    }
}
