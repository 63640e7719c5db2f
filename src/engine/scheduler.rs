//! The engine's thread: takes commands, puts a step together, runs it, hands out tokens.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use tokio::sync::mpsc;

use super::sampler::{Choice, Sampler};
use super::slots::{Placement, Slot, place};
use super::{EngineError, EngineOptions, EngineStats, Event, FinishReason, GenerateRequest, SampledToken};
use crate::kernels::Pool;
use crate::model::{KvCache, Model, Row};
use crate::record::PolicyVersion;

/// A request that waits.
pub(super) struct Pending {
    pub request: GenerateRequest,
    pub events: mpsc::Sender<Event>,
}

/// What the thread is asked to do, in this order.
pub(super) enum Command {
    Generate(Box<Pending>),
    Publish(Arc<Model>, PolicyVersion),
}

/// Between the handles and the thread.
pub(super) struct Shared {
    pub vocab_size: usize,
    inbox: Mutex<Inbox>,
    /// A command has arrived, or the end.
    changed: Condvar,
    waiting: AtomicUsize,
    running: AtomicUsize,
    steps: AtomicU64,
    prefill_tokens: AtomicU64,
    reused_tokens: AtomicU64,
    sampled_tokens: AtomicU64,
}

struct Inbox {
    commands: Vec<Command>,
    version: PolicyVersion,
    /// The last published model: what a next one must look like.
    model: Arc<Model>,
    is_closed: bool,
}

impl Shared {
    pub fn new(model: Arc<Model>, version: PolicyVersion) -> Self {
        Self {
            vocab_size: model.config().vocab_size,
            inbox: Mutex::new(Inbox { commands: Vec::new(), version, model, is_closed: false }),
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            steps: AtomicU64::new(0),
            prefill_tokens: AtomicU64::new(0),
            reused_tokens: AtomicU64::new(0),
            sampled_tokens: AtomicU64::new(0),
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // Every change of the inbox is one assignment: a panic elsewhere leaves it whole.
        self.inbox.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn push(&self, command: Command, limit: Option<usize>) -> Result<(), EngineError> {
        let mut inbox = self.inbox();
        if inbox.is_closed {
            return Err(EngineError::Ended);
        }
        if let Some(limit) = limit {
            if self.waiting.load(Ordering::Relaxed) >= limit {
                return Err(EngineError::QueueFull { limit });
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
        }
        inbox.commands.push(command);
        drop(inbox);
        self.changed.notify_one();
        Ok(())
    }

    pub fn publish(&self, model: Arc<Model>) -> Result<PolicyVersion, EngineError> {
        let mut inbox = self.inbox();
        if inbox.is_closed {
            return Err(EngineError::Ended);
        }
        let (new, old) = (model.config(), inbox.model.config());
        for (what, is_same) in [
            ("vocab_size", new.vocab_size == old.vocab_size),
            ("num_hidden_layers", new.num_hidden_layers == old.num_hidden_layers),
            ("num_key_value_heads", new.num_key_value_heads == old.num_key_value_heads),
            ("head_dim", new.head_dim == old.head_dim),
            ("max_position_embeddings", new.max_position_embeddings == old.max_position_embeddings),
        ] {
            if !is_same {
                return Err(EngineError::OtherArchitecture { what });
            }
        }
        let version = PolicyVersion(inbox.version.0 + 1);
        inbox.version = version;
        inbox.model = model.clone();
        inbox.commands.push(Command::Publish(model, version));
        drop(inbox);
        self.changed.notify_one();
        Ok(version)
    }

    pub fn version(&self) -> PolicyVersion {
        self.inbox().version
    }

    pub fn close(&self) {
        self.inbox().is_closed = true;
        self.changed.notify_one();
    }

    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            steps: self.steps.load(Ordering::Relaxed),
            prefill_tokens: self.prefill_tokens.load(Ordering::Relaxed),
            reused_tokens: self.reused_tokens.load(Ordering::Relaxed),
            sampled_tokens: self.sampled_tokens.load(Ordering::Relaxed),
        }
    }
}

/// A request that runs. Its tokens are in its slot.
struct Running {
    slot: usize,
    request: GenerateRequest,
    events: mpsc::Sender<Event>,
    sampled: usize,
}

/// Owns the cache, the slots and the running requests.
pub(super) struct Scheduler {
    model: Arc<Model>,
    version: PolicyVersion,
    options: EngineOptions,
    shared: Arc<Shared>,
    pool: Pool,
    cache: KvCache,
    slots: Vec<Slot>,
    clock: u64,
    waiting: VecDeque<Command>,
    /// In order of admission.
    running: Vec<Running>,
    sampler: Sampler,
    rows: Vec<Row>,
    want_logits: Vec<bool>,
}

/// However the thread ends, later submissions are refused and waiting requests see their channels close.
struct CloseOnExit(Arc<Shared>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        let mut inbox = self.0.inbox();
        inbox.is_closed = true;
        inbox.commands.clear();
    }
}

impl Scheduler {
    pub fn new(model: Arc<Model>, options: EngineOptions, shared: Arc<Shared>) -> Result<Self, EngineError> {
        let cache = KvCache::new(model.config(), options.cache_slots, options.max_context);
        let cache = cache.map_err(|cause| EngineError::Cache {
            max_context: options.max_context,
            max_batch: options.max_batch,
            cause,
        })?;
        Ok(Self {
            version: options.first_version,
            pool: Pool::new(options.threads),
            cache,
            slots: (0..options.cache_slots).map(|_| Slot::default()).collect(),
            clock: 0,
            waiting: VecDeque::new(),
            running: Vec::with_capacity(options.max_batch),
            sampler: Sampler::default(),
            rows: Vec::new(),
            want_logits: Vec::new(),
            model,
            options,
            shared,
        })
    }

    pub fn run(mut self) {
        let _close = CloseOnExit(self.shared.clone());
        while self.take_commands() {
            self.drop_aborted();
            self.admit();
            self.plan();
            self.step();
        }
        let reason: Arc<str> = "the engine has ended".into();
        for running in self.running.drain(..) {
            let _ = running.events.try_send(Event::Aborted(reason.clone()));
        }
        for command in self.waiting.drain(..) {
            if let Command::Generate(pending) = command {
                let _ = pending.events.try_send(Event::Aborted(reason.clone()));
            }
        }
    }

    /// Moves new commands to `waiting`; sleeps while there is nothing to do. `false` at the end.
    fn take_commands(&mut self) -> bool {
        let mut inbox = self.shared.inbox();
        while self.running.is_empty()
            && self.waiting.is_empty()
            && inbox.commands.is_empty()
            && !inbox.is_closed
        {
            inbox = self.shared.changed.wait(inbox).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        self.waiting.extend(inbox.commands.drain(..));
        !inbox.is_closed
    }

    /// Frees the slots of requests that nobody reads any more; what they cached stays of use.
    fn drop_aborted(&mut self) {
        let Self { running, slots, waiting, shared, .. } = self;
        running.retain(|running| {
            let is_read = !running.events.is_closed();
            slots[running.slot].is_running = is_read;
            is_read
        });
        shared.running.store(running.len(), Ordering::Relaxed);
        waiting.retain(|command| match command {
            Command::Generate(pending) if pending.events.is_closed() => {
                shared.waiting.fetch_sub(1, Ordering::Relaxed);
                false
            }
            _ => true,
        });
    }

    /// Starts waiting requests in order, up to the next publication; publishes once nothing runs.
    fn admit(&mut self) {
        let mut deferred = 0;
        while self.running.len() < self.options.max_batch {
            match self.waiting.get(deferred) {
                Some(Command::Generate(pending)) => {
                    match place(&self.slots, &pending.request.prompt, self.options.reuse_prefixes) {
                        Some(Placement::Slot { slot, from, len }) => {
                            if let Some(Command::Generate(pending)) = self.waiting.remove(deferred) {
                                self.start(*pending, slot, from, len);
                            }
                        }
                        Some(Placement::Wait) => deferred += 1,
                        None => break,
                    }
                }
                Some(Command::Publish(..)) => {
                    if deferred > 0 || !self.running.is_empty() {
                        break;
                    }
                    if let Some(Command::Publish(model, version)) = self.waiting.pop_front() {
                        self.swap(model, version);
                    }
                }
                None => break,
            }
        }
        self.shared.running.store(self.running.len(), Ordering::Relaxed);
    }

    fn start(&mut self, pending: Pending, slot: usize, from: usize, len: usize) {
        self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        let Pending { request, events } = pending;
        if from == slot {
            self.cache.truncate(slot, len);
        } else if let Err(error) = self.cache.copy_prefix(from, slot, len) {
            self.cache.truncate(slot, 0);
            self.slots[slot] = Slot::default();
            let _ = events.try_send(Event::Aborted(error.to_string().into()));
            return;
        }
        self.clock += 1;
        let state = &mut self.slots[slot];
        state.sequence.clear();
        state.sequence.extend_from_slice(&request.prompt);
        state.cached = len;
        state.is_running = true;
        state.last_used = self.clock;
        self.slots[from].last_used = self.clock;
        self.shared.reused_tokens.fetch_add(len as u64, Ordering::Relaxed);
        self.running.push(Running { slot, request, events, sampled: 0 });
    }

    fn swap(&mut self, model: Arc<Model>, version: PolicyVersion) {
        self.model = model;
        self.version = version;
        for (index, slot) in self.slots.iter_mut().enumerate() {
            self.cache.truncate(index, 0);
            *slot = Slot::default();
        }
    }

    /// The rows of the next step: one for each request that decodes, and a chunk of those that read their prompts.
    fn plan(&mut self) {
        self.rows.clear();
        self.want_logits.clear();
        let mut budget = self.options.prefill_chunk;
        for running in &self.running {
            let slot = &self.slots[running.slot];
            let left = slot.sequence.len() - slot.cached;
            let count = if running.sampled > 0 { left } else { left.min(budget) };
            if running.sampled == 0 {
                budget -= count;
                self.shared.prefill_tokens.fetch_add(count as u64, Ordering::Relaxed);
            }
            for position in slot.cached..slot.cached + count {
                self.rows.push(Row { slot: running.slot, position, token: slot.sequence[position] });
                self.want_logits.push(position + 1 == slot.sequence.len());
            }
        }
    }

    /// Runs the planned rows, samples where a sequence's end was reached, and sends the tokens.
    fn step(&mut self) {
        if self.rows.is_empty() {
            return;
        }
        self.shared.steps.fetch_add(1, Ordering::Relaxed);
        let result = self.model.step(&self.pool, &mut self.cache, &self.rows, &self.want_logits);
        let mut logits = match result {
            Ok(logits) => logits,
            Err(error) => return self.abort_all(&error.to_string()),
        };
        for row in &self.rows {
            self.slots[row.slot].cached += 1;
        }
        let Self { running, slots, sampler, options, version, shared, .. } = self;
        let mut next_row = 0;
        running.retain_mut(|running| {
            let slot = &mut slots[running.slot];
            if slot.cached < slot.sequence.len() {
                return true;
            }
            let GenerateRequest { sampling, max_tokens, stop_token_ids, top_logprobs, .. } = &running.request;
            let row = logits.row_mut(next_row);
            next_row += 1;
            let position = slot.sequence.len();
            let choice = sampler.choose(row, sampling, position, options.logprobs_mode, *top_logprobs);
            let Some(Choice { id, logprob, top_logprobs }) = choice else {
                let reason = "the model's logits are not finite; its weights are broken";
                let _ = running.events.try_send(Event::Aborted(reason.into()));
                slot.is_running = false;
                return false;
            };
            slot.sequence.push(id);
            running.sampled += 1;
            shared.sampled_tokens.fetch_add(1, Ordering::Relaxed);
            let token = SampledToken { id, logprob, version: *version, top_logprobs };
            let end = if stop_token_ids.contains(&id) {
                Some(FinishReason::Stop(id))
            } else {
                (running.sampled == *max_tokens).then_some(FinishReason::Length)
            };
            let event = match end {
                Some(reason) => Event::Last(token, reason),
                None => Event::Token(token),
            };
            if end.is_some() {
                // Before the last token arrives: who has seen it sees the counter as well.
                shared.running.fetch_sub(1, Ordering::Relaxed);
            }
            // The channel has a place for every event; sending fails only when nobody reads.
            let goes_on = running.events.try_send(event).is_ok() && end.is_none();
            slot.is_running = goes_on;
            goes_on
        });
        shared.running.store(running.len(), Ordering::Relaxed);
    }

    /// A step that failed has appended nothing, but what it was asked makes no sense: everything starts anew.
    fn abort_all(&mut self, reason: &str) {
        tracing::error!(reason, "a step of the model failed; its requests are aborted");
        let reason: Arc<str> = reason.into();
        for running in self.running.drain(..) {
            let _ = running.events.try_send(Event::Aborted(reason.clone()));
        }
        for (index, slot) in self.slots.iter_mut().enumerate() {
            self.cache.truncate(index, 0);
            *slot = Slot::default();
        }
        self.shared.running.store(0, Ordering::Relaxed);
    }
}
