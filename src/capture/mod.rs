//! The store of calls: a journal that makes them durable, Parquet files that make them useful, and a reader
//! over both. `docs/captures.md` describes the files column by column.
//!
//! ```text
//! append ─▶ encode (caller) ─▶ queue ─▶ writer thread ─▶ segment (write, one fdatasync) ─▶ acknowledged
//!                                                            │ full, old or closed
//!                                                            ▼
//!                                        compacting thread ─▶ date=YYYY-MM-DD/calls-*.parquet
//!                                                            │ with a URL ([`Place`], [`Uploader`])
//!                                                            ▼
//!                                        uploading thread ─▶ s3://bucket/prefix/date=YYYY-MM-DD/calls-*.parquet
//! ```
//!
//! Invariants:
//! - What `append` acknowledged is read back exactly once, after kill -9, and with full durability after
//!   power loss. An append is there whole or not at all.
//! - So is what `draft` acknowledged of a call that never got its record ([`drafts`]).
//! - A file called `*.parquet` is whole: it is written aside, synced and renamed. Its segment is deleted after; one with
//!   damage is set aside.
//! - Nothing unacknowledged stays behind acknowledged calls: a failed commit is taken back.
//! - What a call has in common with an earlier one is stored once ([`history`]); readers give whole calls.
//! - One writer a folder. Readers may run beside it, and mark the days that they read ([`mark`]): no file goes away
//!   under them. Merged files replace others all at once ([`merge`]).

mod ahead;
mod bits;
mod columns;
mod compact;
mod compactor;
mod decode;
mod drafts;
mod encode;
mod error;
mod filter;
mod follow;
mod footer;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod history;
mod in_order;
mod journal;
mod layout;
mod listing;
mod lock;
mod mark;
mod merge;
mod merger;
mod parquet_calls;
mod payload;
mod place;
mod prune;
mod reader;
mod recovery;
mod remote;
mod room;
mod segment;
mod spill;
#[cfg(feature = "sql")]
pub mod sql;
mod storage;
mod summed;
mod uploader;
mod verify;
mod writer;

pub use compact::column_names;
pub use error::CaptureError;
pub use filter::{Filter, FilterError};
pub use follow::Follow;
pub use in_order::{Order, in_order};
pub use layout::date_of;
pub use merge::{CompactedDay, compact_days};
pub use place::Place;
pub use prune::{Pruned, prune};
pub use reader::{Query, Reader};
pub use recovery::{Recovery, TornTail};
pub use room::Limits;
pub use spill::{SLOT_BYTES, Slot, Spill};
pub use uploader::Uploader;
pub use verify::{Finding, Verified, Watch, verify};
pub use writer::{Closed, Durability, Writer, WriterOptions};
