//! The capture proxy as its clients, its upstreams and its store see it. Case ids (A01, …) name known failures of
//! systems of this kind.

#[path = "../common/mock.rs"]
mod mock;
#[path = "../common/setup.rs"]
mod setup;
#[path = "../common/speech.rs"]
mod speech;

mod admin;
mod alive;
mod asked;
mod bytes;
mod callers;
mod cuts;
mod durable;
mod engines;
mod faults;
mod forms;
mod local_ids;
mod native;
mod protocols;
mod raw;
mod records;
mod refused;
mod rejoin;
mod responses;
mod retries;
mod routes;
mod sdk;
mod sessions;
mod shutdown;
mod spill;
mod stalls;
mod token_in;
mod total;
mod volatile;
