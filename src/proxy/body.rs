//! Request bodies, up to the limit of the configuration.

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::BodyExt as _;

use crate::protocol::error::{ApiError, ErrorType};

/// Bytes beyond a multiple of the limit are not waited for.
const DRAINED_LIMITS: usize = 4;

/// Reads a request's body. One that is too long is read on and thrown away: clients that send all of it before they
/// read would otherwise see a broken connection in place of the answer.
pub(super) async fn read_body(mut body: Body, limit: usize) -> Result<Bytes, ApiError> {
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
