//! The sessions that are open, and the names of those that ended.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::session::Session;
use crate::protocol::error::{ApiError, ErrorType};
use crate::record::SessionId;

/// Sessions that a stand-alone proxy has open; the oldest is forgotten first, which costs only its history.
const MAX_STAND_ALONE: usize = 10_000;
/// Names of ended sessions that are remembered, and of those that may begin anew; the oldest is forgotten first.
const MAX_ENDED: usize = 10_000;
/// Names that lego gives begin so. Nobody chose them, so one that ended may begin anew.
pub(super) const DERIVED: &str = "derived-";

/// The sessions of a proxy.
pub(super) struct Sessions {
    /// A stand-alone session that has been idle for longer is ended.
    longest_idle: Option<Duration>,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    by_id: HashMap<SessionId, Arc<Session>>,
    /// Stand-alone sessions, oldest first.
    made: VecDeque<SessionId>,
    /// Tombstones: what comes late for an ended session is refused, and does not bring it back to life.
    ended: Names,
    /// Sessions that may begin anew, with the number of their next call: they would sample as before otherwise.
    paused: Names,
}

/// Names of sessions, each with a number.
#[derive(Default)]
struct Names {
    names: HashMap<SessionId, u64>,
    oldest_first: VecDeque<SessionId>,
}

impl Names {
    /// False if it was there before.
    fn insert(&mut self, id: &SessionId, number: u64) -> bool {
        if self.names.insert(id.clone(), number).is_some() {
            return false;
        }
        if self.oldest_first.len() >= MAX_ENDED
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.names.remove(&oldest);
        }
        self.oldest_first.push_back(id.clone());
        true
    }

    fn remove(&mut self, id: &SessionId) -> Option<u64> {
        let number = self.names.remove(id)?;
        self.oldest_first.retain(|name| name != id);
        Some(number)
    }
}

impl Sessions {
    pub(super) fn new(longest_idle: Option<Duration>) -> Self {
        Self { longest_idle, open: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` if the id is taken.
    pub(super) fn open(&self, session: Arc<Session>) -> Option<Arc<Session>> {
        let mut open = self.lock();
        let id = session.spec.session_id.clone();
        if open.by_id.contains_key(&id) {
            return None;
        }
        open.ended.remove(&id);
        open.by_id.insert(id, Arc::clone(&session));
        Some(session)
    }

    /// An open session. A call for one that ended is logged.
    pub(super) fn get(&self, id: &SessionId) -> Option<Arc<Session>> {
        let open = self.lock();
        let found = open.by_id.get(id).cloned();
        if found.is_none() && open.ended.names.contains_key(id) {
            tracing::warn!(session = %id, "a call came after its session was ended");
        }
        found
    }

    /// The session with this id, made if there is none.
    pub(super) fn get_or_make(
        &self,
        id: SessionId,
        now: Instant,
        make: impl FnOnce(SessionId) -> Arc<Session>,
    ) -> Result<Arc<Session>, ApiError> {
        let mut open = self.lock();
        if let Some(session) = open.by_id.get(&id) {
            if !self.is_expired(session, now) {
                session.touch(now);
                return Ok(Arc::clone(session));
            }
            open.expire(&id);
        }
        if open.ended.names.contains_key(&id) {
            tracing::warn!(session = %id, "a call came after its session was ended");
            let message = format!("session {id} was ended; use another id");
            return Err(ApiError::new(409, ErrorType::Conflict, "session_ended", message));
        }
        if open.made.len() >= MAX_STAND_ALONE
            && let Some(oldest) = open.made.pop_front()
            && let Some(session) = open.by_id.remove(&oldest)
        {
            open.paused.insert(&oldest, session.next_index());
        }
        let session = make(id.clone());
        if let Some(next_index) = open.paused.remove(&id) {
            session.go_on_from(next_index);
        }
        open.made.push_back(id.clone());
        open.by_id.insert(id, Arc::clone(&session));
        Ok(session)
    }

    /// Ends a stand-alone session: calls that run go on, further ones are refused. False if it was ended before.
    pub(super) fn end(&self, id: &SessionId) -> bool {
        let mut open = self.lock();
        open.forget(id);
        open.ended.insert(id, 0)
    }

    /// A trainer's session is closed.
    pub(super) fn remove(&self, session: &Arc<Session>) {
        let mut open = self.lock();
        let id = &session.spec.session_id;
        // Its name may be another session's by now.
        if open.by_id.get(id).is_some_and(|open| Arc::ptr_eq(open, session)) {
            open.by_id.remove(id);
            open.ended.insert(id, 0);
        }
    }

    /// Ends the stand-alone sessions that have been idle for too long.
    fn expire(&self, now: Instant) {
        let mut open = self.lock();
        let is_over =
            |id: &SessionId| open.by_id.get(id).is_some_and(|session| self.is_expired(session, now));
        let over: Vec<SessionId> = open.made.iter().filter(|id| is_over(id)).cloned().collect();
        for id in over {
            open.expire(&id);
        }
    }

    /// Expires sessions as time passes; never returns.
    pub(super) async fn keep_tidy(&self) {
        let Some(longest) = self.longest_idle else {
            return std::future::pending().await;
        };
        let pause = (longest / 4).clamp(Duration::from_millis(10), Duration::from_secs(60));
        loop {
            tokio::time::sleep(pause).await;
            self.expire(Instant::now());
        }
    }

    fn is_expired(&self, session: &Session, now: Instant) -> bool {
        let idle = session.idle_since().map(|since| now.saturating_duration_since(since));
        self.longest_idle.zip(idle).is_some_and(|(longest, idle)| idle > longest)
    }
}

impl Open {
    fn forget(&mut self, id: &SessionId) -> Option<Arc<Session>> {
        let session = self.by_id.remove(id)?;
        self.made.retain(|made| made != id);
        Some(session)
    }

    fn expire(&mut self, id: &SessionId) {
        let next_index = self.forget(id).map_or(0, |session| session.next_index());
        if id.as_str().starts_with(DERIVED) {
            self.paused.insert(id, next_index);
        } else {
            self.ended.insert(id, 0);
        }
        metrics::counter!("lego_proxy_sessions_expired_total").increment(1);
        tracing::info!(session = %id, "a session was idle for longer than proxy.session_idle_secs and is ended");
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::proxy::session::{SessionSampling, SessionSpec};

    const IDLE: Duration = Duration::from_secs(60);

    fn make(id: SessionId) -> Arc<Session> {
        let spec = SessionSpec::stand_alone(id, SessionSampling::PassThrough);
        Session::new(spec, false, CancellationToken::new())
    }

    fn id(name: &str) -> SessionId {
        name.parse().expect("id")
    }

    fn count(sessions: &Sessions) -> (usize, usize) {
        let open = sessions.lock();
        (open.by_id.len(), open.made.len())
    }

    #[test]
    fn an_idle_session_is_freed_and_what_comes_late_for_it_is_refused() {
        let sessions = Sessions::new(Some(IDLE));
        let start = Instant::now();
        let late = start + 2 * IDLE;
        for name in ["a", "b", "derived-c"] {
            sessions.get_or_make(id(name), start, make).expect("made");
        }
        let busy = sessions.get_or_make(id("busy"), start, make).expect("made");
        let call = busy.token();
        sessions.expire(start + IDLE / 2);
        assert_eq!(count(&sessions), (4, 4));
        // One of them is found out by its own late call.
        let refused = sessions.get_or_make(id("a"), late, make).map(drop).expect_err("ended");
        assert_eq!((refused.status, refused.code), (409, "session_ended"));
        sessions.expire(late);
        assert_eq!(count(&sessions), (1, 1), "a call runs in one");
        assert!(sessions.get_or_make(id("b"), late, make).is_err());
        assert!(sessions.get_or_make(id("derived-c"), late, make).is_ok(), "nobody chose its name");
        assert!(Arc::ptr_eq(&sessions.get_or_make(id("busy"), late, make).expect("open"), &busy));
        drop(call);
        sessions.expire(late + 2 * IDLE);
        assert_eq!(count(&sessions), (0, 0));
    }

    #[test]
    fn a_session_that_is_used_or_may_be_idle_for_ever_stays() {
        let sessions = Sessions::new(Some(IDLE));
        let mut now = Instant::now();
        for _ in 0..10 {
            sessions.get_or_make(id("a"), now, make).expect("open");
            now += IDLE * 2 / 3;
            sessions.expire(now);
        }
        assert_eq!(count(&sessions), (1, 1));
        let sessions = Sessions::new(None);
        sessions.get_or_make(id("a"), now, make).expect("made");
        sessions.expire(now + 1000 * IDLE);
        assert_eq!(count(&sessions), (1, 1));
    }

    #[test]
    fn a_session_that_begins_anew_goes_on_counting_its_calls() {
        let sessions = Sessions::new(Some(IDLE));
        let start = Instant::now();
        let first = sessions.get_or_make(id("derived-a"), start, make).expect("made");
        first.go_on_from(3);
        drop(first);
        sessions.expire(start + 2 * IDLE);
        let again = sessions.get_or_make(id("derived-a"), start + 2 * IDLE, make).expect("anew");
        assert_eq!(again.next_index(), 3);

        let sessions = Sessions::new(None);
        sessions.get_or_make(id("a"), start, make).expect("made").go_on_from(5);
        for number in 0..MAX_STAND_ALONE {
            sessions.get_or_make(id(&format!("s{number}")), start, make).expect("made");
        }
        assert_eq!(sessions.get_or_make(id("a"), start, make).expect("anew").next_index(), 5);
        assert_eq!(sessions.get_or_make(id("b"), start, make).expect("new").next_index(), 0);
    }

    #[test]
    fn tombstones_are_bounded_and_a_trainer_may_use_a_name_again() {
        let sessions = Sessions::new(None);
        for number in 0..MAX_ENDED + 5 {
            assert!(sessions.end(&id(&format!("s{number}"))));
        }
        assert!(!sessions.end(&id("s5")));
        assert!(sessions.get_or_make(id("s4"), Instant::now(), make).is_ok(), "forgotten");
        assert!(sessions.get_or_make(id("s5"), Instant::now(), make).is_err());
        let first = sessions.open(make(id("t"))).expect("free");
        sessions.remove(&first);
        let second = sessions.open(make(id("t"))).expect("free again");
        // The first one's handle is dropped late.
        sessions.remove(&first);
        assert!(Arc::ptr_eq(&sessions.get(&id("t")).expect("open"), &second));
    }
}
