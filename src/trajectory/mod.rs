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
//! none was continued (the session ended there), the one that can be trained and came last counts. Among choices
//! of one call the same holds, with the first choice for the last. One that broke off never counts where another
//! did not.
//!
//! ```text
//! calls ─▶ trie ─▶ lineages ─▶ samples and ledger (what is chosen: config, kinds)
//!                     └─▶ threads (what calls were asked and answered) ─▶ kinds, breaks ─▶ table
//! ```

mod account;
mod breaks;
mod check;
mod conversation;
mod id_texts;
mod kinds;
mod lineage;
mod routing;
mod sample;
mod table;
mod threads;
mod trie;

pub use account::Entry;
pub use breaks::{Break, BreakReason, Decode};
pub use check::Unbalanced;
pub use conversation::{Heard, chat_request};
pub use id_texts::IdTexts;
pub use kinds::{Kinds, LineageKind};
pub use lineage::{Lineage, LineageCall, Lineages, SetAside, lineages};
pub use routing::{Found, Gather};
pub use sample::{Built, Episode, needs_bodies, samples};
pub use table::{LineageRow, Parent, ParentBy, only, table};
