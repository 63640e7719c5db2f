//! The capture store from outside: what is acknowledged is read back, exactly once, by lego and by others.

#[path = "../common/calls.rs"]
mod calls;
#[path = "../common/python.rs"]
mod python;

mod cli;
mod crash;
mod foreign_readers;
mod rows;
mod store;
mod verify;
