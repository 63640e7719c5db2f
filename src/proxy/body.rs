//! Request bodies, up to the limit of the configuration.

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body as _;
use http_body_util::BodyExt as _;

use crate::protocol::error::{ApiError, ErrorType};

/// Bytes beyond a multiple of the limit are not waited for.
const DRAINED_LIMITS: usize = 4;

/// Reads a request's body, which has to be plain UTF-8. One that is too long is read on and thrown away: clients that send all of it before they
/// read would otherwise see a broken connection in place of the answer.
pub(super) async fn read_body(headers: &HeaderMap, mut body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let told = body.size_hint().exact();
    let mut text = BytesMut::new();
    let mut length = 0_usize;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let message = format!("the request body broke off: {error}");
            ApiError::new(400, ErrorType::InvalidRequest, "bad_request", message)
        })?;
        let Ok(data) = frame.into_data() else { continue };
        length = length.saturating_add(data.len());
        if length <= limit {
            text.extend_from_slice(&data);
        } else {
            text = BytesMut::new();
            if length > limit.saturating_mul(DRAINED_LIMITS) {
                break;
            }
        }
    }
    if length <= limit {
        is_plain(headers, &text)?;
        return Ok(text.freeze());
    }
    let bytes = told.unwrap_or(length as u64);
    tracing::warn!(bytes, limit, "a request is refused: its body is longer than proxy.max_body_bytes");
    let message = format!(
        "the request body has {bytes} bytes, more than the {limit} that this proxy takes; raise \
         proxy.max_body_bytes if it should pass"
    );
    Err(ApiError::new(413, ErrorType::InvalidRequest, "request_too_large", message))
}

/// Says of a body that no JSON can be read from what it is instead.
fn is_plain(headers: &HeaderMap, body: &[u8]) -> Result<(), ApiError> {
    let codings = headers.get_all(header::CONTENT_ENCODING).into_iter();
    let codings =
        codings.flat_map(|value| value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii));
    let compressed = codings.into_iter().find(|coding| !coding.eq_ignore_ascii_case(b"identity"));
    if let Some(coding) = compressed.filter(|coding| !coding.is_empty()) {
        let message = format!(
            "the request body is compressed (Content-Encoding: {}), and this proxy reads plain ones only: switch the \
             client's request compression off",
            coding.escape_ascii()
        );
        return Err(ApiError::new(415, ErrorType::InvalidRequest, "compressed_request", message));
    }
    let mark = match body {
        [0xef, 0xbb, 0xbf, ..] => "UTF-8",
        [0xff, 0xfe, ..] => "UTF-16, little-endian",
        [0xfe, 0xff, ..] => "UTF-16, big-endian",
        _ => return Ok(()),
    };
    let message = format!(
        "the request body begins with a byte order mark ({mark}), which JSON must not have: send it as UTF-8 without one"
    );
    Err(ApiError::new(400, ErrorType::InvalidRequest, "byte_order_mark", message))
}
