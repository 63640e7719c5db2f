//! Texts of ids, and of which calls' ids.

use std::sync::Arc;

use super::conversation::Heard;
use super::lineage::Lineage;
use super::table::{LineageRow, table};
use crate::record::{Call, UpstreamKind};
use crate::text::Tokenizer;

/// The texts of one tokenizer's ids: with them more can be told of why a history was rewritten.
#[derive(Debug, Clone)]
pub struct IdTexts {
    pub tokenizer: Arc<Tokenizer>,
    /// It is that of the policy that the embedded engine serves: other upstreams' models may have another.
    is_embedded: bool,
}

impl IdTexts {
    /// Of the tokenizer of whatever model answered.
    #[must_use]
    pub const fn of_all(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, is_embedded: false }
    }

    /// Of a run's policy in the embedded engine.
    #[must_use]
    pub const fn of_embedded(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, is_embedded: true }
    }

    /// Ids of another tokenizer would get the wrong texts.
    #[must_use]
    pub fn fits(&self, call: &Call) -> bool {
        let is_same = call.tokenizer_sha256.as_ref().is_none_or(|sha256| sha256 == self.tokenizer.sha256());
        is_same && (!self.is_embedded || call.upstream_kind == UpstreamKind::Embedded)
    }

    /// [`table`] of a session, with texts if they are those of all of its calls.
    #[must_use]
    pub fn table(texts: Option<&Self>, session: &[Lineage], heard: Heard) -> Vec<LineageRow> {
        let fits = |texts: &&Self| session.iter().flat_map(|of| &of.calls).all(|one| texts.fits(&one.call));
        match texts.filter(fits) {
            Some(texts) => table(session, heard, Some(&|ids| texts.tokenizer.decode(ids, false))),
            None => table(session, heard, None),
        }
    }
}
