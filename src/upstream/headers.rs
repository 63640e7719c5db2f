//! Which headers go through, in each direction.

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

/// Headers of a request that lego answers or replaces itself: keys, cookies, framing, compression (a compressed
/// reply could not be read).
const REQUEST_ONLY: [&str; 12] = [
    "host",
    "content-length",
    "authorization",
    "x-api-key",
    "api-key",
    "x-goog-api-key",
    "cookie",
    "accept-encoding",
    "expect",
    "origin",
    "x-session-id",
    "keep-alive",
];

/// The client's end-to-end headers, without its keys.
#[must_use]
pub fn forward_request_headers(client: &HeaderMap) -> HeaderMap {
    let mut headers = end_to_end(client);
    for name in REQUEST_ONLY {
        headers.remove(name);
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    headers
}

/// The upstream's end-to-end headers, without those that lego sets or that would give away an account.
#[must_use]
pub fn forward_reply_headers(upstream: &HeaderMap) -> HeaderMap {
    let mut headers = end_to_end(upstream);
    for name in ["content-length", "date", "server", "set-cookie", "keep-alive", "alt-svc"] {
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
        let expected = ["accept-encoding", "content-type", "user-agent", "x-multi", "x-request-id"];
        assert_eq!(names, expected);
        assert_eq!(sent.get_all("x-multi").iter().count(), 2);
    }
}
