//! Refusals: what a chat upstream cannot be asked is said, with the place in the request.

use crate::protocol::error::{ApiError, ErrorType};

/// A request that is not what the protocol says.
pub(super) fn invalid(path: &str, problem: &str) -> ApiError {
    ApiError::new(400, ErrorType::InvalidRequest, "invalid_request", format!("{path} {problem}"))
}

/// A request that has no chat form.
pub(super) fn unsupported(path: &str, problem: &str) -> ApiError {
    ApiError::new(400, ErrorType::InvalidRequest, "unsupported", format!("{path} {problem}"))
}
