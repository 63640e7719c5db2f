//! What a client sees: its own protocol, whatever the upstream speaks.

use axum::response::Response;
use bytes::Bytes;

use super::{Inner, reply};
use crate::protocol::chat::Request;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::translate::{ReplyNames, ReplyWriter, Translation};
use crate::record::{CallId, ClientApi};

/// A request as its client sent it, and as a chat request.
pub(super) struct Incoming {
    pub(super) body: Bytes,
    pub(super) request: Request,
    pub(super) face: Face,
}

/// The client's protocol.
pub(super) struct Face {
    pub(super) api: ClientApi,
    /// `None`: the upstream speaks it too, and its bytes are the client's (law 5).
    pub(super) writer: Option<Box<dyn ReplyWriter>>,
}

impl Incoming {
    /// Reads a request of this protocol.
    pub(super) fn read(_inner: &Inner, api: ClientApi, body: Bytes) -> Result<Self, ApiError> {
        let bad = |message: String| ApiError::new(400, ErrorType::InvalidRequest, "bad_request", message);
        let translated: Option<Translation> = match api {
            ClientApi::OpenaiChat => None,
            _ => return Err(bad(format!("{} is not served", api.as_str()))),
        };
        let (chat, writer) = match translated {
            None => (body.clone(), None),
            Some(Translation { chat, reply }) => (chat, Some(reply)),
        };
        let request = Request::parse(chat).map_err(|error| bad(error.to_string()))?;
        Ok(Self { body, request, face: Face { api, writer } })
    }
}

impl Face {
    /// An answer that is an error.
    pub(super) fn error(&self, error: &ApiError) -> Response {
        reply::error(self.api, error)
    }

    /// The end of a stream that broke off.
    pub(super) fn error_event(&mut self, error: &ApiError) -> Bytes {
        match &mut self.writer {
            Some(writer) => writer.error_event(error),
            None => error.event(),
        }
    }
}

/// Names for the reply of a call that begins now.
#[allow(dead_code)]
fn names(model: String) -> ReplyNames {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    ReplyNames { call_id: CallId::now().to_string(), model, created: since_epoch.as_secs() }
}
