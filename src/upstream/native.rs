//! SGLang's native endpoint: where it is, and what it gives, as one tiny call shows it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method};
use serde_json::{Value, json};

use super::transport::Upstream;

/// It lies beside the version segment of OpenAI's routes.
pub const ROUTE: &str = "/../generate";
/// Longest wait for the tokenizer.
const TOKENIZER_LIMIT: Duration = Duration::from_secs(10);
/// A tokenizer that is not there, or did not answer in that time, is not asked for so long.
const SILENCE: Duration = Duration::from_secs(300);
/// Longest reply of the tokenizer.
const MAX_TOKENS_BYTES: usize = 64 << 20;

/// What the native endpoint gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Native {
    /// The server has it.
    pub is_there: bool,
    /// The prompt's ids, when asked.
    pub prompt_ids: bool,
    /// Expert routing, when asked.
    pub routing: bool,
}

impl Native {
    /// A recent release, without routing.
    pub const ASSUMED: Self = Self { is_there: true, prompt_ids: true, routing: false };
    /// A server without it.
    pub const MISSING: Self = Self { is_there: false, prompt_ids: false, routing: false };

    /// What the reply to a probe shows; `None` if it says nothing (the server is busy, or refuses what it was asked).
    #[must_use]
    pub fn from_reply(status: u16, body: &[u8]) -> Option<Self> {
        match status {
            // A gateway in front of it that lets only `/v1` through may call it forbidden.
            401 | 403 => return Some(Self::MISSING),
            _ if is_missing(status) => return Some(Self::MISSING),
            200..300 => {}
            _ => return None,
        }
        let reply: Value = serde_json::from_slice(body).ok()?;
        let meta = &reply["meta_info"];
        let has_ids = reply["output_ids"].is_array() || meta["output_token_logprobs"].is_array();
        Some(Self {
            is_there: has_ids,
            prompt_ids: reply["prompt_token_ids"].is_array(),
            routing: meta["routed_experts"].is_string(),
        })
    }
}

/// True if a status says that the server has no such route.
#[must_use]
pub const fn is_missing(status: u16) -> bool {
    matches!(status, 404 | 405 | 501)
}

/// The body of the probe number `attempt`, a call of one token; later ones ask for less.
#[must_use]
pub fn probe_body(attempt: usize) -> Option<Bytes> {
    let mut body = json!({
        "text": "hi",
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "stream": false,
        "return_logprob": true,
        "return_prompt_token_ids": true,
    });
    match attempt {
        0 => body["return_routed_experts"] = true.into(),
        1 => {}
        _ => return None,
    }
    Some(body.to_string().into())
}

/// Until when a server's `/tokenize` is not asked, which it has not or did not answer in time.
#[derive(Debug, Default)]
pub(super) struct Silence(Mutex<Option<Instant>>);

impl Silence {
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none_or(|until| now >= until)
    }

    fn begin(&self, now: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = now.checked_add(SILENCE);
    }
}

impl Upstream {
    /// False while its tokenizer is not asked: it is not there, or did not answer in time a short time ago.
    #[must_use]
    pub fn tokenizes(&self) -> bool {
        self.silence().is_over(Instant::now())
    }
}

/// Why there are no ids.
enum NoIds {
    /// There will be none for other prompts either.
    NoTokenizer,
    OfThisPrompt,
}

/// The token ids of a prompt (JSON: a text, or a list of them) by the upstream's own tokenizer, as JSON; `None` if it
/// does not say soon.
pub async fn tokenized(upstream: &Upstream, model: &str, prompt: &[u8]) -> Option<Vec<u8>> {
    let asked = tokio::time::timeout(TOKENIZER_LIMIT, ask_tokenizer(upstream, model, prompt)).await;
    match asked.unwrap_or(Err(NoIds::NoTokenizer)) {
        Ok(ids) => Some(ids),
        Err(NoIds::OfThisPrompt) => None,
        Err(NoIds::NoTokenizer) => {
            let minutes = SILENCE.as_secs() / 60;
            tracing::info!(upstream = %upstream.name(), "/tokenize does not answer; it is not asked for {minutes} minutes");
            upstream.silence().begin(Instant::now());
            None
        }
    }
}

async fn ask_tokenizer(upstream: &Upstream, model: &str, prompt: &[u8]) -> Result<Vec<u8>, NoIds> {
    let model = Value::from(model).to_string();
    let request = [br#"{"model":"#, model.as_bytes(), br#","prompt":"#, prompt, b"}"].concat();
    let headers = HeaderMap::new();
    let sent = upstream.send(Method::POST, "/../tokenize", None, &headers, request.into()).await;
    let reply = sent.map_err(|_| NoIds::OfThisPrompt)?;
    if is_missing(reply.status.as_u16()) {
        return Err(NoIds::NoTokenizer);
    }
    if !reply.status.is_success() {
        return Err(NoIds::OfThisPrompt);
    }
    let mut body = reply.body;
    let mut text = BytesMut::new();
    while let Some(piece) = body.next(1 << 16).await {
        text.extend_from_slice(&piece.map_err(|_| NoIds::OfThisPrompt)?);
        if text.len() > MAX_TOKENS_BYTES {
            return Err(NoIds::OfThisPrompt);
        }
    }
    // A gateway that answers everything.
    let reply: Value = serde_json::from_slice(&text).map_err(|_| NoIds::NoTokenizer)?;
    let tokens = reply.get("tokens").ok_or(NoIds::NoTokenizer)?;
    are_of(tokens, prompt).then(|| tokens.to_string().into_bytes()).ok_or(NoIds::OfThisPrompt)
}

/// True if these are the ids of this prompt's texts.
fn are_of(tokens: &Value, prompt: &[u8]) -> bool {
    let are_ids = |list: &Value| {
        list.as_array().is_some_and(|ids| {
            !ids.is_empty() && ids.iter().all(|id| id.as_u64().is_some_and(|id| u32::try_from(id).is_ok()))
        })
    };
    if !prompt.starts_with(b"[") {
        return are_ids(tokens);
    }
    let texts = crate::protocol::json::elements(prompt, 0).map_or(0, |texts| texts.len());
    tokens.as_array().is_some_and(|all| all.len() == texts && all.iter().all(are_ids))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_shows_what_the_endpoint_gives() {
        let path = format!("{}/tests/fixtures/wire/sglang_generate.json", env!("CARGO_MANIFEST_DIR"));
        let body = std::fs::read_to_string(path).expect("fixture");
        let seen = |body: &str| Native::from_reply(200, body.as_bytes()).expect("a reply");
        let all = Native { is_there: true, prompt_ids: true, routing: true };
        assert_eq!(seen(&body), all);
        let dense = body.replace("\"routed_experts\"", "\"x\"");
        assert_eq!(seen(&dense), Native { routing: false, ..all });
        let old = dense.replace("\"prompt_token_ids\"", "\"y\"").replace("\"output_ids\"", "\"z\"");
        assert_eq!(seen(&old), Native { is_there: true, prompt_ids: false, routing: false });
        let missing = Native::MISSING;
        for status in [404, 405, 501] {
            assert_eq!(Native::from_reply(status, b""), Some(missing));
        }
        // A gateway that answers everything.
        assert_eq!(seen("{}"), missing);
        for (status, text) in [(503, body.as_str()), (400, "{}"), (200, "no JSON")] {
            assert_eq!(Native::from_reply(status, text.as_bytes()), None);
        }
    }

    #[test]
    fn a_tokenizer_that_is_not_there_is_asked_again_after_a_while() {
        let (silence, now) = (Silence::default(), Instant::now());
        assert!(silence.is_over(now));
        silence.begin(now);
        assert!(!silence.is_over(now) && silence.is_over(now + SILENCE));
    }

    #[test]
    fn the_second_probe_asks_for_no_routing_and_there_is_no_third() {
        let body =
            |attempt| serde_json::from_slice::<Value>(&probe_body(attempt).expect("a body")).expect("JSON");
        assert_eq!(body(0)["return_routed_experts"], true);
        assert_eq!(body(1).get("return_routed_experts"), None);
        assert_eq!(body(1)["sampling_params"]["max_new_tokens"], 1);
        assert_eq!(probe_body(2), None);
    }
}
