//! The texts of ids, where it is known whose they are.

use std::path::Path;

use crate::config::{Config, Environment};
use crate::record::{Call, UpstreamKind};
use crate::text::{TextError, Tokenizer};

/// The texts of ids.
pub(super) struct Texts {
    pub(super) tokenizer: Tokenizer,
    /// It is that of the run's policy, which the embedded engine served.
    is_of_run: bool,
}

impl Texts {
    /// Those of the tokenizer that was named, else of the policy whose run these captures are of.
    pub(super) fn find(named: Option<&Path>, captures: &Path) -> Result<Option<Self>, TextError> {
        match named {
            Some(folder) => Ok(Some(Self { tokenizer: Tokenizer::load(folder)?, is_of_run: false })),
            None => Ok(Self::of_run(captures)),
        }
    }

    fn of_run(captures: &Path) -> Option<Self> {
        let path = captures.parent()?.join("config.resolved.toml");
        let config = Config::load_resolved(&path, Environment::from_process()).ok()?;
        let tokenizer = Tokenizer::load(config.model_path()).ok()?;
        Some(Self { tokenizer, is_of_run: true })
    }

    /// Ids of another tokenizer would get the wrong texts.
    pub(super) fn fits(&self, call: &Call) -> bool {
        let is_same = call.tokenizer_sha256.as_ref().is_none_or(|sha256| sha256 == self.tokenizer.sha256());
        is_same && (!self.is_of_run || call.upstream_kind == UpstreamKind::Embedded)
    }

    pub(super) fn of(&self, id: u32) -> String {
        let bytes = self.tokenizer.token_bytes(id);
        match std::str::from_utf8(bytes) {
            Ok("") => "(not in this tokenizer)".to_owned(),
            Ok(text) => format!("{text:?}"),
            // A part of a character.
            Err(_) => format!("b\"{}\"", bytes.escape_ascii()),
        }
    }
}
