//! The upstream's API key, as the header that its kind of server reads.

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::transport::UpstreamError;
use crate::record::UpstreamKind;

/// The version of Anthropic's API that is meant when the client names none.
const ANTHROPIC_VERSION: HeaderValue = HeaderValue::from_static("2023-06-01");

/// A key. Its value is marked sensitive: it is in no debug output.
#[derive(Debug)]
pub(super) struct ApiKey {
    name: HeaderName,
    value: HeaderValue,
    /// Bytes of the value before the secret itself.
    scheme_len: usize,
}

impl ApiKey {
    /// `Authorization: Bearer …`, for Anthropic's servers `x-api-key`.
    pub(super) fn new(kind: UpstreamKind, key: &str) -> Result<Self, UpstreamError> {
        let (name, scheme) = match kind {
            UpstreamKind::Anthropic => (HeaderName::from_static("x-api-key"), ""),
            _ => (header::AUTHORIZATION, "Bearer "),
        };
        let mut value =
            HeaderValue::from_str(&format!("{scheme}{}", key.trim())).map_err(|_| UpstreamError::Key)?;
        value.set_sensitive(true);
        Ok(Self { name, value, scheme_len: scheme.len() })
    }

    pub(super) fn insert_into(&self, headers: &mut HeaderMap) {
        headers.insert(self.name.clone(), self.value.clone());
    }

    /// `text` with the secret blacked out.
    pub(super) fn redact(&self, text: Bytes) -> Bytes {
        let secret = &self.value.as_bytes()[self.scheme_len..];
        let Some(mut at) = find(&text, secret) else {
            return text;
        };
        let mut clean = Vec::with_capacity(text.len());
        let mut rest = &text[..];
        loop {
            clean.extend_from_slice(&rest[..at]);
            clean.extend_from_slice(b"[redacted]");
            rest = &rest[at + secret.len()..];
            match find(rest, secret) {
                Some(next) => at = next,
                None => break,
            }
        }
        clean.extend_from_slice(rest);
        Bytes::from(clean)
    }
}

/// What a kind of server needs besides: Anthropic's API has its version in a header, the client's if it sent one.
pub(super) fn complete(kind: UpstreamKind, headers: &mut HeaderMap) {
    if kind == UpstreamKind::Anthropic {
        headers.entry("anthropic-version").or_insert(ANTHROPIC_VERSION);
    }
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    if part.is_empty() {
        return None;
    }
    text.windows(part.len()).position(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_server_gets_its_key_where_it_looks_for_it() {
        for (kind, name, value) in [
            (UpstreamKind::Vllm, "authorization", "Bearer sk-canary"),
            (UpstreamKind::Openai, "authorization", "Bearer sk-canary"),
            (UpstreamKind::Anthropic, "x-api-key", "sk-canary"),
        ] {
            let key = ApiKey::new(kind, " sk-canary\n").expect("usable");
            let mut headers = HeaderMap::new();
            key.insert_into(&mut headers);
            assert_eq!(headers[name], value);
            assert_eq!(headers.len(), 1);
            assert!(!format!("{key:?}{headers:?}").contains("canary"));
            let text = Bytes::from_static(b"bad key sk-canary (sk-canary)");
            assert_eq!(key.redact(text), "bad key [redacted] ([redacted])");
        }
        assert!(matches!(ApiKey::new(UpstreamKind::Vllm, "a\nb"), Err(UpstreamError::Key)));
        let empty = ApiKey::new(UpstreamKind::Anthropic, "").expect("usable");
        assert_eq!(empty.redact(Bytes::from_static(b"text")), "text");
    }

    #[test]
    fn anthropics_version_is_the_clients_own_if_it_sent_one() {
        let mut headers = HeaderMap::new();
        complete(UpstreamKind::Openai, &mut headers);
        assert!(headers.is_empty());
        complete(UpstreamKind::Anthropic, &mut headers);
        assert_eq!(headers["anthropic-version"], "2023-06-01");
        headers.insert("anthropic-version", HeaderValue::from_static("2099-01-01"));
        complete(UpstreamKind::Anthropic, &mut headers);
        assert_eq!(headers["anthropic-version"], "2099-01-01");
    }
}
