//! Calls to lineages to samples: which captured tokens are trained, in which context, and where all the
//! others went.
//!
//! A call extends another when the other's prompt and completion ids are a prefix of its prompt ids. The
//! longest such other is its parent, so the calls of a session form trees; a path from a root to a leaf is a
//! [`Lineage`]. Text plays no part: where a template or a harness rewrites history, the ids differ and a new
//! lineage begins.
//!
//! Invariants:
//! - Every sampled token is in exactly one [`Entry`] of the ledger, and trained in at most one sample, with
//!   exactly the context it was sampled in. [`Built::check`] proves it for what was built.
//! - Lineages depend on ids alone. Times and call ids only break ties and number the lineages, so the order
//!   in which calls arrive changes nothing.
//! - Time is linear in the tokens of all prompts and completions.
//!
//! Retries: of calls with the same prompt, those that were continued count; the others are superseded. If
//! none was continued (the session ended there), the one that ended well and came last counts. Among choices
//! of one call the same holds, with the first choice for the last.

mod account;
mod lineage;
mod prefix;
mod sample;

pub use account::Entry;
pub use lineage::{Lineage, LineageCall, Lineages, lineages};
pub use sample::{Built, Episode, Unbalanced, samples};
