//! What a client sees: its own protocol, whatever the upstream speaks.

use axum::response::Response;
use bytes::Bytes;
use serde::Deserialize;

use super::responses::Responses;
use super::routes::Route;
use super::{Inner, reply};
use crate::config::{InlineSystem, ReplayedReasoning};
use crate::protocol::chat::{self, Request};
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::json;
use crate::protocol::translate::{Piece, ReplyNames, ReplyWriter, Translation};
use crate::protocol::volatile::Shape;
use crate::protocol::{completions, generate, messages, responses};
use crate::record::{CallId, ClientApi, UpstreamKind};
use crate::upstream::sglang_completions::CompletionsWriter;
use crate::upstream::sglang_request;

/// A request as its client sent it, and as lego reads it.
pub(super) struct Incoming {
    pub(super) body: Bytes,
    pub(super) request: Request,
    /// As the client said it, where the upstream may be spoken to in either protocol: calls of one conversation are
    /// compared in one.
    pub(super) said: Option<Request>,
    pub(super) face: Face,
}

/// The client's protocol.
pub(super) struct Face {
    pub(super) api: ClientApi,
    /// What the upstream is spoken to in.
    pub(super) upstream_api: ClientApi,
    /// `None`: the upstream speaks the client's protocol, and its bytes are the client's (law 5).
    pub(super) writer: Option<Box<dyn ReplyWriter>>,
}

impl Incoming {
    /// Reads a request of this protocol.
    ///
    /// What the configuration has removed from prompts is not in the request, but in the body.
    pub(super) fn read(inner: &Inner, route: &Route, api: ClientApi, body: Bytes) -> Result<Self, ApiError> {
        let bad = |message: String| ApiError::new(400, ErrorType::InvalidRequest, "bad_request", message);
        let upstream = &route.upstream;
        let speaks_messages = upstream.kind() == UpstreamKind::Anthropic;
        let speaks_native = upstream.kind() == UpstreamKind::Sglang;
        if api == ClientApi::SglangGenerate && !speaks_native {
            let message = "the upstream of this model does not serve SGLang's POST /generate: use POST /v1/completions, or \
                           set upstream_kind = \"sglang\" if it is an SGLang server";
            return Err(bad(message.to_owned()));
        }
        if speaks_messages && api != ClientApi::AnthropicMessages {
            let message = "the upstream of this model speaks Anthropic's Messages only (upstream_kind = \"anthropic\"): \
                           use POST /v1/messages";
            return Err(bad(message.to_owned()));
        }
        let told = without_volatile(inner, route, api, &body);
        let told = told.as_ref().unwrap_or(&body);
        let said = match api {
            ClientApi::OpenaiResponses if route.may_pass_responses() => {
                Some(Request::from_responses(told.clone()).map_err(|error| bad(error.to_string()))?)
            }
            _ => None,
        };
        let passing = said.as_ref().filter(|said| route.passes_responses(&inner.options, &said.model));
        let passes = passing.is_some();
        if passing.is_some_and(|said| said.get("background") == Some(true.into())) {
            let message = "background is true: this proxy answers in the same request and records what it answers, so leave \
                           it out or send false";
            return Err(bad(message.to_owned()));
        }
        let translated = match api {
            // What a server of Messages takes is for it to say: lego reads the members that both protocols have.
            ClientApi::AnthropicMessages if speaks_messages => None,
            ClientApi::AnthropicMessages => Some(messages::translate(told, names(told))?),
            ClientApi::OpenaiResponses if passes => None,
            ClientApi::OpenaiResponses => Some(of_responses(inner, told)?),
            _ => None,
        };
        let translated = match translated {
            Some(Translation { chat, reply }) => {
                Some(Translation { chat: as_configured(inner, chat)?, reply })
            }
            None => None,
        };
        let mut native: Option<Box<dyn ReplyWriter>> = None;
        let request = match (&translated, api) {
            (Some(Translation { chat, .. }), _) => Request::parse(chat.clone()),
            (None, ClientApi::OpenaiCompletions) => {
                let read =
                    completions::Request::parse(body.clone()).map_err(|error| bad(error.to_string()))?;
                let model = route.upstream_model(&inner.options, &read.model).unwrap_or(&read.model);
                // Whether the server has the endpoint is asked later: a client that comes back asks for the same,
                // though it may be known by then.
                if speaks_native && sglang_request::is_expressible(&read, model) {
                    native = Some(Box::new(CompletionsWriter::new(&read, names(told))));
                }
                Ok(Request::from_completions(&read))
            }
            (None, ClientApi::SglangGenerate) => {
                let read = generate::Request::parse(body.clone()).map_err(|error| bad(error.to_string()))?;
                Ok(Request::from_generate(&read))
            }
            (None, ClientApi::OpenaiResponses) => Request::from_responses(told.clone()),
            (None, _) => Request::parse(told.clone()),
        };
        let request = request.map_err(|error| bad(error.to_string()))?;
        let (upstream_api, writer) = match (translated, native) {
            (Some(Translation { reply, .. }), _) => (ClientApi::OpenaiChat, Some(reply)),
            (None, Some(writer)) => (ClientApi::SglangGenerate, Some(writer)),
            (None, None) => (api, None),
        };
        Ok(Self { body, request, said, face: Face { api, upstream_api, writer } })
    }
}

/// A request of Responses as a chat request.
fn of_responses(inner: &Inner, told: &Bytes) -> Result<Translation, ApiError> {
    let earlier = inner.responses.earlier(&responses::Kept::read(told)?);
    responses::translate(told, names(told), earlier.as_deref())
}

/// The same for a call whose upstream turned out not to speak Responses.
pub(super) fn of_responses_after_all(
    inner: &Inner,
    route: &Route,
    body: &Bytes,
) -> Result<(Request, Box<dyn ReplyWriter>), ApiError> {
    let told = without_volatile(inner, route, ClientApi::OpenaiResponses, body);
    let Translation { chat, reply } = of_responses(inner, told.as_ref().unwrap_or(body))?;
    let request = Request::parse(as_configured(inner, chat)?)
        .map_err(|error| ApiError::new(400, ErrorType::InvalidRequest, "bad_request", error.to_string()))?;
    Ok((request, reply))
}

/// A translated request, with what the configuration makes of its parts.
pub(super) fn as_configured(inner: &Inner, mut chat: Bytes) -> Result<Bytes, ApiError> {
    let bad = |error: json::ScanError| {
        ApiError::new(400, ErrorType::InvalidRequest, "bad_request", error.to_string())
    };
    if inner.options.inline_system == InlineSystem::User {
        chat = chat::inline_system_as_user(&chat).map_err(bad)?;
    }
    if inner.options.replayed_reasoning == ReplayedReasoning::Drop {
        chat = chat::without_reasoning(&chat).map_err(bad)?;
    }
    Ok(chat)
}

impl Face {
    /// The upstream is spoken to in the client's protocol after all.
    pub(super) fn speak_plainly(&mut self) {
        self.upstream_api = self.api;
        self.writer = None;
    }

    /// The upstream writes the client's responses itself.
    pub(super) fn passes_responses(&self) -> bool {
        self.upstream_api == ClientApi::OpenaiResponses
    }

    /// An answer that is an error.
    pub(super) fn error(&self, error: &ApiError) -> Response {
        reply::error(self.api, error)
    }

    /// The end of a stream that broke off.
    pub(super) fn error_event(&mut self, error: &ApiError) -> Bytes {
        match &mut self.writer {
            Some(writer) => writer.error_event(error),
            None if self.api == ClientApi::AnthropicMessages => messages::error_event(error, None),
            None => error.event(),
        }
    }

    /// The end of a translated reply, after the call is durable.
    pub(super) fn end(&mut self) -> Vec<Bytes> {
        self.written(|writer, pieces| writer.end(pieces))
    }

    /// An event of the client's protocol that changes nothing; `None` where its bytes are the upstream's.
    pub(super) fn keep_alive(&mut self) -> Option<Vec<Bytes>> {
        match &self.writer {
            Some(_) => Some(self.written(|writer, pieces| writer.keep_alive(pieces))),
            None if self.api == ClientApi::AnthropicMessages => {
                Some(vec![Bytes::from_static(b"event: ping\ndata: {\"type\": \"ping\"}\n\n")])
            }
            // The protocol has no event that says nothing: each has an output's `meta_info`.
            None if self.api == ClientApi::SglangGenerate => {
                Some(vec![Bytes::from_static(b": keep-alive\n\n")])
            }
            None => None,
        }
    }

    fn written(&mut self, write: impl FnOnce(&mut Box<dyn ReplyWriter>, &mut Vec<Piece>)) -> Vec<Bytes> {
        let mut pieces = Vec::new();
        if let Some(writer) = &mut self.writer {
            write(writer, &mut pieces);
        }
        let bytes = |piece| match piece {
            Piece::Bytes(bytes) => Some(bytes),
            Piece::Barrier => None,
        };
        pieces.into_iter().filter_map(bytes).collect()
    }

    /// Keeps a finished response for those that go on from it.
    pub(super) fn keep(&self, store: &Responses) {
        if let Some(kept) = self.writer.as_ref().and_then(|writer| writer.kept()) {
            store.keep(kept);
        }
    }
}

/// A request without the parts that the configuration has removed; `None` if there are none. A server of Messages
/// gets what its client wrote.
pub(super) fn without_volatile(inner: &Inner, route: &Route, api: ClientApi, body: &Bytes) -> Option<Bytes> {
    let shape = match api {
        _ if route.upstream.kind() == UpstreamKind::Anthropic => return None,
        ClientApi::AnthropicMessages => Shape::Messages,
        ClientApi::OpenaiResponses => Shape::Responses,
        ClientApi::OpenaiChat => Shape::Chat,
        _ => return None,
    };
    // A body that cannot be read is refused with its own reason.
    inner.options.volatile.removed(shape, body).ok().flatten()
}

/// The model that a request asks for; `None` if it names none.
pub(super) fn asked_model(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct View {
        model: String,
    }
    serde_json::from_slice::<View>(body).ok().map(|view| view.model)
}

/// Names for the reply of a call that begins now.
pub(super) fn names(body: &[u8]) -> ReplyNames {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // A request without a model is refused when it is read.
    let model = asked_model(body).unwrap_or_default();
    ReplyNames { call_id: CallId::now().to_string(), model, created: since_epoch.as_secs() }
}
