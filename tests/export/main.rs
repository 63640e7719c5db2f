//! `lego capture export`: captures in other trainers' forms, loaded by what these load them with.

#[path = "../common/calls.rs"]
mod calls;
#[path = "../common/python.rs"]
mod python;
mod setup;

mod consumers;
mod conversations;
mod groups;
mod losses;
mod output;
mod snippet;
