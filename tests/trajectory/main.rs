//! From calls to lineages to samples: every sampled token once, in the context it was sampled in, whatever the harness
//! did; and why a history was rewritten.

#[path = "../common/calls.rs"]
mod calls;
#[path = "../common/histories.rs"]
mod histories;
#[path = "../common/render.rs"]
mod render;

mod breaks;
mod builder;
mod chat;
mod replayed;
mod routing;
mod samples;
mod trees;
