//! What a client sees: its own protocol, whatever the upstream speaks.

use std::sync::Arc;

use axum::response::Response;
use bytes::Bytes;
use serde::Deserialize;

use super::responses::Responses;
use super::routes::Route;
use super::session::Session;
use super::token_in::Rendered;
use super::{Inner, reply};
use crate::config::{InlineSystem, ReplayedReasoning, ServerTools};
use crate::protocol::chat::{self, Reply, Request};
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::json;
use crate::protocol::messages::Assembled;
use crate::protocol::translate::{Piece, ReplyNames, ReplyWriter, Translation};
use crate::protocol::volatile::Shape;
use crate::protocol::{completions, generate, messages, responses, server_tools};
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
    /// The response that it goes on from, and whose items it does not say again.
    pub(super) goes_on_from: Option<String>,
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
        let told = without_volatile(inner, route, api, &body).unwrap_or_else(|| body.clone());
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
        // An upstream that reads the request itself has all of its tools.
        let told = &if passes { told } else { without_server_tools(inner, route, api, told)? };
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
        let goes_on_from = match api {
            // What cannot be read is refused by whoever answers it.
            ClientApi::OpenaiResponses => responses::Kept::read(&body).ok(),
            _ => None,
        };
        let goes_on_from = goes_on_from.and_then(|kept| kept.previous_response_id);
        Ok(Self { body, request, said, face: Face { api, upstream_api, writer }, goes_on_from })
    }

    /// The request in the words in which calls of one conversation are compared.
    pub(super) fn as_said(&self) -> &Request {
        self.said.as_ref().unwrap_or(&self.request)
    }

    /// True if it says only what is new in its conversation.
    pub(super) fn says_no_history(&self) -> bool {
        self.said.is_some() && self.goes_on_from.is_some()
    }
}

/// A request of Responses that was put in chat's words after all. The same can be done for each client of its call.
pub(super) struct Retold {
    told: Bytes,
    earlier: Option<Vec<Bytes>>,
}

impl Retold {
    fn translated(&self) -> Result<Translation, ApiError> {
        responses::translate(&self.told, names(&self.told), self.earlier.as_deref())
    }

    /// The face of another client of this call.
    pub(super) fn face(&self) -> Option<Face> {
        let writer = Some(self.translated().ok()?.reply);
        Some(Face { api: ClientApi::OpenaiResponses, upstream_api: ClientApi::OpenaiChat, writer })
    }
}

/// A request of Responses as a chat request.
fn of_responses(inner: &Inner, told: &Bytes) -> Result<Translation, ApiError> {
    retold(inner, told)?.translated()
}

fn retold(inner: &Inner, told: &Bytes) -> Result<Retold, ApiError> {
    let earlier = inner.responses.earlier(&responses::Kept::read(told)?);
    Ok(Retold { told: told.clone(), earlier })
}

/// The same for a call whose upstream turned out not to speak Responses.
pub(super) fn of_responses_after_all(
    inner: &Inner,
    route: &Route,
    body: &Bytes,
) -> Result<(Request, Box<dyn ReplyWriter>, Retold), ApiError> {
    let retold = retold(inner, &told(inner, route, ClientApi::OpenaiResponses, body)?)?;
    let Translation { chat, reply } = retold.translated()?;
    let request = Request::parse(as_configured(inner, chat)?)
        .map_err(|error| ApiError::new(400, ErrorType::InvalidRequest, "bad_request", error.to_string()))?;
    Ok((request, reply, retold))
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
    /// The upstream is asked with tokens, in this protocol.
    pub(super) fn ask_with_tokens(&mut self, rendered: &Arc<Rendered>, upstream_api: ClientApi) {
        let is_native = upstream_api == ClientApi::SglangGenerate;
        self.writer = Some(rendered.writer(self.writer.take(), is_native));
        self.upstream_api = upstream_api;
    }

    /// The upstream is spoken to in the client's protocol after all.
    pub(super) fn speak_plainly(&mut self) {
        self.upstream_api = self.api;
        self.writer = None;
    }

    /// What a whole body says that is no reply in the client's own protocol; `None`: it is one, or the client has the
    /// upstream's own words for it.
    pub(super) fn refusal(
        &self,
        read: Assembled,
        reply: &Reply,
        body: &[u8],
        upstream: &str,
    ) -> Option<ApiError> {
        self.writer.as_ref()?;
        if read.fed.has_error {
            return Some(ApiError::from_upstream(502, body, upstream));
        }
        self.aborted(reply)
    }

    /// The same of a reply that the upstream gave up: these protocols have no finish reason that says it.
    pub(super) fn aborted(&self, reply: &Reply) -> Option<ApiError> {
        let is_told = matches!(self.api, ClientApi::AnthropicMessages | ClientApi::OpenaiResponses);
        let why = reply.aborted().filter(|_| is_told && self.writer.is_some())?;
        Some(ApiError::new(502, ErrorType::Upstream, "upstream_aborted", why))
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

    /// Keeps a finished response for those that go on from it. `reply`: the upstream's.
    pub(super) fn keep(&self, store: &Responses, session: &Session, reply: &Reply) {
        let session = &session.spec.session_id;
        if let Some(kept) = self.writer.as_ref().and_then(|writer| writer.kept()) {
            store.was_of(&kept.id, session);
            store.keep(kept);
        } else if let Some(id) = reply.id.as_deref().filter(|_| self.passes_responses()) {
            store.was_of(id, session);
        }
    }
}

/// A request without what the configuration has left out of it. A server of Messages gets what its client wrote.
///
/// # Errors
/// 400 for a tool that the configuration has refused, and for one that is left out and must be called.
pub(super) fn told(inner: &Inner, route: &Route, api: ClientApi, body: &Bytes) -> Result<Bytes, ApiError> {
    let told = without_volatile(inner, route, api, body).unwrap_or_else(|| body.clone());
    without_server_tools(inner, route, api, told)
}

/// The same without the tools that nobody here runs, as the configuration says.
fn without_server_tools(
    inner: &Inner,
    route: &Route,
    api: ClientApi,
    told: Bytes,
) -> Result<Bytes, ApiError> {
    let without = match (api, inner.options.server_tools) {
        _ if route.upstream.kind() == UpstreamKind::Anthropic => None,
        (ClientApi::AnthropicMessages, ServerTools::Drop) => server_tools::dropped_from_messages(&told)?,
        (ClientApi::OpenaiResponses, ServerTools::Drop) => server_tools::dropped_from_responses(&told),
        (ClientApi::OpenaiResponses, ServerTools::Refuse) => {
            server_tools::none_in_responses(&told)?;
            None
        }
        // The translation refuses them.
        _ => None,
    };
    Ok(without.unwrap_or(told))
}

/// A request without the volatile parts that are to be removed; `None` if there are none.
fn without_volatile(inner: &Inner, route: &Route, api: ClientApi, body: &Bytes) -> Option<Bytes> {
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
