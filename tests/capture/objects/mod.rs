//! Captures in object storage: moto in the place of S3, behind a server that fails as it is told.

mod cli;
mod google;
mod read;
mod server;
mod upload;
mod writer;
