//! Places in object storage, by URL: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Whose storage it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectScheme {
    /// Amazon S3, and what speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
}

impl ObjectScheme {
    const ALL: [Self; 3] = [Self::S3, Self::Gs, Self::Az];

    /// As it stands in front of `://`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Gs => "gs",
            Self::Az => "az",
        }
    }
}

/// A bucket and the prefix of all names in it that are meant. It has no place for a secret.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectUrl {
    pub scheme: ObjectScheme,
    /// Azure calls it a container.
    pub bucket: String,
    /// Without slashes at its ends; may be empty.
    pub prefix: String,
}

/// What is wrong with a URL, and what to do. The URL itself is not in it: it may hold a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}. {remedy}")]
pub struct ObjectUrlError {
    pub problem: String,
    pub remedy: &'static str,
    /// The URL may be shown.
    pub is_plain: bool,
}

impl ObjectUrl {
    /// What a place is that may be a folder or a URL; `None`: a folder.
    ///
    /// # Errors
    /// It is a URL, and cannot be used.
    pub fn of(place: &Path) -> Result<Option<Self>, ObjectUrlError> {
        match place.to_str() {
            Some(text) if text.contains("://") => text.parse().map(Some),
            _ => Ok(None),
        }
    }

    /// The folder that goes with it on this machine, where nobody names one.
    #[must_use]
    pub fn default_folder(&self) -> PathBuf {
        let Self { scheme, bucket, prefix } = self;
        let name = format!("captures-{}-{bucket}/{prefix}", scheme.as_str());
        PathBuf::from(format!("./{}", name.trim_end_matches('/').replace('/', "-")))
    }
}

const FORM: &str = "Write it as s3://bucket/prefix, gs://bucket/prefix or az://container/prefix";

impl FromStr for ObjectUrl {
    type Err = ObjectUrlError;

    fn from_str(text: &str) -> Result<Self, ObjectUrlError> {
        let wrong = |problem: String| ObjectUrlError { problem, remedy: FORM, is_plain: true };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("it is no URL".to_owned()))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        // Before anything that would tell a part of it.
        if rest.contains(['@', '?', '#']) {
            return Err(ObjectUrlError {
                problem: "the URL has a user name, a password, a query or a fragment".to_owned(),
                remedy: "Take it out: credentials come from the environment (docs/object-storage.md)",
                is_plain: false,
            });
        }
        if scheme == "file" {
            let remedy = "Give the path of the folder, without file://";
            return Err(ObjectUrlError { remedy, ..wrong("a folder has no URL here".to_owned()) });
        }
        let known = ObjectScheme::ALL.into_iter().find(|known| known.as_str() == scheme);
        let scheme = known.ok_or_else(|| wrong(format!("{scheme:?} is no storage that lego knows")))?;
        if bucket.is_empty() {
            return Err(wrong("it names no bucket".to_owned()));
        }
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if !bucket.chars().all(is_of_name) {
            let remedy = "Buckets have letters, digits, points, hyphens and underscores; ports belong into \
                          AWS_ENDPOINT_URL";
            return Err(ObjectUrlError { remedy, ..wrong(format!("{bucket:?} is no name of a bucket")) });
        }
        let prefix = prefix.trim_end_matches('/');
        let is_part = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '%', '*']);
        if !prefix.is_empty()
            && (!prefix.split('/').all(is_part) || !prefix.chars().all(|c| matches!(c, ' '..='~')))
        {
            let remedy = "Use plain names with single slashes between them";
            return Err(ObjectUrlError { remedy, ..wrong(format!("{prefix:?} is no prefix of names")) });
        }
        Ok(Self { scheme, bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scheme, bucket, prefix } = self;
        let slash = if prefix.is_empty() { "" } else { "/" };
        write!(f, "{}://{bucket}{slash}{prefix}", scheme.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_read_back_and_name_a_folder() {
        for (text, shown, folder) in [
            ("s3://b", "s3://b", "./captures-s3-b"),
            ("s3://my-bucket/runs/a/", "s3://my-bucket/runs/a", "./captures-s3-my-bucket-runs-a"),
            ("gs://b.c/x", "gs://b.c/x", "./captures-gs-b.c-x"),
            ("az://box/x", "az://box/x", "./captures-az-box-x"),
        ] {
            let url = ObjectUrl::of(Path::new(text)).expect("good").expect("a URL");
            assert_eq!((url.to_string().as_str(), url.default_folder().to_str()), (shown, Some(folder)));
        }
        for folder in ["./captures", "s3:/b", "a/s3", "/"] {
            assert_eq!(ObjectUrl::of(Path::new(folder)), Ok(None));
        }
    }

    #[test]
    fn what_cannot_be_used_is_said_without_its_secrets() {
        for (text, part) in [
            ("ftp://b/x", "\"ftp\" is no storage"),
            ("S3://b/x", "\"S3\" is no storage"),
            ("file:///tmp", "without file://"),
            ("s3://", "no bucket"),
            ("s3:///x", "no bucket"),
            ("s3://h:9000/b", "no name of a bucket"),
            ("s3://b//x", "no prefix"),
            ("s3://b/../x", "no prefix"),
            ("s3://b/a\nb", "no prefix"),
            ("s3://AKIA:canary@b/x", "Take it out"),
            ("https://u:canary@h/b", "Take it out"),
            ("s3://b/x?key=canary", "Take it out"),
            ("s3://b/canary@x", "Take it out"),
        ] {
            let error = text.parse::<ObjectUrl>().expect_err(text);
            assert!(error.to_string().contains(part), "{text}: {error}");
            assert!(!error.to_string().contains("canary"), "{error}");
            assert_eq!(error.is_plain, !text.contains("canary"));
        }
    }
}
