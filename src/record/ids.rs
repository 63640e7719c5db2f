//! Newtypes for the ids that cross rooms, so that one cannot be passed for another.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An id that is empty, too long, or holds a character outside `[A-Za-z0-9._-]`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} id {value:?} is not usable: 1 to 128 characters out of A-Z a-z 0-9 . _ - are allowed")]
pub struct InvalidId {
    kind: &'static str,
    value: String,
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Self::try_from(text.to_owned())
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;

            fn try_from(value: String) -> Result<Self, InvalidId> {
                let is_usable = (1..=128).contains(&value.len())
                    && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
                    && value.bytes().any(|b| b != b'.');
                if is_usable { Ok(Self(value)) } else { Err(InvalidId { kind: $kind, value }) }
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id!(
    /// All calls of one trial, or of one live conversation. Used in URL paths and file names.
    SessionId, "session"
);
text_id!(
    /// One sandboxed attempt at a task.
    TrialId, "trial"
);
text_id!(
    /// One task of a dataset (`instance_id`).
    TaskId, "task"
);

/// The trials of one task that share a GRPO baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GroupId(pub u64);

/// One trial as the trainer sees it: however many samples it fans out into, one member of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EpisodeId(pub u64);

/// Number of weight publications to the upstream. The starting policy is version 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PolicyVersion(pub u64);

impl fmt::Display for PolicyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identifies one model request and its reply. A UUIDv7: sorts by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CallId(pub uuid::Uuid);

impl CallId {
    /// A new id, later than those made before.
    #[must_use]
    pub fn now() -> Self {
        Self(uuid::Uuid::now_v7())
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl FromStr for CallId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, uuid::Error> {
        text.parse().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_would_leave_a_folder_are_refused() {
        for bad in ["", ".", "..", "a/b", "a b", "é", "a\0"] {
            assert!(bad.parse::<SessionId>().is_err(), "{bad:?}");
        }
        assert_eq!("trial-7.a_b".parse::<TrialId>().expect("usable").as_str(), "trial-7.a_b");
    }
}
