//! Keys whose feature is not there yet: accepted in files, refused when a run would need them.

use std::fmt;

use serde_json::Value;

use super::layers::one_or_several;
use super::{
    Algorithm, Config, ConfigError, HarnessType, NetworkPolicy, ObjectUrl, Origin, ReadonlyPaths, RewardType,
    SANDBOX_PORT, SandboxBackend, UpstreamKind,
};

/// What a config is used for: only what that needs is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// `lego proxy`: the proxy alone.
    Proxy,
    /// `lego eval`: proxy and sandboxes.
    Eval,
    /// `lego train`, `launch`: proxy, sandboxes and trainer.
    Train,
}

/// A key that does not do what it says yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub file: String,
    pub key: String,
    pub value: String,
    /// Why, and what to do.
    pub problem: String,
    pub remedy: String,
    /// True if a run refuses it; false if it merely has no effect.
    pub is_refused: bool,
    /// True if the value was set, false if it is the default.
    pub was_set: bool,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, key, value, problem, remedy, .. } = self;
        let effect = if self.is_refused { "a run refuses it: " } else { "" };
        write!(f, "{file}: {key} = {value}: not there yet: {effect}{problem}. {remedy}")
    }
}

impl Config {
    /// Refuses what a run would need and does not exist yet.
    ///
    /// # Errors
    /// [`ConfigError::NotThereYet`] for each such key.
    pub fn refuse_unsupported(&self, purpose: Use) -> Result<(), ConfigError> {
        let refused: Vec<_> = self
            .notes(purpose)
            .into_iter()
            .filter(|note| note.is_refused)
            .map(|Note { file, key, value, problem, remedy, .. }| ConfigError::NotThereYet {
                file,
                key,
                value,
                problem,
                remedy,
            })
            .collect();
        if refused.is_empty() { Ok(()) } else { Err(one_or_several(refused)) }
    }

    /// Keys that do not do what they say yet, as far as `purpose` needs them.
    #[must_use]
    pub fn notes(&self, purpose: Use) -> Vec<Note> {
        let mut notes = Notes { config: self, found: Vec::new() };
        notes.proxy();
        if purpose != Use::Proxy {
            notes.captures();
            notes.harness();
            notes.sandbox();
            notes.trials(purpose);
            notes.routes();
        }
        if purpose == Use::Train {
            notes.policy();
            notes.training();
        }
        notes.found
    }
}

struct Notes<'a> {
    config: &'a Config,
    found: Vec<Note>,
}

impl Notes<'_> {
    fn add(&mut self, is_refused: bool, key: &str, problem: &str, remedy: &str) {
        self.found.push(Note {
            file: self.config.file(key),
            key: key.to_owned(),
            value: self.config.shown(key).to_string(),
            problem: problem.to_owned(),
            remedy: remedy.to_owned(),
            is_refused,
            was_set: self.config.origin(key) != Origin::Default,
        });
    }

    fn refuse_if(&mut self, is_unsupported: bool, key: &str, problem: &str, remedy: &str) {
        if is_unsupported {
            self.add(true, key, problem, remedy);
        }
    }

    /// A key that was set, but has no effect.
    fn no_effect(&mut self, key: &str, problem: &str) {
        let is_set = self.config.origin(key) != Origin::Default;
        if is_set && self.config.shown(key) != Value::Null {
            self.add(false, key, problem, "It is accepted, and has no effect.");
        }
    }

    fn proxy(&mut self) {
        let proxy = &self.config.proxy;
        self.refuse_if(
            proxy.upstream_kind == UpstreamKind::Anthropic && proxy.pinned_sampling.is_some(),
            "proxy.pinned_sampling",
            "requests pass unchanged to a server of Messages",
            "Take it out, or use another upstream.",
        );
        for (name, route) in &proxy.routes {
            let is_pinned =
                route.pinned_sampling.is_some() || (route.is_policy() && proxy.pinned_sampling.is_some());
            self.refuse_if(
                is_pinned && proxy.server_of(name, route).kind == UpstreamKind::Anthropic,
                &format!("proxy.routes.{name}.upstream_kind"),
                "requests pass unchanged to a server of Messages, so their sampling cannot be pinned",
                "Take pinned_sampling out, or use another upstream.",
            );
        }
    }

    /// Where captures are kept: a run has them in its folder.
    fn captures(&mut self) {
        self.refuse_if(
            matches!(ObjectUrl::of(&self.config.proxy.capture_dir), Ok(Some(_))),
            "proxy.capture_dir",
            "the captures of a run are in the run's folder, not in object storage",
            "Set it to a folder, or use another config for lego proxy.",
        );
    }

    /// Routes beside a trainer's policy.
    fn routes(&mut self) {
        let proxy = &self.config.proxy;
        for (name, route) in &proxy.routes {
            self.refuse_if(
                route.is_policy(),
                &format!("proxy.routes.{name}.kind"),
                "in training every model name is answered by the policy already",
                "Set it to aux, judge or teacher, or take the route out.",
            );
            self.refuse_if(
                route.has_own_server() && proxy.server_of(name, route).is_embedded(),
                &format!("proxy.routes.{name}.upstream_base_url"),
                "in training the embedded engine serves the policy only",
                "Set it to a server's URL, or take the route's own model_path and time limits out.",
            );
        }
    }

    fn policy(&mut self) {
        let proxy = &self.config.proxy;
        let (key, remedy) = if self.config.policy.upstream.is_some() {
            ("policy.upstream", "Set it to embedded, and take policy.base_url out.")
        } else {
            ("proxy.upstream_base_url", "Set it to embedded, and proxy.model_path to the model's folder.")
        };
        self.refuse_if(
            !proxy.is_embedded()
                && matches!(proxy.upstream_kind, UpstreamKind::Openai | UpstreamKind::Anthropic),
            "proxy.upstream_kind",
            "this upstream gives no token ids, so there is nothing to train on",
            "Train the embedded policy: set proxy.upstream_base_url to embedded.",
        );
        self.refuse_if(
            !proxy.is_embedded(),
            key,
            "only the embedded engine gives the trainer exact token ids and takes its weights",
            remedy,
        );
        self.refuse_if(
            !proxy.capture_token_ids,
            "proxy.capture_token_ids",
            "without token ids there is nothing to train on",
            "Set it to true.",
        );
        self.refuse_if(
            !proxy.capture_logprobs,
            "proxy.capture_logprobs",
            "without log-probabilities there is no importance ratio",
            "Set it to true.",
        );
    }

    fn harness(&mut self) {
        let harness = &self.config.harness;
        self.refuse_if(
            harness.r#type != HarnessType::Mini && harness.command.is_none(),
            "harness.type",
            "only the harness mini can be started by its name",
            "Set it to mini, or set harness.command to the command line that starts it.",
        );
        self.refuse_if(
            harness.sdk_version.is_some() && harness.r#type == HarnessType::Mini,
            "harness.sdk_version",
            "the harness mini is part of lego and has its version",
            "Take the key out.",
        );
        self.refuse_if(
            !harness.env.is_empty() && harness.command.is_none(),
            "harness.env",
            "the harness mini takes no variables",
            "Take the key out, or set harness.command.",
        );
        let base_url = harness.llm_config_override.base_url.as_deref();
        let own = ["127.0.0.1", "localhost"].map(|host| format!("http://{host}:{SANDBOX_PORT}"));
        let is_own =
            |url: &str| own.iter().any(|own| own == url.trim_end_matches('/').trim_end_matches("/v1"));
        self.refuse_if(
            base_url.is_some_and(|url| !is_own(url)),
            "harness.llm_config_override.base_url",
            &format!("a sandbox reaches only the model API at port {SANDBOX_PORT} of its own loopback"),
            &format!("Set it to {}/v1, or take the key out.", own[0]),
        );
        if harness.command.is_none() {
            self.no_effect("harness.llm_config_override.auth_type", "the harness mini signs in one way only");
        }
    }

    fn sandbox(&mut self) {
        let sandbox = &self.config.sandbox;
        self.refuse_if(
            sandbox.image != "host",
            "sandbox.image",
            "container images cannot be used",
            "Set it to host: this machine's system folders, read-only.",
        );
        self.refuse_if(
            sandbox.lazy_pull && sandbox.image != "host",
            "sandbox.lazy_pull",
            "images cannot be fetched",
            "Set it to false.",
        );
        self.refuse_if(
            sandbox.network_policy != NetworkPolicy::Restricted,
            "sandbox.network_policy",
            "sandboxes reach the session's model API and nothing else",
            "Set it to restricted.",
        );
        self.refuse_if(
            !sandbox.defense.block_outbound,
            "sandbox.defense.block_outbound",
            "sandboxes have no way out",
            "Set it to true.",
        );
        self.refuse_if(
            !sandbox.termination_aware_filter,
            "sandbox.termination_aware_filter",
            "failed machinery is never counted as the policy's failure",
            "Set it to true.",
        );
        self.refuse_if(
            !sandbox.defense.mask_test_files,
            "sandbox.defense.mask_test_files",
            "hidden tests never enter the agent's sandbox",
            "Set it to true.",
        );
        self.refuse_if(
            sandbox.defense.readonly_system_paths == ReadonlyPaths::All(false),
            "sandbox.defense.readonly_system_paths",
            "system folders are always read-only",
            "Set it to true.",
        );
        self.refuse_if(
            matches!(sandbox.backend, SandboxBackend::Docker | SandboxBackend::Kubernetes),
            "sandbox.backend",
            "this backend does not exist",
            "Set it to auto.",
        );
        self.no_effect("sandbox.cache.image_cache_dir", "no image is cached");
        self.no_effect("sandbox.cache.cache_ttl_hours", "no image is cached");
    }

    fn trials(&mut self, purpose: Use) {
        self.refuse_if(
            self.config.training.reward.r#type != RewardType::TaskSuccess,
            "training.reward.type",
            "only hidden tests give a reward",
            "Set it to task_success.",
        );
        self.refuse_if(
            purpose == Use::Eval && self.config.proxy.upstream_kind == UpstreamKind::Anthropic,
            "proxy.upstream_kind",
            "trials pin the sampling, and requests pass unchanged to a server of Messages",
            "Evaluate a chat server.",
        );
    }

    fn training(&mut self) {
        let training = &self.config.training;
        self.refuse_if(
            training.algorithm != Algorithm::Grpo,
            "training.algorithm",
            "only GRPO exists",
            "Set it to grpo.",
        );
        self.refuse_if(
            training.r#async.enable,
            "training.async.enable",
            "training is synchronous",
            "Set it to false.",
        );
        self.refuse_if(
            training.temperature != 1.0,
            "training.temperature",
            "the loss takes log-probabilities at temperature 1",
            "Set it to 1.",
        );
        self.refuse_if(
            training.observability.enable_ui,
            "training.observability.enable_ui",
            "there are no web pages of the run",
            "Set it to false, and watch the progress bar, train.log or TensorBoard.",
        );
        self.no_effect("training.observability.trace_sample_rate", "trials are not traced");
    }
}
