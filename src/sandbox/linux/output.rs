//! Reading a program's output up to a cap; what is over it is read and counted, so the program never blocks.

use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;

use tokio::net::unix::pipe;

const CHUNK_BYTES: usize = 64 * 1024;
/// Reads after the program's end: more than a pipe can hold, so that what it wrote is all there, and an
/// end, since a process that it left behind may go on writing.
const LAST_READS: usize = 32;

/// One output stream.
#[derive(Debug)]
pub struct Output {
    pipe: Option<pipe::Receiver>,
    kept: Vec<u8>,
    limit: usize,
    discarded: u64,
}

impl Output {
    /// Reads the pipe whose read end this is.
    ///
    /// # Errors
    /// The descriptor is no pipe.
    pub fn new(pipe: OwnedFd, limit: usize) -> io::Result<Self> {
        let pipe = Some(pipe::Receiver::from_owned_fd(pipe)?);
        Ok(Self { pipe, kept: Vec::new(), limit, discarded: 0 })
    }

    /// Reads once. Never resolves after the end of the stream. Loses nothing when cancelled.
    pub async fn progress(&mut self) -> io::Result<()> {
        let Some(pipe) = &self.pipe else {
            return pending().await;
        };
        pipe.readable().await?;
        self.read_some()?;
        Ok(())
    }

    /// Takes what is there without waiting: (kept, discarded).
    pub fn finish(mut self) -> io::Result<(Vec<u8>, u64)> {
        for _ in 0..LAST_READS {
            if !self.read_some()? {
                break;
            }
        }
        Ok((self.kept, self.discarded))
    }

    /// False: nothing there now, or the end.
    fn read_some(&mut self) -> io::Result<bool> {
        let Some(pipe) = &self.pipe else {
            return Ok(false);
        };
        let mut chunk = [0; CHUNK_BYTES];
        match pipe.try_read(&mut chunk) {
            Ok(0) => {
                self.pipe = None;
                Ok(false)
            }
            Ok(count) => {
                let room = self.limit - self.kept.len();
                let (keep, rest) = chunk[..count].split_at(room.min(count));
                self.kept.extend_from_slice(keep);
                self.discarded += rest.len() as u64;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }
}
