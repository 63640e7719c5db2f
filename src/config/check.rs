//! Values that cannot be, alone or together.

mod routes;

use std::path::{Component, Path, PathBuf};

use super::{Config, ConfigError, ObjectUrl, ObjectUrlError, ReadonlyPaths, Relay, TrainedLineages, listen};

/// Places inside a sandbox that are its own: system folders, the workspace, lego's own files.
const OWN_PLACES: [&str; 13] = [
    "/proc",
    "/dev",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/opt/lego",
    "/workspace",
    "/tmp",
];

/// Places inside a sandbox that can be written, at least in part.
const WRITABLE_PLACES: [&str; 4] = ["/workspace", "/tmp", "/dev", "/proc"];

/// A path inside a sandbox that is neither in nor above any of `places`.
fn is_apart(path: &Path, places: &[&str]) -> bool {
    path.is_absolute()
        && path.components().skip(1).all(|part| matches!(part, Component::Normal(_)))
        && !places.iter().any(|place| path.starts_with(place) || Path::new(place).starts_with(path))
}

impl Config {
    /// Everything that is wrong with the values.
    pub(super) fn problems(&self) -> Vec<ConfigError> {
        let mut found = Problems { config: self, errors: Vec::new() };
        found.proxy();
        found.upstream();
        found.routes();
        found.model_map();
        found.volatile();
        found.sandbox();
        found.batches();
        found.training();
        found.samples();
        found.places();
        found.errors
    }
}

/// Most threads for the arithmetic that anybody means.
pub const MAX_THREADS: usize = 1024;
/// Least memory of a sandbox, MiB: an interpreter and what it tests have to fit.
const LEAST_MEMORY_MB: u64 = 32;

struct Problems<'a> {
    config: &'a Config,
    errors: Vec<ConfigError>,
}

impl Problems<'_> {
    fn require(&mut self, is_fine: bool, key: &str, problem: &str, remedy: &str) {
        if !is_fine {
            self.errors.push(ConfigError::Value {
                file: self.config.file(key),
                key: key.to_owned(),
                value: self.config.shown(key).to_string(),
                problem: problem.to_owned(),
                remedy: remedy.to_owned(),
            });
        }
    }

    fn positive(&mut self, key: &str, value: impl Into<u128>) {
        self.require(value.into() > 0, key, "must be at least 1", &format!("Set {key} to 1 or more."));
    }

    fn places(&mut self) {
        let config = self.config;
        let log_dir = &config.training.observability.log_dir;
        for (key, path) in [
            ("proxy.capture_dir", Some(&config.proxy.capture_dir)),
            ("proxy.capture_local_dir", config.proxy.capture_local_dir.as_ref()),
            ("proxy.model_path", Some(&config.proxy.model_path)),
            ("policy.model_path", config.policy.model_path.as_ref()),
            ("training.dataset", config.training.dataset.as_ref()),
            ("training.observability.log_dir", Some(log_dir)),
        ] {
            let is_empty = path.is_some_and(|path| path.as_os_str().is_empty());
            self.require(!is_empty, key, "an empty path", "Name a folder or file, or leave the key out.");
        }
        self.captures();
    }

    fn captures(&mut self) {
        let key = "proxy.capture_dir";
        let of = |place: Option<&PathBuf>| place.map_or(Ok(None), |place| ObjectUrl::of(place));
        match of(Some(&self.config.proxy.capture_dir)) {
            Ok(Some(_)) => {}
            Ok(None) => self.require(
                self.config.proxy.capture_local_dir.is_none(),
                "proxy.capture_local_dir",
                "proxy.capture_dir is a folder itself",
                "Take it out, or set proxy.capture_dir to a URL of object storage.",
            ),
            Err(ObjectUrlError { problem, remedy, is_plain }) => {
                let value = if is_plain { self.config.shown(key).to_string() } else { "(hidden)".to_owned() };
                let (file, key, remedy) = (self.config.file(key), key.to_owned(), format!("{remedy}."));
                self.errors.push(ConfigError::Value { file, key, value, problem, remedy });
            }
        }
        self.require(
            matches!(of(self.config.proxy.capture_local_dir.as_ref()), Ok(None)),
            "proxy.capture_local_dir",
            "not a folder of this machine",
            "Name a folder; the URL belongs into proxy.capture_dir.",
        );
    }

    fn within(&mut self, key: &str, value: f64, low: f64, high: f64) {
        self.require(
            value >= low && value <= high,
            key,
            &format!("must be a number from {low} to {high}"),
            &format!("Set {key} within these bounds."),
        );
    }

    fn proxy(&mut self) {
        let proxy = &self.config.proxy;
        let hosts: Vec<&str> = proxy.listen_host.bare().collect();
        self.require(!hosts.is_empty(), "proxy.listen_host", "no address", "Name one, such as 127.0.0.1.");
        for (at, host) in hosts.iter().enumerate() {
            let problem = listen::problem(host, proxy.client_token_env.is_some());
            let twice = || (format!("{host} is there twice"), "Take one of them out.");
            if let Some((why, remedy)) = problem.or_else(|| hosts[..at].contains(host).then(twice)) {
                self.require(false, "proxy.listen_host", &why, remedy);
            }
        }
        self.require(
            proxy.admin_listen_port.is_none() || proxy.admin_token_env.is_some(),
            "proxy.admin_listen_port",
            "the admin listener needs a token",
            "Set proxy.admin_token_env to the name of a variable with one.",
        );
        self.positive("proxy.stream_buffer_size", proxy.stream_buffer_size as u64);
        self.positive("proxy.capture_buffer_size", proxy.capture_buffer_size as u64);
        self.positive("proxy.max_body_bytes", proxy.max_body_bytes as u64);
        if let Some(bytes) = proxy.large_bodies_bytes {
            self.require(
                bytes >= proxy.max_body_bytes,
                "proxy.large_bodies_bytes",
                "less than proxy.max_body_bytes: not one body of that length would have room",
                "Set it to proxy.max_body_bytes or more, or leave it out.",
            );
        }
        self.positive("proxy.max_in_flight", proxy.max_in_flight as u64);
        if let Some(pinned) = &proxy.pinned_sampling {
            self.within("proxy.pinned_sampling.temperature", pinned.temperature, 0.0, 100.0);
        }
        let command = self.config.harness.command.as_deref();
        self.require(
            command.is_none_or(|command| !command.is_empty()),
            "harness.command",
            "an empty command line",
            "Give the program and its arguments, or take the key out.",
        );
    }

    fn upstream(&mut self) {
        let (proxy, policy) = (&self.config.proxy, &self.config.policy);
        self.variable("proxy.client_token_env", proxy.client_token_env.as_deref());
        self.variable("proxy.admin_token_env", proxy.admin_token_env.as_deref());
        self.server(&proxy.server());
        self.require(
            proxy.relay != Relay::TokenIn
                || !self.config.has_default_route()
                || proxy.server().rendered_folder(proxy.local_tokenizer.as_deref()).is_some(),
            "proxy.relay",
            "prompts are rendered here, and nobody says with which tokenizer and chat template",
            "Set proxy.local_tokenizer to the folder of the upstream's model (tokenizer.json, chat_template.jinja).",
        );
        self.positive("policy.max_batch", policy.max_batch as u64);
        if let Some(tokens) = policy.max_context_tokens {
            self.positive("policy.max_context_tokens", tokens as u64);
        }
    }

    fn sandbox(&mut self) {
        let sandbox = &self.config.sandbox;
        self.require(!sandbox.image.is_empty(), "sandbox.image", "no image", "Set it to host.");
        self.require(
            is_apart(&sandbox.hidden_test_mount, &OWN_PLACES),
            "sandbox.hidden_test_mount",
            "not an absolute path, or one where the sandbox has its own (/usr, /etc, /tmp, /workspace, /opt/lego, …)",
            "Set it to another path inside the sandbox, such as /opt/hidden_tests.",
        );
        if let ReadonlyPaths::Listed(paths) = &sandbox.defense.readonly_system_paths {
            let written = paths.iter().find(|path| !is_apart(path, &WRITABLE_PLACES));
            let named = written.map_or(String::new(), |path| path.display().to_string());
            self.require(
                written.is_none(),
                "sandbox.defense.readonly_system_paths",
                &format!(
                    "{named} is not an absolute path, or has to do with what programs inside can write to \
                     (/workspace, /tmp, /dev, /proc)"
                ),
                "Take it out, or set the key to true: all system folders are read-only.",
            );
        }
        self.positive("sandbox.max_concurrent", sandbox.max_concurrent as u64);
        self.require(
            sandbox.memory_mb >= LEAST_MEMORY_MB,
            "sandbox.memory_mb",
            "no interpreter runs tests in so little",
            &format!("Set it to {LEAST_MEMORY_MB} or more; 512 is the default."),
        );
        self.positive("sandbox.max_processes", sandbox.max_processes);
        self.positive("sandbox.tmp_mb", sandbox.tmp_mb);
        self.positive("sandbox.workspace_mb", sandbox.workspace_mb);
        self.positive("sandbox.cpu_seconds", sandbox.cpu_seconds);
        self.positive("sandbox.verify_timeout_sec", sandbox.verify_timeout_sec);
    }

    fn batches(&mut self) {
        let training = &self.config.training;
        let before = self.errors.len();
        self.require(
            training.group_size >= 2,
            "training.group_size",
            "a group of fewer than 2 trials has no baseline",
            "Set it to 2 or more.",
        );
        self.positive("training.batch_size", training.batch_size as u64);
        self.positive("training.rollout_batch_size", training.rollout_batch_size as u64);
        if self.errors.len() > before {
            return;
        }
        let (group, batch, rollout) = (training.group_size, training.batch_size, training.rollout_batch_size);
        self.require(
            batch.is_multiple_of(group),
            "training.batch_size",
            &format!("training.group_size = {group} does not divide it"),
            &format!("Set it to a multiple of {group}."),
        );
        self.require(
            rollout.is_multiple_of(batch),
            "training.rollout_batch_size",
            &format!("training.batch_size = {batch} does not divide it"),
            &format!("Set it to a multiple of {batch}."),
        );
    }

    fn samples(&mut self) {
        let samples = &self.config.training.samples;
        let key = "training.samples.take_in";
        self.require(
            !samples.take_in.iter().any(|kind| samples.leave_out.contains(&kind.side())),
            key,
            "training.samples.leave_out has the same kind",
            "Take it out of one of them.",
        );
        self.require(
            samples.take_in.is_empty() || samples.lineages != TrainedLineages::Main,
            key,
            "training.samples.lineages = \"main\" trains the main agent's calls alone",
            "Set training.samples.lineages to all or longest, or take this key out.",
        );
    }

    fn training(&mut self) {
        let training = &self.config.training;
        self.require(
            training.learning_rate > 0.0 && training.learning_rate < 1.0,
            "training.learning_rate",
            "must lie between 0 and 1",
            "Set it to a number such as 1e-6.",
        );
        self.require(
            training.threads <= MAX_THREADS,
            "training.threads",
            &format!("more than {MAX_THREADS}"),
            "Set it to the number of cores, or to 0 for all of them.",
        );
        self.positive("training.max_turns", training.max_turns as u64);
        self.positive("training.max_steps", training.max_steps);
        self.positive("training.max_new_tokens", training.max_new_tokens as u64);
        self.positive("training.async.long_tail_timeout_sec", training.r#async.long_tail_timeout_sec);
        self.within("training.kl_coef", training.kl_coef, 0.0, 1e6);
        self.within("training.clip_range", training.clip_range, 0.0, 1.0);
        self.within("training.clip_range_high", training.upper_clip_range(), 0.0, 1e6);
        self.within("training.weight_decay", training.weight_decay, 0.0, 1e6);
        self.within("training.max_grad_norm", training.max_grad_norm, 0.0, 1e9);
        self.within("training.temperature", training.temperature, 0.0, 100.0);
        self.require(
            !training.advantage_scale_by_std || [1e-4, 1e-6].contains(&training.advantage_eps),
            "training.advantage_eps",
            "only two values exist",
            "Set it to 1e-4, as TRL has it, or to 1e-6, as verl has it.",
        );
        self.within(
            "training.observability.trace_sample_rate",
            training.observability.trace_sample_rate,
            0.0,
            1.0,
        );
        self.require(
            training.betas.iter().all(|beta| (0.0..1.0).contains(beta)),
            "training.betas",
            "both must be at least 0 and below 1",
            "Set them to two numbers such as [0.9, 0.95].",
        );
        self.require(
            training.adam_eps > 0.0 && training.adam_eps < 1.0,
            "training.adam_eps",
            "must lie between 0 and 1",
            "Set it to a number such as 1e-8.",
        );
        self.require(
            i64::try_from(training.seed).is_ok(),
            "training.seed",
            "larger than a TOML integer",
            "Set it to a whole number below 2^63.",
        );
    }
}
