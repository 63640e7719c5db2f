//! The capture store from outside: what is acknowledged is read back, exactly once, by lego and by others.

#[path = "../common/calls.rs"]
mod calls;
#[path = "../common/python.rs"]
mod python;
#[path = "../common/trial.rs"]
mod trial;

mod bounded;
mod cases;
mod cli;
mod compact;
mod crash;
mod filter;
mod foreign_readers;
mod history;
mod ledger;
mod lineages;
mod merging;
mod objects;
mod prune;
mod rows;
mod store;
mod tail;
mod verify;
