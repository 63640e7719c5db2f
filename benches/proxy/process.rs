//! The process under test: lego or another proxy, and what the system says about it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::client::Target;

/// A proxy in front of the mock. Dropped, it is killed.
pub struct Process {
    child: Child,
    pub target: Target,
}

impl Process {
    /// `lego proxy` in front of this upstream, with captures in `dir`.
    pub fn lego(upstream: &str, dir: &Path, durability: &str) -> Self {
        let config = dir.join("proxy.json");
        let settings = serde_json::json!({"proxy": {
            "upstream_base_url": upstream, "upstream_kind": "vllm", "listen_port": 0, "probe_upstream": false,
            "max_in_flight": 20_000, "keep_alive_secs": 0, "durability": durability, "capture_dir": captures(dir),
        }});
        std::fs::write(&config, settings.to_string()).expect("written");
        let binary = std::env::var_os("LEGO_BENCH_BINARY");
        let mut command = Command::new(binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_lego").into()));
        command.arg("proxy").arg("--config").arg(config).current_dir(dir);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("lego starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let told = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let address = line.strip_prefix("lego proxy: http://")?.split('/').next()?.to_owned();
            Some(address)
        });
        let address = told.expect("lego tells where it listens");
        // What it says later is shown, so that its pipe never fills.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("lego: {line}")));
        Self { child, target: Target { address, path: "/v1/chat/completions".to_owned() } }
    }

    /// nginx, passing bytes on without buffering; `None` where it is not installed.
    pub async fn nginx(upstream: &str, dir: &Path) -> Option<Self> {
        let port = free_port();
        let (at, upstream) = (dir.display(), upstream.trim_start_matches("http://"));
        let bodies: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {at}/{name};\n"))
            .concat();
        let config = format!(
            "worker_processes 2;\ndaemon off;\npid {at}/pid;\nerror_log {at}/error warn;\n\
             events {{ worker_connections 16384; }}\nhttp {{\naccess_log off;\nkeepalive_requests 1000000000;\n{bodies}\
             upstream mock {{ server {upstream}; keepalive 1024; keepalive_requests 1000000000; }}\n\
             server {{ listen 127.0.0.1:{port} backlog=4096; tcp_nodelay on; location / {{\n\
             proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
             proxy_buffering off; proxy_buffer_size 64k; proxy_buffers 8 64k; proxy_busy_buffers_size 128k;\n\
             proxy_request_buffering off; }} }} }}\n"
        );
        std::fs::write(dir.join("nginx.conf"), config).expect("written");
        let child = Command::new("nginx").arg("-c").arg(dir.join("nginx.conf")).stderr(Stdio::null()).spawn();
        Self::listening(child.ok()?, port, "/v1/chat/completions").await
    }

    /// rllm's model gateway, if `LEGO_BENCH_RLLM` or the path has it.
    pub async fn rllm(upstream: &str, dir: &Path) -> Option<Self> {
        let program = std::env::var_os("LEGO_BENCH_RLLM").unwrap_or_else(|| "rllm-model-gateway".into());
        let port = free_port();
        let child = Command::new(program)
            .args(["--host", "127.0.0.1", "--port", &port.to_string(), "--store", "sqlite"])
            .args(["--worker", &format!("{upstream}/v1"), "--log-level", "ERROR", "--db-path"])
            .arg(dir.join("rllm.db"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self::listening(child.ok()?, port, "/sessions/bench/v1/chat/completions").await
    }

    /// Waits until it listens; `None` if it ends instead.
    async fn listening(child: Child, port: u16, path: &str) -> Option<Self> {
        let target = Target { address: format!("127.0.0.1:{port}"), path: path.to_owned() };
        let mut process = Self { child, target };
        while tokio::net::TcpStream::connect(&process.target.address).await.is_err() {
            if process.child.try_wait().ok()?.is_some() {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Some(process)
    }

    /// Resident bytes of the process and those it started.
    pub fn resident(&self) -> u64 {
        let pages = |pid| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
            text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0)
        };
        tree(self.child.id()).into_iter().map(pages).sum::<u64>() * 4096
    }

    /// CPU time of the process and those it started, in the system's ticks of 10 ms.
    pub fn cpu(&self) -> Duration {
        let ticks = |pid| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let fields = text.rsplit(')').next().unwrap_or_default().split(' ');
            fields.skip(12).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>()
        };
        Duration::from_millis(tree(self.child.id()).into_iter().map(ticks).sum::<u64>() * 10)
    }

    /// Asks it to end, and waits until it has.
    pub fn end(mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it runs");
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        for pid in tree(self.child.id()).into_iter().skip(1) {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::SIGTERM);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where lego's captures lie.
pub fn captures(dir: &Path) -> PathBuf {
    dir.join("captures")
}

/// The process, then those it started.
fn tree(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    std::iter::once(pid).chain(children.flat_map(tree)).collect()
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    listener.local_addr().expect("bound").port()
}

/// Lets this process and those it starts open as many files as the system allows.
pub fn raise_open_files() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
    {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}
