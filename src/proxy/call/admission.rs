//! Where a call waits before it is sent.

use std::sync::Arc;
use std::time::Duration;

use super::Call;
use crate::proxy::Inner;
use crate::proxy::limits::{Places, Refused};
use crate::proxy::routes::Route;
use crate::proxy::session::Session;

/// A place for a call, for which it waits no longer than its session lasts.
pub(super) async fn admitted(inner: &Inner, session: &Session, route: &Route) -> Result<Places, Refused> {
    let closed = session.closed();
    tokio::select! {
        biased;
        // Nobody is to come back for it.
        () = closed.cancelled() => Err(Refused {
            status: 403,
            message: format!("session {} ended before the call found a place", session.spec.session_id),
            code: "session_closed",
            after: Duration::from_secs(1),
        }),
        places = place(inner, route) => places,
    }
}

/// A place of the call's route, then of the proxy.
async fn place(inner: &Inner, route: &Route) -> Result<Places, Refused> {
    let _waiting = inner.measures.without_place();
    let of_route = route.limits.place().await?;
    let waiting = Arc::clone(&inner.slots).acquire_owned();
    match tokio::time::timeout(inner.options.admission_wait, waiting).await {
        Ok(slot) => Ok(Places {
            _slot: slot.ok(),
            _of_route: of_route,
            _running: Some(inner.gate.enter()),
            _body: None,
        }),
        Err(_) => Err(Refused {
            status: 429,
            message: inner.share.full(),
            code: "too_many_calls",
            after: Duration::from_secs(1),
        }),
    }
}

impl Call {
    /// The turn to send once more.
    pub(super) async fn turn(&self) -> Result<(), Refused> {
        let _waiting = self.inner.measures.without_place();
        self.route.limits.turn().await
    }
}
