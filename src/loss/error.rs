//! Why a loss cannot be computed.

/// A number the loss needs is missing, not finite, or does not fit the others.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossError {
    #[error("{what} of {of} {index} is {value}: a finite number is needed")]
    NotFinite { what: &'static str, of: &'static str, index: usize, value: f64 },
    #[error("{what} of token {index} is missing: the loss needs it for every sampled token")]
    Missing { what: &'static str, index: usize },
    #[error("{what} has {found} entries, but there are {expected}")]
    Length { what: &'static str, found: usize, expected: usize },
    #[error("option {name} is {value}: {remedy}")]
    Option { name: &'static str, value: f64, remedy: &'static str },
    #[error("the step has no sampled token")]
    NoTokens,
}

/// `value`, if it is finite.
pub(super) fn finite(
    value: f64,
    what: &'static str,
    of: &'static str,
    index: usize,
) -> Result<f64, LossError> {
    if value.is_finite() { Ok(value) } else { Err(LossError::NotFinite { what, of, index, value }) }
}

/// Checks that `what` has `expected` entries.
pub(super) fn same_length(what: &'static str, found: usize, expected: usize) -> Result<(), LossError> {
    if found == expected { Ok(()) } else { Err(LossError::Length { what, found, expected }) }
}
