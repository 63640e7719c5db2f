//! Finds what works on this machine by running real sandboxes, and explains what does not.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::cgroup::{Cgroups, own_prefix};
use super::embedded::{Embedded, Mode};
use super::landlock;
use crate::sandbox::select::{Attempt, Examination, Options};
use crate::sandbox::{Backend, Choice, Exec, Limits, Mount, SandboxError, Spec};

const PROBE_TIMEOUT: Duration = Duration::from_secs(30);
const PROBE_MEMORY: u64 = 256 << 20;
const PROBE_TMP: u64 = 1 << 20;

/// The first backend that works, in the order of [`modes`], each with control groups before without.
pub async fn select(options: &Options) -> Result<Arc<dyn Backend>, SandboxError> {
    let mut first_error = None;
    for mode in modes(options) {
        match best_of(mode, options).await {
            Ok(backend) => return Ok(Arc::new(backend)),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or_else(|| SandboxError::Unsupported {
        cause: "the weak sandbox was asked for, but is not allowed".into(),
        remedy: "Add --weak-sandbox".into(),
    }))
}

/// Tries everything.
pub async fn examine(options: &Options) -> Examination {
    let facts = Facts::of_this_machine();
    let mut attempts = Vec::new();
    for mode in [Mode::Ranges, Mode::Single, Mode::Host, Mode::Weak] {
        if mode != Mode::Single && mode != Mode::Weak && !has_real_root() {
            continue;
        }
        let outcome = best_of(mode, options).await.map(|backend| backend.capabilities().clone());
        attempts.push(Attempt { what: mode.describe().to_owned(), outcome });
    }
    let cgroups = match Cgroups::find(own_prefix()) {
        Ok(cgroups) => cgroups.describe().to_owned(),
        Err(cause) => format!("none usable ({cause})"),
    };
    let mut facts = facts.describe();
    facts.push(("control groups".into(), cgroups));
    Examination { facts, attempts }
}

fn modes(options: &Options) -> Vec<Mode> {
    let isolated: &[Mode] = if has_real_root() {
        &[Mode::Ranges, Mode::Single, Mode::Host]
    } else {
        // With all capabilities gone nothing inside could use more ids than one.
        &[Mode::Single]
    };
    let weak: &[Mode] = if options.allow_weak { &[Mode::Weak] } else { &[] };
    match options.choice {
        Choice::Auto => [isolated, weak].concat(),
        Choice::Embedded => isolated.to_vec(),
        Choice::Weak => weak.to_vec(),
    }
}

/// A backend in this mode that has run a program.
async fn best_of(mode: Mode, options: &Options) -> Result<Embedded, SandboxError> {
    let name = own_prefix();
    if let Ok(cgroups) = Cgroups::find(name.clone()) {
        let backend = Embedded::new(mode, &options.binary, Some(cgroups), name);
        match attempt(&backend, options).await {
            Ok(()) => return Ok(backend),
            Err(error) => tracing::debug!("{} with control groups: {error}", mode.describe()),
        }
    }
    let backend = Embedded::new(mode, &options.binary, None, own_prefix());
    match attempt(&backend, options).await {
        Ok(()) => Ok(backend),
        Err(SandboxError::Setup { step, cause }) => {
            let remedy =
                if mode == Mode::Weak { weak_remedy() } else { Facts::of_this_machine().remedy(&step) };
            Err(SandboxError::Unsupported { cause: format!("{step}: {cause}"), remedy })
        }
        Err(other) => Err(other),
    }
}

/// Makes a sandbox with every kind of part, runs a program in it, and ends it.
async fn attempt(backend: &Embedded, options: &Options) -> Result<(), SandboxError> {
    let mounts = options
        .work_dirs
        .iter()
        .filter(|path| path.is_dir() && *path != Path::new("/"))
        .enumerate()
        .map(|(index, path)| Mount {
            host: path.clone(),
            inside: PathBuf::from(format!("/probe/{index}")),
            is_writable: false,
        })
        .collect();
    let limits = Limits {
        memory_bytes: Some(PROBE_MEMORY),
        max_processes: Some(16),
        tmp_bytes: Some(PROBE_TMP),
        workspace_bytes: None,
        cpu_seconds: Some(10),
    };
    let mut sandbox = backend.create(Spec { mounts, listen_port: Some(8080), limits }).await?;
    let exec = Exec {
        argv: vec!["/bin/true".into()],
        env: Vec::new(),
        cwd: "/".into(),
        stdin: Vec::new(),
        max_output_bytes: 4096,
        timeout: PROBE_TIMEOUT,
    };
    let exit = sandbox.exec(exec).await;
    sandbox.stop().await?;
    let evidence = exit?.evidence;
    if evidence.code == Some(0) {
        Ok(())
    } else {
        Err(SandboxError::Setup {
            step: "run /bin/true".into(),
            cause: format!("it ended with {evidence:?}"),
        })
    }
}

fn weak_remedy() -> String {
    match landlock::abi() {
        Ok(abi) if abi >= landlock::NEEDED_ABI => "Run `lego doctor` for more".into(),
        Ok(abi) => format!(
            "The weak sandbox needs Landlock version {} (Linux 6.7); this kernel has version {abi}",
            landlock::NEEDED_ABI
        ),
        Err(error) => {
            format!("The weak sandbox needs Landlock, which this kernel does not offer ({error})")
        }
    }
}

/// What explains a failure. Never what decides.
#[derive(Debug, Default, Clone)]
struct Facts {
    kernel: String,
    user: u32,
    has_filter: bool,
    unprivileged_userns_clone: Option<String>,
    max_user_namespaces: Option<String>,
    apparmor_restricts: Option<String>,
    /// The AppArmor profile of this process, if it is held by one.
    apparmor_profile: Option<String>,
}

impl Facts {
    fn of_this_machine() -> Self {
        Self {
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_default(),
            user: nix::unistd::geteuid().as_raw(),
            has_filter: status("Seccomp:").as_deref() == Some("2"),
            unprivileged_userns_clone: read("/proc/sys/kernel/unprivileged_userns_clone"),
            max_user_namespaces: read("/proc/sys/user/max_user_namespaces"),
            apparmor_restricts: read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
            // The module's own file is the sure one; the other is of whichever module comes first.
            apparmor_profile: read("/proc/self/attr/apparmor/current")
                .or_else(|| read("/proc/self/attr/current"))
                .filter(|profile| profile.ends_with(" (enforce)")),
        }
    }

    fn describe(&self) -> Vec<(String, String)> {
        let setting = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".into());
        vec![
            ("kernel".into(), self.kernel.clone()),
            ("user id".into(), self.user.to_string()),
            ("all capabilities of root".into(), yes_or_no(has_real_root())),
            ("inside a seccomp filter (a container?)".into(), yes_or_no(self.has_filter)),
            ("user.max_user_namespaces".into(), setting(&self.max_user_namespaces)),
            ("kernel.unprivileged_userns_clone".into(), setting(&self.unprivileged_userns_clone)),
            ("kernel.apparmor_restrict_unprivileged_userns".into(), setting(&self.apparmor_restricts)),
            ("AppArmor profile".into(), setting(&self.apparmor_profile)),
            (
                "Landlock".into(),
                landlock::abi().map_or_else(|error| error.to_string(), |abi| format!("version {abi}")),
            ),
        ]
    }

    /// What to do about a step that failed.
    fn remedy(&self, step: &str) -> String {
        const OTHER_WAYS: &str = "or run lego as root, or accept less isolation with --weak-sandbox";
        let is_user = self.user != 0;
        let is_namespace = step.starts_with("new namespaces");
        if is_namespace && is_user && self.unprivileged_userns_clone.as_deref() == Some("0") {
            format!("Run `sudo sysctl kernel.unprivileged_userns_clone=1`, {OTHER_WAYS}")
        } else if is_namespace && self.max_user_namespaces.as_deref() == Some("0") {
            format!("Run `sudo sysctl user.max_user_namespaces=10000`, {OTHER_WAYS}")
        } else if self.has_filter && is_namespace {
            "A seccomp filter, probably a container's, refuses new namespaces. Start the container with \
             `--security-opt seccomp=unconfined --security-opt apparmor=unconfined \
             --security-opt systempaths=unconfined`, or accept less isolation with --weak-sandbox"
                .into()
        } else if let Some(profile) = &self.apparmor_profile
            && is_mount(step)
        {
            format!(
                "The AppArmor profile {profile}, probably a container's, forbids mounts. Start the container with \
                 `--security-opt apparmor=unconfined --security-opt seccomp=unconfined \
                 --security-opt systempaths=unconfined`, or accept less isolation with --weak-sandbox"
            )
        } else if step.contains("proc") && (step.contains("create") || step.contains("fsmount")) {
            "The container hides parts of /proc. Start it with \
             `--security-opt systempaths=unconfined`, or accept less isolation with --weak-sandbox"
                .into()
        } else if is_user && self.apparmor_restricts.as_deref() == Some("1") {
            format!(
                "AppArmor restricts user namespaces of ordinary users. Install a profile for this \
                 binary: write `abi <abi/4.0>, include <tunables/global> profile lego {} \
                 flags=(unconfined) {{ userns, }}` to /etc/apparmor.d/lego and run \
                 `sudo apparmor_parser -r /etc/apparmor.d/lego`; or run \
                 `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`, {OTHER_WAYS}",
                std::env::current_exe().unwrap_or_else(|_| "/path/to/lego".into()).display()
            )
        } else if step.starts_with("open_tree") || step.contains("attributes") {
            format!("The embedded sandbox needs Linux 5.12 or later (this is {})", self.kernel)
        } else {
            "Run `lego doctor` for more, or accept less isolation with --weak-sandbox".into()
        }
    }
}

/// Steps that AppArmor's mount rules can refuse; the first of them comes first.
fn is_mount(step: &str) -> bool {
    ["make mounts private", "pivot_root", "attach", "bind", "open_tree", "id-mapped mount"]
        .iter()
        .any(|start| step.starts_with(start))
}

/// Root of a container has the number but not the capabilities.
fn has_real_root() -> bool {
    const SYS_ADMIN: u64 = 21;
    let capabilities = status("CapEff:").and_then(|text| u64::from_str_radix(&text, 16).ok());
    nix::unistd::geteuid().is_root() && capabilities.is_some_and(|set| set >> SYS_ADMIN & 1 == 1)
}

fn status(key: &str) -> Option<String> {
    let text = read("/proc/self/status")?;
    text.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned())
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn yes_or_no(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_known_cause_has_its_remedy() {
        let user = Facts { user: 1000, ..Facts::default() };
        let off = |value: &str| Some(value.to_owned());
        let cases = [
            (
                Facts { unprivileged_userns_clone: off("0"), ..user.clone() },
                "new namespaces",
                "kernel.unprivileged_userns_clone=1",
            ),
            (
                Facts { max_user_namespaces: off("0"), ..user.clone() },
                "new namespaces",
                "user.max_user_namespaces",
            ),
            (
                Facts { apparmor_restricts: off("1"), ..user.clone() },
                "write uid_map \"0 1000 1\"",
                "apparmor_parser",
            ),
            (Facts { has_filter: true, ..user.clone() }, "new namespaces", "seccomp=unconfined"),
            (
                Facts { apparmor_profile: off("docker-default (enforce)"), ..user.clone() },
                "make mounts private",
                "docker-default (enforce), probably a container's, forbids mounts. Start the container with \
                 `--security-opt apparmor=unconfined",
            ),
            (user.clone(), "fsmount proc", "systempaths=unconfined"),
            (user.clone(), "open_tree /usr", "5.12"),
            (user, "something else", "--weak-sandbox"),
        ];
        for (facts, step, expected) in cases {
            let remedy = facts.remedy(step);
            assert!(remedy.contains(expected), "{step}: {remedy}");
        }
    }
}
