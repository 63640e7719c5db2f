//! Errors of object storage in words. A server's answer may name keys of ours, and a URL may be signed: of both only
//! what is known to be harmless is told.

use std::error::Error;

use object_store::Error as StoreError;
use object_store::client::{HttpError, HttpErrorKind};

use crate::config::{ObjectScheme, ObjectUrl};

/// Stands in an error for a reply that was too short.
pub(super) const SHORT: &str = "short";

/// Whether it may go by itself soon.
pub(super) fn is_passing(error: &StoreError) -> bool {
    match error {
        StoreError::Generic { store: SHORT, .. } => true,
        StoreError::Generic { .. } => {
            let of_client = http_error(error).map(HttpError::kind);
            let is_asked_for_credentials = asks_for_credentials(&error.to_string());
            let status = status(&error.to_string()).and_then(|text| text.get(..3)?.parse::<u16>().ok());
            // What the client tries again by itself was tried often enough.
            let is_half_read = of_client
                .is_some_and(|kind| !matches!(kind, HttpErrorKind::Connect | HttpErrorKind::Unknown));
            !is_asked_for_credentials && status.is_none() && is_half_read
        }
        _ => false,
    }
}

/// Whether it is the bucket that is not there.
pub(super) fn is_bucket(text: &str) -> bool {
    ["NoSuchBucket", "ContainerNotFound", "bucket does not exist"].iter().any(|known| text.contains(known))
}

/// What happened, and what to do where that is known.
pub(super) fn of(error: &StoreError, url: &ObjectUrl) -> String {
    let text = error.to_string();
    let code = code(&text).map_or_else(String::new, |code| format!(" ({code})"));
    match error {
        _ if is_bucket(&text) => {
            let what = if url.scheme == ObjectScheme::Az { "container" } else { "bucket" };
            format!("there is no {what} {}: make it first, or correct the URL", url.bucket)
        }
        StoreError::NotFound { .. } => "it is not there".to_owned(),
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => {
            format!(
                "access is denied{code}: give these credentials the right to it, or use others ({})",
                variables(url)
            )
        }
        _ if asks_for_credentials(&text) => {
            format!("there are no credentials: set {}, or run where the machine has a role", variables(url))
        }
        _ => match (status(&text), http_error(error)) {
            (Some(status), _) => format!("the server answers {status}{code}"),
            (None, Some(error)) => hinted(&causes(error)),
            (None, None) => hinted(&innermost(error)),
        },
    }
}

/// Where credentials of this storage come from.
fn variables(url: &ObjectUrl) -> &'static str {
    match url.scheme {
        ObjectScheme::S3 => "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ObjectScheme::Gs => "GOOGLE_SERVICE_ACCOUNT",
        ObjectScheme::Az => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    }
}

/// It was the machine's role that was asked for, for want of anything else.
fn asks_for_credentials(text: &str) -> bool {
    ["169.254.169.254", "/latest/api/token", "/latest/meta-data", "metadata.google.internal"]
        .iter()
        .any(|known| text.contains(known))
}

/// The code of an answer, a word.
fn code(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    (code.len() < 60 && code.chars().all(|c| c.is_ascii_alphanumeric())).then_some(code)
}

/// `503 Service Unavailable`.
fn status(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("status code: ")?;
    let (status, _) = rest.split_once(':')?;
    (status.len() < 60).then_some(status)
}

fn http_error(error: &StoreError) -> Option<&HttpError> {
    let mut source: Option<&(dyn Error + 'static)> = error.source();
    while let Some(error) = source {
        if let Some(found) = error.downcast_ref::<HttpError>() {
            return Some(found);
        }
        source = error.source();
    }
    None
}

/// Errors of the client have no URLs.
fn causes(error: &HttpError) -> String {
    let mut text = Vec::new();
    let mut source = error.source();
    while let Some(error) = source {
        text.push(error.to_string());
        source = error.source();
    }
    text.dedup();
    text.join(": ")
}

/// The same with what to do, where what is wrong is a variable.
fn hinted(text: &str) -> String {
    let known = [
        (
            "scheme is not allowed",
            "the endpoint is not https: set AWS_ALLOW_HTTP=true if it is meant to be so",
        ),
        ("Missing AccessKeyId", "AWS_ACCESS_KEY_ID is not set, though AWS_SECRET_ACCESS_KEY is"),
        ("Missing SecretAccessKey", "AWS_SECRET_ACCESS_KEY is not set, though AWS_ACCESS_KEY_ID is"),
        ("Account must be specified", "AZURE_STORAGE_ACCOUNT_NAME is not set"),
    ];
    let hint = known.iter().find(|(part, _)| text.contains(part));
    hint.map_or_else(|| text.to_owned(), |(_, hint)| (*hint).to_owned())
}

fn innermost(error: &StoreError) -> String {
    let mut last: &dyn Error = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> StoreError {
        StoreError::Generic { store: "S3", source: text.to_owned().into() }
    }

    #[test]
    fn an_answer_is_told_by_its_code_alone() {
        let url: ObjectUrl = "s3://b/x".parse().expect("good");
        let body = "<Error><Code>SlowDown</Code><AWSAccessKeyId>canary</AWSAccessKeyId></Error>";
        let text = format!(
            "Error performing PUT http://h/b?X-Amz-Signature=canary - Server returned non-2xx status code: 503 Service Unavailable: {body}"
        );
        assert_eq!(of(&generic(&text), &url), "the server answers 503 Service Unavailable (SlowDown)");
        let source = || text.clone().into();
        let denied = StoreError::PermissionDenied { path: "x".to_owned(), source: source() };
        let missing =
            StoreError::NotFound { path: "x".to_owned(), source: "<Code>NoSuchBucket</Code>".into() };
        let absent = StoreError::NotFound { path: "x".to_owned(), source: "<Code>NoSuchKey</Code>".into() };
        for (error, part) in [
            (&denied, "access is denied (SlowDown)"),
            (&missing, "there is no bucket b"),
            (&absent, "it is not there"),
            (
                &generic("Error performing PUT http://169.254.169.254/latest/api/token in 5s"),
                "no credentials: set AWS",
            ),
        ] {
            let told = of(error, &url);
            assert!(told.contains(part) && !told.contains("canary"), "{told}");
            assert!(!is_passing(error));
        }
        assert!(is_passing(&StoreError::Generic { store: SHORT, source: "1 of 2 bytes came".into() }));
    }
}
