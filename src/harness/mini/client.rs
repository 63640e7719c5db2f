//! The client of `POST {base}/chat/completions`, not streaming.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::{Value, json};

/// Tries of one request when the server is unreachable or answers 429 or 5xx.
const TRIES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MAX_REPLY_BYTES: usize = 16 << 20;

/// A model that cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("OPENAI_BASE_URL is {url:?}: {cause}. It should look like http://127.0.0.1:18080/v1")]
    BaseUrl { url: String, cause: String },
    #[error("no answer from {url}: {cause}")]
    Unreachable { url: String, cause: String },
    #[error("{url} answered {status}: {body}")]
    Status { url: String, status: StatusCode, body: String },
    #[error("{url} answered something that is not a chat completion: {cause}")]
    Reply { url: String, cause: String },
}

/// Where and as whom to ask.
#[derive(Debug, Clone)]
pub struct Client {
    url: Uri,
    key: String,
    timeout: Duration,
}

/// The assistant's message of a reply.
#[derive(Debug, Clone, Deserialize)]
pub struct Message {
    #[serde(default)]
    pub content: Option<String>,
    #[serde(default)]
    pub tool_calls: Option<Vec<ToolCall>>,
}

/// A tool call; `arguments` is the text that the model wrote.
#[derive(Debug, Clone, Deserialize)]
pub struct ToolCall {
    #[serde(default)]
    pub id: String,
    pub function: FunctionCall,
}

/// Name and arguments of a tool call.
#[derive(Debug, Clone, Deserialize)]
pub struct FunctionCall {
    pub name: String,
    pub arguments: String,
}

impl Message {
    /// The message as it goes back in the next request's history.
    #[must_use]
    pub fn to_history(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if let Some(calls) = self.tool_calls.as_deref().filter(|calls| !calls.is_empty()) {
            message["tool_calls"] = calls
                .iter()
                .map(|call| {
                    let function = json!({"name": call.function.name, "arguments": call.function.arguments});
                    json!({"id": call.id, "type": "function", "function": function})
                })
                .collect();
        }
        message
    }
}

#[derive(Deserialize)]
struct Reply {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
}

impl Client {
    /// A client of the endpoint under this base URL; plain http only.
    ///
    /// # Errors
    /// [`ClientError::BaseUrl`].
    pub fn new(base_url: &str, key: &str, timeout: Duration) -> Result<Self, ClientError> {
        let bad = |cause: &str| ClientError::BaseUrl { url: base_url.to_owned(), cause: cause.to_owned() };
        let url: Uri = format!("{}/chat/completions", base_url.trim_end_matches('/'))
            .parse()
            .map_err(|error: http::uri::InvalidUri| bad(&error.to_string()))?;
        if url.scheme_str() != Some("http") {
            return Err(bad("only http:// is spoken here"));
        }
        if url.host().is_none() {
            return Err(bad("it has no host"));
        }
        Ok(Self { url, key: key.to_owned(), timeout })
    }

    /// Asks for the next message. A server that is unreachable, busy or broken is asked again, twice.
    ///
    /// # Errors
    /// [`ClientError`] of the last try.
    pub async fn complete(&self, request: &Value) -> Result<Message, ClientError> {
        let body = Bytes::from(request.to_string());
        let mut pause = FIRST_PAUSE;
        for _ in 1..TRIES {
            match self.try_once(body.clone()).await {
                Err(error) if is_worth_another_try(&error) => tokio::time::sleep(pause).await,
                result => return result,
            }
            pause *= 2;
        }
        self.try_once(body).await
    }

    async fn try_once(&self, body: Bytes) -> Result<Message, ClientError> {
        let exchange = tokio::time::timeout(self.timeout, self.exchange(body));
        let (status, body) =
            exchange.await.map_err(|_| self.unreachable(format!("timed out after {:?}", self.timeout)))??;
        if !status.is_success() {
            let body = String::from_utf8_lossy(&body).chars().take(500).collect();
            return Err(ClientError::Status { url: self.url.to_string(), status, body });
        }
        let reply = |cause: String| ClientError::Reply { url: self.url.to_string(), cause };
        let parsed: Reply = serde_json::from_slice(&body).map_err(|error| reply(error.to_string()))?;
        let choice = parsed.choices.into_iter().next();
        choice.map(|choice| choice.message).ok_or_else(|| reply("no choices".to_owned()))
    }

    async fn exchange(&self, body: Bytes) -> Result<(StatusCode, Bytes), ClientError> {
        let failed = |cause: &dyn std::fmt::Display| self.unreachable(cause.to_string());
        let host = self.url.host().unwrap_or_default();
        let address = (host.trim_matches(['[', ']']), self.url.port_u16().unwrap_or(80));
        let stream = tokio::net::TcpStream::connect(address).await.map_err(|e| failed(&e))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| failed(&e))?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.url.path_and_query().map_or("/", |path| path.as_str()))
            .header(header::HOST, self.url.authority().map_or("", |authority| authority.as_str()))
            .header(header::AUTHORIZATION, format!("Bearer {}", self.key))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONNECTION, "close")
            .body(Full::new(body))
            .map_err(|e| failed(&e))?;
        let exchange = async {
            let response = sender.send_request(request).await.map_err(|e| failed(&e))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_REPLY_BYTES)
                .collect()
                .await
                .map_err(|e| failed(&e))?;
            Ok((status, body.to_bytes()))
        };
        // The connection has to be driven while the exchange runs; its own errors reach the exchange.
        tokio::pin!(exchange);
        tokio::pin!(connection);
        tokio::select! {
            biased;
            result = &mut exchange => result,
            _ = &mut connection => exchange.await,
        }
    }

    fn unreachable(&self, cause: String) -> ClientError {
        ClientError::Unreachable { url: self.url.to_string(), cause }
    }
}

fn is_worth_another_try(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } => true,
        ClientError::Status { status, .. } => {
            *status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()
        }
        ClientError::BaseUrl { .. } | ClientError::Reply { .. } => false,
    }
}
