//! Whether an upstream is asked in the words of Responses.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::transport::Upstream;
use crate::config::UpstreamResponses;
use crate::record::UpstreamKind;

/// After that time the upstream is asked anew: it may be another release.
const HOLDS: Duration = Duration::from_secs(600);
/// Most models of which it is remembered: their names are clients' to choose.
const MAX_MODELS: usize = 1000;

/// What is set, and what calls have shown.
#[derive(Debug, Default)]
pub(super) struct Responses {
    choice: UpstreamResponses,
    /// Gateways have the route for some models and not for others.
    seen: Mutex<HashMap<String, (bool, Instant)>>,
}

impl Responses {
    fn seen(&self, model: &str, now: Instant) -> Option<bool> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (has, since) = seen.get(model)?;
        (now.saturating_duration_since(*since) < HOLDS).then_some(*has)
    }

    fn saw(&self, model: &str, has: bool, now: Instant) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() >= MAX_MODELS {
            seen.retain(|_, (_, since)| now.saturating_duration_since(*since) < HOLDS);
        }
        // A model that is not remembered is asked for in vain each time, and that is all.
        if seen.len() < MAX_MODELS || seen.contains_key(model) {
            seen.insert(model.to_owned(), (has, now));
        }
    }
}

impl Upstream {
    /// The same, with how clients of Responses are served.
    #[must_use]
    pub fn with_responses(mut self, choice: UpstreamResponses) -> Self {
        self.responses.choice = choice;
        self
    }

    /// How clients of Responses are served; other kinds give token ids, which there are through chat only.
    #[must_use]
    pub fn responses_choice(&self) -> UpstreamResponses {
        match self.kind() {
            UpstreamKind::Openai => self.responses.choice,
            _ => UpstreamResponses::Translate,
        }
    }

    /// Whether it has the route for this model of its own, if a call has shown that a short time ago.
    #[must_use]
    pub fn has_responses(&self, model: &str) -> Option<bool> {
        self.responses.seen(model, Instant::now())
    }

    /// Remembers whether it has the route for this model of its own.
    pub fn set_has_responses(&self, model: &str, has: bool) {
        self.responses.saw(model, has, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_holds_for_its_model_and_for_a_while() {
        let responses = Responses::default();
        let now = Instant::now();
        responses.saw("a", false, now);
        responses.saw("b", true, now);
        assert_eq!((responses.seen("a", now), responses.seen("b", now)), (Some(false), Some(true)));
        assert_eq!((responses.seen("c", now), responses.seen("a", now + 2 * HOLDS)), (None, None));
        for number in 0..2 * MAX_MODELS {
            responses.saw(&number.to_string(), true, now);
        }
        assert_eq!(responses.seen.lock().expect("whole").len(), MAX_MODELS);
        responses.saw("a", true, now);
        assert_eq!(responses.seen("a", now), Some(true));
    }
}
