//! Sessions: who a call belongs to, how it is sampled, and what a trainer gets at the end.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Inner;
use super::rejoin::Left;
use super::rows::HeldRows;
use super::token_in::OfModels;
use crate::protocol::canonical::canonical;
use crate::protocol::chat::Request;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::volatile::Rules;
use crate::record::{Call, CallKind, PolicyVersion, SessionId, TaskId, TrialId};
use crate::upstream::dialect::SamplingPlan;

/// The version that the policy has now.
pub type VersionSource = Arc<dyn Fn() -> PolicyVersion + Send + Sync>;

/// How a session's calls are sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SessionSampling {
    /// By lego, in full (law 12). The seed of a call is a hash of `seed` and the call's index in its session, so
    /// that a run repeats whatever the order in which sessions call.
    Pinned { temperature: f64, seed: u64 },
    /// As the client says.
    PassThrough,
}

impl SessionSampling {
    /// The same for one of the sessions that share it: with a seed of its own, so that several of one task are not
    /// the same one again.
    pub(super) fn of_session(self, id: &SessionId) -> Self {
        match self {
            Self::PassThrough => self,
            Self::Pinned { temperature, seed } => {
                let mut hash = Sha256::new();
                hash.update(seed.to_le_bytes());
                hash.update(id.as_str());
                let seed = hash.finalize()[..8].iter().fold(0, |seed, byte| seed << 8 | u64::from(*byte));
                Self::Pinned { temperature, seed }
            }
        }
    }

    /// How the call with this index is sampled.
    pub(super) fn plan(self, index: u64) -> SamplingPlan {
        match self {
            Self::PassThrough => SamplingPlan::PassThrough,
            Self::Pinned { temperature, seed } => {
                SamplingPlan::Pinned { temperature, seed: call_seed(seed, index) }
            }
        }
    }
}

/// What a session is made of.
#[derive(Clone)]
pub struct SessionSpec {
    pub session_id: SessionId,
    pub trial_id: Option<TrialId>,
    pub task_id: Option<TaskId>,
    /// Name of the harness that calls.
    pub harness: Option<String>,
    pub kind: CallKind,
    pub sampling: SessionSampling,
    /// lego's own count of publications, for upstreams that give no version.
    pub policy_version: Option<VersionSource>,
    /// Further calls are refused with 400.
    pub max_calls: Option<u64>,
}

impl SessionSpec {
    /// A session of stand-alone capture. `sampling` is that of all of them.
    pub(super) fn stand_alone(session_id: SessionId, sampling: SessionSampling) -> Self {
        let sampling = sampling.of_session(&session_id);
        Self {
            session_id,
            trial_id: None,
            task_id: None,
            harness: None,
            kind: CallKind::Unknown,
            sampling,
            policy_version: None,
            max_calls: None,
        }
    }
}

/// What a closed session leaves.
#[derive(Debug, Clone, Default)]
pub struct SessionResult {
    /// Every call that was sent upstream, one a choice, in the order in which they became durable.
    pub calls: Vec<Arc<Call>>,
    /// Failures of the upstream or of the capture store: evidence of broken machinery. A request that the upstream
    /// refuses as bad (400, 413, 422) is none.
    pub upstream_failures: Vec<String>,
    /// A call was refused because the session had used up its calls.
    pub max_calls_hit: bool,
}

/// One session.
pub(super) struct Session {
    pub(super) spec: SessionSpec,
    secret: String,
    keeps_calls: bool,
    state: Mutex<State>,
    /// Running calls end.
    abort: CancellationToken,
    running: TaskTracker,
    /// Calls whose clients left.
    pub(super) left: Left,
    /// Expert routing that is stored.
    pub(super) rows: HeldRows,
    /// Its conversations as token ids.
    pub(super) lineages: OfModels,
}

struct State {
    /// When it was last named by a call, or a call of it became durable.
    last_used: Instant,
    is_closed: bool,
    next_index: u64,
    history: Vec<[u8; 32]>,
    result: SessionResult,
}

impl Session {
    pub(super) fn new(spec: SessionSpec, keeps_calls: bool, abort: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            spec,
            secret: uuid::Uuid::new_v4().simple().to_string(),
            keeps_calls,
            state: Mutex::new(State {
                last_used: Instant::now(),
                is_closed: false,
                next_index: 0,
                history: Vec::new(),
                result: SessionResult::default(),
            }),
            abort,
            running: TaskTracker::new(),
            left: Left::default(),
            rows: HeldRows::default(),
            lineages: OfModels::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends when the session's calls must.
    pub(super) fn closed(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// A call names the session.
    pub(super) fn touch(&self, now: Instant) {
        self.state().last_used = now;
    }

    /// Since when nothing happens in it; `None` while a call runs.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        self.running.is_empty().then(|| self.state().last_used)
    }

    /// Held by a call until it is durable.
    pub(super) fn token(&self) -> TaskTrackerToken {
        self.running.token()
    }

    /// True if `secret` is this session's.
    pub(super) fn has_secret(&self, secret: &str) -> bool {
        // Hashes, so that the time of the comparison says nothing.
        Sha256::digest(secret) == Sha256::digest(&self.secret)
    }

    /// Lets a call in and gives its index in the session.
    ///
    /// Messages are compared without what `volatile` matches.
    pub(super) fn admit(
        &self,
        request: &Request,
        volatile: &Rules,
        tolerates_rewrites: bool,
    ) -> Result<u64, ApiError> {
        let history: Vec<[u8; 32]> = if tolerates_rewrites {
            Vec::new()
        } else {
            let hash = |message: Cow<'_, [u8]>| message_hash(&volatile.compared(&message));
            request.messages().into_iter().map(hash).collect()
        };
        let mut state = self.state();
        let id = &self.spec.session_id;
        if state.is_closed || self.abort.is_cancelled() {
            let message = format!("session {id} is closed: its trial has ended");
            return Err(ApiError::new(403, ErrorType::InvalidRequest, "session_closed", message));
        }
        if let Some(limit) = self.spec.max_calls.filter(|limit| state.next_index >= *limit) {
            state.result.max_calls_hit = true;
            let message = format!(
                "turn limit reached: session {id} has used all of its {limit} model calls; end the task now"
            );
            return Err(ApiError::new(400, ErrorType::InvalidRequest, "max_turns_reached", message));
        }
        if !tolerates_rewrites {
            if !history.starts_with(&state.history) {
                let same = state.history.iter().zip(&history).take_while(|(a, b)| a == b).count();
                let message = format!(
                    "this call rewrites the history of session {id} at message {same}, and \
                     proxy.history_rewrite_tolerance is false; set it to true to serve such calls"
                );
                return Err(ApiError::new(409, ErrorType::Conflict, "history_rewritten", message));
            }
            state.history = history;
        }
        let index = state.next_index;
        state.next_index += 1;
        Ok(index)
    }

    /// The index of the next call.
    pub(super) fn next_index(&self) -> u64 {
        self.state().next_index
    }

    /// Begins with this index.
    pub(super) fn go_on_from(&self, next_index: u64) {
        self.state().next_index = next_index;
    }

    /// How the call with this index is sampled.
    pub(super) fn plan(&self, index: u64) -> SamplingPlan {
        self.spec.sampling.plan(index)
    }

    /// True if the session's end gives its records to a trainer.
    pub(super) const fn keeps_calls(&self) -> bool {
        self.keeps_calls
    }

    /// Keeps what became durable, and what failed.
    pub(super) fn keep(&self, calls: Vec<Arc<Call>>, failure: Option<String>) {
        let mut state = self.state();
        state.last_used = Instant::now();
        if self.keeps_calls {
            state.result.calls.extend(calls);
            state.result.upstream_failures.extend(failure);
        }
    }
}

/// A seed in 0..2^63 out of the session's seed and the call's index: splitmix64's finaliser over both.
fn call_seed(seed: u64, index: u64) -> i64 {
    let mut mixed = seed ^ index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for multiplier in [0xBF58_476D_1CE4_E5B9_u64, 0x94D0_49BB_1331_11EB] {
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(multiplier);
        mixed ^= mixed >> 27;
    }
    i64::try_from(mixed >> 1).unwrap_or_default()
}

/// A message's identity: its members, whatever their order and spacing.
fn message_hash(message: &[u8]) -> [u8; 32] {
    let canonical = match serde_json::from_slice::<serde_json::Value>(message) {
        Ok(value) => canonical(&value).into_bytes(),
        Err(_) => message.to_vec(),
    };
    Sha256::digest(canonical).into()
}

/// An open session. Dropping it closes the session without waiting.
pub struct SessionHandle {
    inner: Arc<Inner>,
    session: Arc<Session>,
}

impl SessionHandle {
    pub(super) fn new(inner: Arc<Inner>, session: Arc<Session>) -> Self {
        Self { inner, session }
    }

    /// The session's id.
    #[must_use]
    pub fn session_id(&self) -> &SessionId {
        &self.session.spec.session_id
    }

    /// An API key that names this session: `sk-lego-<session>.<secret>`.
    #[must_use]
    pub fn api_key(&self) -> String {
        format!("sk-lego-{}.{}", self.session.spec.session_id, self.session.secret)
    }

    /// Refuses new calls, ends running ones, and returns when every call of the session is durable.
    pub async fn close(self) -> SessionResult {
        self.end();
        self.session.running.close();
        self.session.running.wait().await;
        std::mem::take(&mut self.session.state().result)
    }

    fn end(&self) {
        self.session.state().is_closed = true;
        self.session.abort.cancel();
        self.inner.sessions.remove(&self.session);
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_by_session_and_by_index_and_repeat() {
        let mut seen = std::collections::HashSet::new();
        for seed in 0..50 {
            for index in 0..50 {
                let value = call_seed(seed, index);
                assert!(value >= 0);
                assert!(seen.insert(value), "{seed} {index}");
                assert_eq!(value, call_seed(seed, index));
            }
        }
    }

    #[test]
    fn sessions_that_share_a_seed_do_not_sample_the_same() {
        let shared = SessionSampling::Pinned { temperature: 1.0, seed: 7 };
        let plan =
            |sampling: SessionSampling, name: &str| sampling.of_session(&name.parse().expect("id")).plan(0);
        assert_eq!(plan(shared, "a"), plan(shared, "a"));
        assert_ne!(plan(shared, "a"), plan(shared, "b"));
        assert_ne!(plan(shared, "a"), plan(SessionSampling::Pinned { temperature: 1.0, seed: 8 }, "a"));
        assert_eq!(
            SessionSampling::PassThrough.of_session(&"a".parse().expect("id")),
            SessionSampling::PassThrough
        );
        // A trainer's session has a seed of its own, which stays what it is.
        assert_eq!(shared.plan(0), SamplingPlan::Pinned { temperature: 1.0, seed: call_seed(7, 0) });
    }

    #[test]
    fn a_message_is_the_same_whatever_its_spacing_and_order() {
        let hash = |text: &str| message_hash(text.as_bytes());
        assert_eq!(
            hash(r#"{"role":"user","content":["a",1]}"#),
            hash(r#"{ "content": ["a", 1], "role": "user" }"#)
        );
        assert_ne!(hash(r#"{"role":"user","content":"a"}"#), hash(r#"{"role":"user","content":"b"}"#));
    }
}
