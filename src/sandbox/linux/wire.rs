//! What travels over the control sockets: one JSON document a packet (`SOCK_SEQPACKET`), descriptors by `SCM_RIGHTS`.

use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::failure::Failure;

/// The largest packet; larger ones are refused by [`send`]. Linux lets every user send this much.
pub const MAX_PACKET_BYTES: usize = 160 * 1024;

/// More descriptors than any message carries.
const MAX_DESCRIPTORS: usize = 64;

/// To the nursery, once, before any request for a sandbox (a packet that carries one descriptor).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Nursery {
    /// Control groups to remove when lego is gone: all of `parents` whose name starts with `prefix`.
    pub prefix: String,
    pub parents: Vec<PathBuf>,
}

/// How ids inside map to ids outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ids {
    /// No user namespace (root only).
    Host,
    /// 0 inside is the starting user outside; no other id exists.
    Single { uid: u32, gid: u32 },
    /// 0..65536 inside are `base`.. outside (root only).
    Ranges { base: u32 },
}

/// What keeps the programs in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// Own namespaces and an own root.
    Namespaces { ids: Ids },
    /// Landlock and seccomp on the host's own file system and network.
    Weak,
}

/// A host path and where it is to be seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    pub host: PathBuf,
    pub inside: PathBuf,
    pub is_writable: bool,
    pub is_directory: bool,
}

/// A process limit for every exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimit {
    pub resource: u32,
    pub soft: u64,
    pub hard: u64,
}

/// The first message to a helper. With it come the `cgroup.procs` files that every exec joins.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    pub isolation: Isolation,
    /// The read-only system: binds, links (target, link) and small files of lego's own making.
    pub system: Vec<Shown>,
    pub links: Vec<(PathBuf, PathBuf)>,
    pub files: Vec<(PathBuf, String)>,
    pub mounts: Vec<Shown>,
    pub tmp_bytes: Option<u64>,
    pub listen_port: Option<u16>,
    pub rlimits: Vec<Rlimit>,
}

/// A program to start. With it come stdin, stdout, stderr and the status pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    pub id: u64,
    #[serde(with = "byte_strings")]
    pub argv: Vec<OsString>,
    /// `NAME=value`.
    #[serde(with = "byte_strings")]
    pub env: Vec<OsString>,
    pub cwd: PathBuf,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToInit {
    Exec(Program),
    KillAll { id: u64 },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromInit {
    Failed(Failure),
    /// Descriptors: the sandbox's /proc and root (`O_PATH`), none when weak; then the listener, if asked for.
    Ready,
    Exit {
        id: u64,
        code: Option<i32>,
        signal: Option<i32>,
        cpu_us: u64,
        max_rss_bytes: u64,
    },
    AllDead {
        id: u64,
    },
    /// The helper's last word: pid 1 has ended.
    Gone {
        code: Option<i32>,
        signal: Option<i32>,
    },
}

/// Which part of starting a program failed: the first byte in the status pipe, before the error's text.
/// An empty pipe means that the program runs.
pub mod status {
    /// A defence or limit could not be applied.
    pub const SETUP: u8 = b'S';
    /// The program itself cannot be executed.
    pub const EXEC: u8 = b'E';
}

/// Sends one message with descriptors.
///
/// # Errors
/// A message over [`MAX_PACKET_BYTES`], or the other side is gone.
pub fn send<T: Serialize>(socket: BorrowedFd, message: &T, fds: &[BorrowedFd]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_PACKET_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a message of {} bytes is over the limit of {MAX_PACKET_BYTES}", bytes.len()),
        ));
    }
    let raw: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage] = if raw.is_empty() { &[] } else { &rights };
    let data = [IoSlice::new(&bytes)];
    // A signal (the end of a child of lego's, say) may arrive in the thread that waits.
    loop {
        match sendmsg::<()>(socket.as_raw_fd(), &data, control, MsgFlags::MSG_NOSIGNAL, None) {
            Err(Errno::EINTR) => {}
            other => return Ok(other.map(drop)?),
        }
    }
}

/// Receives one message; `None`: the other side is gone.
pub fn receive<T: DeserializeOwned>(socket: BorrowedFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut buffer = vec![0u8; MAX_PACKET_BYTES];
    let mut control = nix::cmsg_space!([i32; MAX_DESCRIPTORS]);
    let mut fds = Vec::new();
    let count = loop {
        let mut data = [IoSliceMut::new(&mut buffer)];
        let received =
            recvmsg::<()>(socket.as_raw_fd(), &mut data, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC);
        let received = match received {
            // A wait with a time limit is not resumed by the kernel after a signal, whatever the handler's flags.
            Err(Errno::EINTR) => continue,
            // What was unread by a side that has died: the same as its end.
            Err(Errno::ECONNRESET) => return Ok(None),
            other => other?,
        };
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = message {
                // SAFETY: the kernel has just installed these descriptors for us.
                fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        break received.bytes;
    };
    if count == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&buffer[..count])?, fds)))
}

/// Byte strings in JSON without loss: each byte as the character of the same number.
mod byte_strings {
    use super::{OsStr, OsStrExt, OsString, OsStringExt};
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(list: &[OsString], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(list.iter().map(|text| encode(text)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<OsString>, D::Error> {
        let list = Vec::<String>::deserialize(deserializer)?;
        list.iter().map(|text| decode(text).ok_or_else(|| D::Error::custom("not a byte string"))).collect()
    }

    fn encode(text: &OsStr) -> String {
        text.as_bytes().iter().map(|&byte| char::from(byte)).collect()
    }

    fn decode(text: &str) -> Option<OsString> {
        let bytes: Result<Vec<u8>, _> = text.chars().map(u8::try_from).collect();
        bytes.ok().map(OsString::from_vec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::linux::sys;

    #[test]
    fn every_byte_of_an_argument_survives() {
        let all: Vec<u8> = (1..=255).collect();
        let program =
            Program { id: 7, argv: vec![OsString::from_vec(all)], env: vec!["A=ä".into()], cwd: "/".into() };
        let (a, b) = sys::socket_pair().unwrap();
        send(sys::as_fd(&a), &program, &[sys::as_fd(&b)]).unwrap();
        let (received, fds) = receive::<Program>(sys::as_fd(&b)).unwrap().unwrap();
        assert_eq!(received, program);
        assert_eq!(fds.len(), 1);
        drop(a);
        assert!(receive::<Program>(sys::as_fd(&b)).unwrap().is_none());
    }

    #[test]
    fn a_signal_does_not_cut_a_wait_short() {
        extern "C" fn nothing(_: libc::c_int) {}
        let (a, b) = sys::socket_pair().unwrap();
        super::super::client::set_receive_timeout(&b, Some(std::time::Duration::from_secs(60))).unwrap();
        // SAFETY: the handler does nothing, and the thread lives until it is joined below.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            sys::check(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut())).unwrap();
        }
        let waiting = std::thread::spawn(move || receive::<u32>(sys::as_fd(&b)));
        let thread = std::os::unix::thread::JoinHandleExt::as_pthread_t(&waiting);
        for _ in 0..200 {
            // SAFETY: as above.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            std::thread::yield_now();
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        send(sys::as_fd(&a), &7u32, &[]).unwrap();
        assert_eq!(waiting.join().unwrap().unwrap().unwrap().0, 7);
    }

    #[test]
    fn a_message_that_is_too_long_is_refused() {
        let (a, _b) = sys::socket_pair().unwrap();
        let error = send(sys::as_fd(&a), &"x".repeat(MAX_PACKET_BYTES), &[]).unwrap_err();
        assert!(error.to_string().contains("over the limit"), "{error}");
    }
}
