//! Which headers go through, in each direction.

use std::borrow::Cow;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// Headers of one connection, never forwarded (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers of a request that lego answers or replaces itself: cookies, framing, compression (a compressed reply could
/// not be read).
const REQUEST_ONLY: [&str; 9] = [
    "host",
    "content-length",
    "content-encoding",
    "cookie",
    "accept-encoding",
    "expect",
    "origin",
    "x-session-id",
    "keep-alive",
];

/// Names of a client's secrets, or their ends, with `-` for `_`: `x-api-key`, `x-litellm-api-key`, `X-Auth-Token`,
/// `Ocp-Apim-Subscription-Key`, ….
const SECRETS: [&str; 15] = [
    "authorization",
    "api-key",
    "apikey",
    "api-token",
    "auth-token",
    "auth-key",
    "access-token",
    "access-key",
    "access-jwt",
    "authorization-token",
    "security-token",
    "subscription-key",
    "functions-key",
    "secret",
    "password",
];

/// Query parameters, likewise, that hold one.
const SECRET_PARAMETERS: [&str; 5] = ["key", "token", "code", "sig", "signature"];

/// How the keys of lego's own sessions begin.
const SESSION_KEY: &[u8] = b"sk-lego-";

/// True if the text holds a key of one of lego's sessions.
#[must_use]
pub fn has_session_key(text: &[u8]) -> bool {
    text.windows(SESSION_KEY.len()).any(|part| part.eq_ignore_ascii_case(SESSION_KEY))
}

fn is_secret(name: &str) -> bool {
    let is_plain = !name.bytes().any(|byte| byte == b'_' || byte.is_ascii_uppercase());
    let name = match is_plain {
        true => Cow::Borrowed(name),
        false => Cow::Owned(name.to_ascii_lowercase().replace('_', "-")),
    };
    SECRETS.iter().any(|secret| {
        name.strip_suffix(secret).is_some_and(|before| before.is_empty() || before.ends_with(['-', '.']))
    })
}

/// The client's end-to-end headers, without its keys and those of lego's sessions.
#[must_use]
pub fn forward_request_headers(client: &HeaderMap) -> HeaderMap {
    let mut headers = end_to_end(client);
    for name in REQUEST_ONLY {
        headers.remove(name);
    }
    let is_kept = |(name, value): &(&HeaderName, &HeaderValue)| {
        !is_secret(name.as_str()) && !has_session_key(value.as_bytes())
    };
    let dropped: Vec<_> =
        headers.iter().filter(|header| !is_kept(header)).map(|(name, _)| name.clone()).collect();
    for name in dropped {
        headers.remove(name);
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    headers
}

/// A query without the keys that clients put into it.
pub(super) fn without_key_parameters(query: &str) -> String {
    let kept = query.split('&').filter(|pair| {
        let name = pair.split('=').next().unwrap_or_default();
        // A name may be written otherwise than it reads.
        let name = name.replace("%2D", "-").replace("%2d", "-").replace("%5F", "_").replace("%5f", "_");
        !name.is_empty()
            && !name.contains('%')
            && !SECRET_PARAMETERS.iter().any(|secret| name.eq_ignore_ascii_case(secret))
            && !is_secret(&name)
            && !has_session_key(pair.as_bytes())
    });
    kept.collect::<Vec<_>>().join("&")
}

/// The upstream's end-to-end headers, without those that lego sets or that would give away an account.
#[must_use]
pub fn forward_reply_headers(upstream: &HeaderMap) -> HeaderMap {
    let mut headers = end_to_end(upstream);
    for name in ["content-length", "date", "server", "set-cookie", "keep-alive", "alt-svc", "location"] {
        headers.remove(name);
    }
    headers
}

fn end_to_end(from: &HeaderMap) -> HeaderMap {
    let mut headers = from.clone();
    for value in from.get_all(header::CONNECTION) {
        for name in value.to_str().unwrap_or_default().split(',') {
            if let Ok(name) = HeaderName::from_bytes(name.trim().to_ascii_lowercase().as_bytes()) {
                headers.remove(name);
            }
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g11_hop_by_hop_headers_and_keys_stay_and_end_to_end_headers_pass() {
        let mut client = HeaderMap::new();
        for (name, value) in [
            ("connection", "x-foo, keep-alive"),
            ("x-foo", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("proxy-authorization", "canary"),
            ("authorization", "Bearer canary"),
            ("x-api-key", "canary"),
            ("x-goog-api-key", "canary"),
            ("x-auth-token", "canary"),
            ("x-litellm-api-key", "canary"),
            ("ocp-apim-subscription-key", "canary"),
            ("x_access_token", "canary"),
            ("cf-access-client-secret", "canary"),
            ("session_id", "sk-lego-s1.canary"),
            ("x-claude-code-session-id", "of sk-lego-s1.canary"),
            ("content-encoding", "identity"),
            ("idempotency-key", "i1"),
            ("x-monkey", "m"),
            ("session-id", "s1"),
            ("cookie", "canary"),
            ("accept-encoding", "gzip, br"),
            ("expect", "100-continue"),
            ("host", "localhost"),
            ("user-agent", "harness/1"),
            ("x-request-id", "r1"),
        ] {
            client.append(name, HeaderValue::from_static(value));
        }
        client.append("x-multi", HeaderValue::from_static("a"));
        client.append("x-multi", HeaderValue::from_static("b"));
        let sent = forward_request_headers(&client);
        assert!(!format!("{sent:?}").contains("canary"));
        let mut names: Vec<&str> = sent.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        let expected = [
            "accept-encoding",
            "content-type",
            "idempotency-key",
            "session-id",
            "user-agent",
            "x-monkey",
            "x-multi",
            "x-request-id",
        ];
        assert_eq!(names, expected);
        assert_eq!(sent.get_all("x-multi").iter().count(), 2);
    }

    #[test]
    fn g04_no_key_is_in_a_query() {
        for (query, expected) in [
            ("api-version=1&key=canary", "api-version=1"),
            ("api-key=canary&beta=true", "beta=true"),
            ("Api_Key=canary", ""),
            ("api%2Dkey=canary&a", "a"),
            ("%6Bey=canary", ""),
            ("token=canary&max_tokens=9", "max_tokens=9"),
            ("access_token=canary&subscription-key=canary", ""),
            ("user=sk-lego-s1.canary&monkey=1", "monkey=1"),
        ] {
            assert_eq!(without_key_parameters(query), expected, "{query}");
        }
    }

    #[test]
    fn a_reply_points_its_client_nowhere_else() {
        let upstream = HeaderMap::from_iter([
            (header::LOCATION, HeaderValue::from_static("https://elsewhere.example")),
            (header::RETRY_AFTER, HeaderValue::from_static("1")),
        ]);
        assert_eq!(forward_reply_headers(&upstream).keys().collect::<Vec<_>>(), [header::RETRY_AFTER]);
    }
}
