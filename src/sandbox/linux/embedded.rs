//! The backend itself: turns a [`Spec`] into a plan for the helper.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;

use super::cgroup::{Cgroups, Group};
use super::client::Client;
use super::disk::Quota;
use super::running::{Limiter, Running};
use super::system::System;
use super::weak::{self, PrivateTmp, Translation};
use super::wire::{Ids, Isolation, Nursery, Plan, Rlimit, Shown};
use crate::sandbox::{
    Backend, Capabilities, DiskLimit, Enforcement, Limits, Mount, Sandbox, SandboxError, Spec,
};

/// The first id outside of the ranges that root gives to sandboxes: far above real users' and containers'.
const FIRST_RANGE: u32 = 1 << 30;
const RANGE_LENGTH: u32 = 65536;
/// Sandboxes with the same number modulo this share a range.
const RANGES: u32 = 4096;

/// Places that belong to the sandbox itself: no mount may cover them.
const RESERVED: [&str; 10] =
    ["/proc", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc"];

/// How to isolate, in the order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Root: an own range of unprivileged ids for each sandbox.
    Ranges,
    /// The starting user is 0 inside.
    Single,
    /// Root without user namespaces.
    Host,
    /// No namespaces at all: Landlock and seccomp.
    Weak,
}

impl Mode {
    pub fn describe(self) -> &'static str {
        match self {
            Self::Ranges => "user namespace with an id range",
            Self::Single => "user namespace with a single id",
            Self::Host => "namespaces without a user namespace",
            Self::Weak => "Landlock and seccomp, no namespaces",
        }
    }
}

/// The embedded backend in one mode. See [`probe`](super::probe) for the choice of the mode.
#[derive(Debug)]
pub struct Embedded {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    mode: Mode,
    client: Arc<Client>,
    system: System,
    cgroups: Option<Cgroups>,
    capabilities: Capabilities,
    started: AtomicU32,
    name: String,
    /// Open files that this process may have, soft and hard, before it raises the soft limit for itself: programs that
    /// walk through all possible files would take long within a raised one.
    files: Option<(u64, u64)>,
}

impl Embedded {
    /// A backend that has not been tried yet. `binary` is lego itself; `name` is the prefix of all that it
    /// names on this machine, and the one of `cgroups`.
    pub fn new(mode: Mode, binary: &Path, cgroups: Option<Cgroups>, name: String) -> Self {
        let mut system = System::of_host();
        if mode == Mode::Weak {
            system.shown.extend(weak::extra_system());
            PrivateTmp::sweep();
        }
        let setup = cgroups.as_ref().map_or_else(Nursery::default, |cgroups| Nursery {
            prefix: cgroups.prefix().to_owned(),
            parents: cgroups.parents(),
        });
        let capabilities = capabilities(mode, cgroups.as_ref());
        let shared = Shared {
            mode,
            client: Arc::new(Client::new(binary.to_owned(), setup)),
            system,
            cgroups,
            capabilities,
            started: AtomicU32::new(0),
            name,
            files: nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).ok(),
        };
        Self { shared: Arc::new(shared) }
    }
}

impl Shared {
    fn plan(&self, spec: &Spec, number: u32) -> Result<Plan, SandboxError> {
        Ok(Plan {
            isolation: self.isolation(number),
            system: self.system.shown.clone(),
            links: self.system.links.clone(),
            files: self.system.files.clone(),
            mounts: spec.mounts.iter().map(shown).collect::<Result<_, _>>()?,
            tmp_bytes: spec.limits.tmp_bytes,
            listen_port: spec.listen_port,
            rlimits: Vec::new(),
        })
    }

    fn isolation(&self, number: u32) -> Isolation {
        let ids = match self.mode {
            Mode::Weak => return Isolation::Weak,
            Mode::Host => Ids::Host,
            Mode::Single => {
                Ids::Single { uid: nix::unistd::geteuid().as_raw(), gid: nix::unistd::getegid().as_raw() }
            }
            Mode::Ranges => Ids::Ranges { base: FIRST_RANGE + number % RANGES * RANGE_LENGTH },
        };
        Isolation::Namespaces { ids }
    }

    /// Limits that every process gets: all where there is no control group, else only what one cannot do.
    fn rlimits(&self, limits: &Limits, quota: Option<&Quota>) -> Vec<Rlimit> {
        let mut list = vec![Rlimit { resource: libc::RLIMIT_CORE, soft: 0, hard: 0 }];
        let mut add = |resource, soft, hard| list.push(Rlimit { resource, soft, hard });
        if let Some(seconds) = limits.cpu_seconds {
            // SIGXCPU at the soft limit; a SIGKILL at the hard one would look like an OOM kill.
            add(libc::RLIMIT_CPU, seconds, seconds.saturating_add(1));
        }
        if let Some((soft, hard)) = self.files {
            add(libc::RLIMIT_NOFILE, soft, hard);
        }
        if self.cgroups.is_none() {
            if let Some(bytes) = limits.memory_bytes {
                // Not the address space: WebAssembly and Go reserve far more than they use.
                add(libc::RLIMIT_DATA, bytes, bytes);
            }
            if let (Some(count), Enforcement::Rlimit) = (limits.max_processes, self.capabilities.processes) {
                let count = count.saturating_add(1); // pid 1 counts too
                add(libc::RLIMIT_NPROC, count, count);
            }
        }
        if let Some(quota) = quota {
            // A file that was there may be written to as well.
            let largest = limits.workspace_bytes.max(limits.tmp_bytes).unwrap_or(0);
            let bytes = largest.saturating_add(quota.largest_file);
            add(libc::RLIMIT_FSIZE, bytes, bytes);
        }
        list
    }

    fn group(&self, limits: &Limits) -> Result<Option<Group>, SandboxError> {
        let Some(cgroups) = &self.cgroups else {
            return Ok(None);
        };
        if limits.memory_bytes.is_none() && limits.max_processes.is_none() {
            return Ok(None);
        }
        cgroups.create(limits.memory_bytes, limits.max_processes).map(Some).map_err(|error| {
            SandboxError::Setup { step: "make a control group".into(), cause: error.to_string() }
        })
    }

    /// Makes and starts a sandbox; blocks.
    fn start(&self, spec: &Spec) -> Result<Running, SandboxError> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let mut plan = self.plan(spec, number)?;
        let tmp = if self.mode == Mode::Weak { Some(self.private_tmp(number, &mut plan)?) } else { None };
        let quota = Quota::of(&plan.mounts, &spec.limits)?;
        plan.rlimits = self.rlimits(&spec.limits, quota.as_ref());
        let group = self.group(&spec.limits)?;
        let joins = group.as_ref().map_or_else(|| Ok(Vec::new()), Group::open_joins);
        let started = joins.map_err(SandboxError::from).and_then(|joins| self.client.start(&plan, &joins));
        let started = match started {
            Ok(started) => started,
            Err(error) => {
                if let Some(Err(left)) = group.map(|group| group.remove()) {
                    tracing::warn!("cannot remove a control group: {left}");
                }
                return Err(error);
            }
        };
        let translation = match self.mode {
            Mode::Weak => {
                let actual = started.listener.as_ref().map(|l| l.local_addr()).transpose()?;
                let port = spec.listen_port.zip(actual.map(|address| address.port()));
                Some(Translation::new(&plan.mounts, port))
            }
            _ => None,
        };
        let limiter = match (group, spec.limits.memory_bytes, self.mode) {
            (Some(group), ..) => Limiter::Group(group),
            (None, Some(limit), mode) if mode != Mode::Weak => Limiter::Watch { limit },
            _ => Limiter::None,
        };
        Running::new(Arc::clone(&self.client), started, limiter, quota, translation, tmp)
    }

    fn private_tmp(&self, number: u32, plan: &mut Plan) -> Result<PrivateTmp, SandboxError> {
        let tmp = PrivateTmp::create(&format!("{}{number}", self.name))?;
        plan.mounts.push(Shown {
            host: tmp.path().to_owned(),
            inside: "/tmp".into(),
            is_writable: true,
            is_directory: true,
        });
        Ok(tmp)
    }
}

#[async_trait]
impl Backend for Embedded {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let shared = Arc::clone(&self.shared);
        let started = tokio::task::spawn_blocking(move || shared.start(&spec)).await;
        let running = started.map_err(|error| SandboxError::Lost(error.to_string()))??;
        Ok(Box::new(running))
    }
}

fn capabilities(mode: Mode, cgroups: Option<&Cgroups>) -> Capabilities {
    let is_root = nix::unistd::geteuid().is_root();
    let (memory, processes) = match (cgroups, mode) {
        (Some(_), _) => (Enforcement::Cgroup, Enforcement::Cgroup),
        (None, Mode::Weak) => (Enforcement::Rlimit, Enforcement::None),
        // The kernel does not hold its own root to a number of processes.
        (None, Mode::Host) => (Enforcement::Watched, Enforcement::None),
        (None, Mode::Single) if is_root => (Enforcement::Watched, Enforcement::None),
        (None, Mode::Single | Mode::Ranges) => (Enforcement::Watched, Enforcement::Rlimit),
    };
    let limits = cgroups.map_or("no control groups", Cgroups::describe);
    let user = if is_root { "root" } else { "user" };
    Capabilities {
        backend: if mode == Mode::Weak { "weak" } else { "embedded" }.to_owned(),
        mode: format!("{user}, {}, {limits}", mode.describe()),
        memory,
        processes,
        disk: DiskLimit::Polled,
        tmp: if mode == Mode::Weak { DiskLimit::Polled } else { DiskLimit::Exact },
        is_isolated: mode != Mode::Weak,
    }
}

/// A mount of the spec as the plan takes it.
fn shown(mount: &Mount) -> Result<Shown, SandboxError> {
    let refuse =
        |cause: String| Err(SandboxError::Setup { step: format!("mount {}", mount.inside.display()), cause });
    let is_plain = mount.inside.is_absolute()
        && mount.inside.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
    if !is_plain || mount.inside == Path::new("/") {
        return refuse("the path inside must be absolute, without `..`, and not the root".into());
    }
    if let Some(place) = RESERVED.iter().find(|place| mount.inside.starts_with(place)) {
        return refuse(format!("{place} belongs to the sandbox itself"));
    }
    let host: PathBuf = match std::fs::canonicalize(&mount.host) {
        Ok(host) => host,
        Err(error) => return refuse(format!("{}: {error}", mount.host.display())),
    };
    let is_directory = host.is_dir();
    Ok(Shown { host, inside: mount.inside.clone(), is_writable: mount.is_writable, is_directory })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_over_the_sandbox_itself_are_refused() {
        for inside in ["/", "/proc/x", "relative", "/a/../etc", "/usr/lib", "/etc"] {
            let mount = Mount { host: "/".into(), inside: inside.into(), is_writable: false };
            assert!(matches!(shown(&mount), Err(SandboxError::Setup { .. })), "{inside}");
        }
        let mount = Mount { host: "/usr".into(), inside: "/workspace".into(), is_writable: true };
        assert!(shown(&mount).unwrap().is_directory);
        let mount = Mount { host: "/not/there".into(), inside: "/workspace".into(), is_writable: true };
        assert!(shown(&mount).unwrap_err().to_string().contains("/not/there"));
    }
}
