//! The names of everything measured, with what each means. `docs/metrics.md` is generated from here.

use std::fmt::Write as _;

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A column of `metrics.parquet`, 64-bit float.
    Float,
    /// A column of `metrics.parquet`, 64-bit integer.
    Integer,
    /// Prometheus counter.
    Counter,
    /// Prometheus gauge.
    Gauge,
    /// Prometheus histogram.
    Histogram,
}

/// A column of `metrics.parquet` and a curve in TensorBoard.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// TensorBoard's group of curves.
    pub group: &'static str,
    pub name: &'static str,
    pub kind: Kind,
    pub description: &'static str,
}

impl Column {
    /// The curve's tag: `group/name`.
    #[must_use]
    pub fn tag(&self) -> String {
        format!("{}/{}", self.group, self.name)
    }
}

/// A metric of `/metrics`.
#[derive(Debug, Clone, Copy)]
pub struct Prometheus {
    pub name: &'static str,
    pub kind: Kind,
    /// A histogram of times far below a second.
    pub is_short: bool,
    /// What it is told apart by, if anything; only words of lego's own.
    pub label: Option<&'static str>,
    pub description: &'static str,
}

const fn float(group: &'static str, name: &'static str, description: &'static str) -> Column {
    Column { group, name, kind: Kind::Float, description }
}

const fn integer(group: &'static str, name: &'static str, description: &'static str) -> Column {
    Column { group, name, kind: Kind::Integer, description }
}

/// Every column of `metrics.parquet` after `step`.
pub const COLUMNS: &[Column] = &[
    integer("policy", "policy_version", "Version that sampled this step's trials."),
    float(
        "policy",
        "policy_version_lag",
        "Mean over trained tokens: the version published when the batch was formed, minus the version that sampled the token.",
    ),
    integer("policy", "policy_version_lag_max", "The largest such lag."),
    float("reward", "reward_mean", "Mean reward of the step's valid trials."),
    float("reward", "solve_rate", "Share of them that solved their task: a reward of 1."),
    float("reward", "advantage_mean", "Mean advantage of the trained episodes."),
    float("reward", "advantage_std", "Standard deviation of the trained episodes' advantages."),
    float(
        "reward",
        "degenerate_group_ratio",
        "Share of the version's groups whose rewards are all equal: they carry no gradient.",
    ),
    float("reward", "all_solved_group_ratio", "Its part of which every reward is at least 0.5."),
    float("reward", "all_failed_group_ratio", "Its part of which every reward is below 0.5."),
    integer("trials", "trials", "Trials of the policy version."),
    integer("trials", "valid_trials", "Trials that were graded."),
    integer("trials", "invalid_trajectories", "Trials that left their group because machinery failed."),
    integer("trials", "agent_timeouts", "Trials that ended at `long_tail_timeout_sec`."),
    integer("trials", "max_turns_reached", "Trials that ended at `max_turns`."),
    float("trials", "turns_mean", "Mean number of calls that the policy answered in a trial's last attempt."),
    float("loss", "loss", "The loss whose gradient was taken."),
    float("loss", "policy_loss", "Its clipped policy-gradient part."),
    float("loss", "kl_loss", "Its KL part, before `kl_coef`."),
    float("loss", "kl", "KL divergence to the starting policy, by `kl_estimator`, mean over trained tokens."),
    float(
        "loss",
        "kl_old",
        "Mean k3 estimate of the KL divergence between the policy that sampled and the one before this update.",
    ),
    float("loss", "entropy", "Mean entropy of the policy at trained tokens, nats."),
    float("loss", "clip_fraction", "Share of trained tokens whose ratio was clipped."),
    float("loss", "ratio_mean", "Mean importance ratio of trained tokens."),
    float("loss", "ratio_max", "Largest importance ratio."),
    float("optimizer", "grad_norm", "Global norm of the gradient before clipping."),
    float("optimizer", "learning_rate", "Learning rate of the step."),
    float(
        "alignment",
        "prob_correlation",
        "Pearson correlation of captured and recomputed probabilities of sampled tokens; recomputed by a forward pass without KV cache. Null when the captured ones are all equal.",
    ),
    float(
        "alignment",
        "max_logprob_diff",
        "Largest absolute difference of captured and recomputed log-probabilities. 0 on the embedded engine.",
    ),
    float("alignment", "mean_logprob_diff", "Mean of these differences."),
    integer("alignment", "aligned_tokens", "Trained tokens that this version sampled: those compared."),
    integer("tokens", "sampled_tokens", "Tokens sampled in the version's trials."),
    integer("tokens", "trained_tokens", "Of these: took part in the loss of this step."),
    integer("tokens", "masked_tokens", "Of these: in a sample, weighted 0."),
    integer("tokens", "superseded_tokens", "Of these: a retry was continued instead."),
    integer("tokens", "aux_tokens", "Of these: sampled for something other than the policy."),
    integer("tokens", "over_window_tokens", "Of these: behind `training.samples.max_tokens`."),
    integer("tokens", "infra_failure_tokens", "Of these: their trial failed by machinery."),
    integer("tokens", "dropped_tokens", "Of these: left out, with a reason in the report."),
    integer(
        "tokens",
        "usage_unknown_tokens",
        "Of these: their call reported no usage to check them against.",
    ),
    integer("tokens", "no_ids_tokens", "Of these: reported as usage, without ids."),
    integer(
        "breaks",
        "breaks_system_changed",
        "Histories in the version's trials that were rewritten, by reason (docs/lineages.md): the system messages are others.",
    ),
    integer("breaks", "breaks_tools_changed", "The tools are others."),
    integer("breaks", "breaks_history_compacted", "Messages are gone."),
    integer("breaks", "breaks_message_edited", "A message says something else."),
    integer("breaks", "breaks_reasoning_dropped", "What the model thought is gone."),
    integer("breaks", "breaks_arguments_reserialised", "Arguments of a tool call are printed otherwise."),
    integer("breaks", "breaks_whitespace_changed", "White space around a text is another."),
    integer("breaks", "breaks_retokenised", "The same text is in other tokens."),
    integer("breaks", "breaks_unknown", "Nobody can tell."),
    float("lengths", "prompt_length_mean", "Mean prompt length of the calls in `turns_mean`, tokens."),
    float("lengths", "response_length_mean", "Mean sampled tokens of a trial."),
    integer("lengths", "response_length_max", "Most sampled tokens of a trial."),
    integer("lengths", "sequence_length_max", "Longest training sequence, tokens."),
    float("throughput", "sampled_tokens_per_second", "Sampled tokens by the rollout phase's wall time."),
    float(
        "throughput",
        "trained_tokens_per_second",
        "Tokens through forward and backward, context included, by the learner phase's wall time.",
    ),
    float("throughput", "trials_per_second", "Trials by the rollout phase's wall time."),
    float("time", "rollout_seconds", "Wall time of sampling and verifying."),
    float("time", "verify_seconds", "Sum over trials of their verifiers' wall time, attempts counted each."),
    float(
        "time",
        "train_seconds",
        "Wall time of the learner: forward, backward and optimizer, all steps of the version.",
    ),
    float(
        "time",
        "replay_seconds",
        "Its part that recomputed log-probabilities before the first of several steps. Null with one step a version: its forward pass has them.",
    ),
    float("time", "publish_seconds", "Wall time of handing over new weights."),
    float("time", "checkpoint_seconds", "Wall time of saving a checkpoint after the step."),
    float("time", "eval_seconds", "Wall time of held-out evaluation after the step."),
    float("time", "step_seconds", "Wall time from the first trial to the publication of new weights."),
    float("heldout", "heldout_solve_rate", "Held-out solve rate at temperature after the step."),
    float("heldout", "heldout_greedy", "Held-out greedy solve rate after the step."),
    float(
        "heldout",
        "heldout_pass_at_k",
        "Share of held-out tasks that at least one of `eval_samples` samples solved.",
    ),
];

const fn prometheus(name: &'static str, kind: Kind, description: &'static str) -> Prometheus {
    Prometheus { name, kind, is_short: false, label: None, description }
}

const fn counter(name: &'static str, description: &'static str) -> Prometheus {
    prometheus(name, Kind::Counter, description)
}

const fn gauge(name: &'static str, description: &'static str) -> Prometheus {
    prometheus(name, Kind::Gauge, description)
}

const fn seconds(name: &'static str, description: &'static str) -> Prometheus {
    prometheus(name, Kind::Histogram, description)
}

const fn short(name: &'static str, description: &'static str) -> Prometheus {
    Prometheus { is_short: true, ..seconds(name, description) }
}

const fn by(label: &'static str, metric: Prometheus) -> Prometheus {
    Prometheus { label: Some(label), ..metric }
}

/// Every metric of `/metrics`.
pub const PROMETHEUS: &[Prometheus] = &[
    counter("lego_capture_appends_total", "Appends made durable: the records of a call that ended together."),
    counter("lego_capture_commits_total", "Group commits: one sync to disk each."),
    counter("lego_capture_bytes_total", "Bytes written to the journal."),
    counter("lego_capture_failed_commits_total", "Group commits that failed."),
    counter(
        "lego_capture_damaged_bytes_total",
        "Bytes of the journal that held acknowledged calls and could not be read: the disk changed them.",
    ),
    counter("lego_capture_parquet_files_total", "Parquet files made of segments of the journal."),
    counter(
        "lego_capture_merged_files_total",
        "Small Parquet files that the writer put together into larger ones.",
    ),
    gauge(
        "lego_capture_folder_bytes",
        "Bytes of all files in the capture folder: proxy.capture_alarm_bytes and proxy.capture_max_bytes are for them. \
         What other processes change is seen within half a minute.",
    ),
    gauge(
        "lego_capture_disk_free_bytes",
        "Bytes that the disk of the capture folder has left: proxy.capture_min_free_bytes is for them.",
    ),
    counter("lego_capture_uploads_total", "Parquet files put into object storage."),
    counter("lego_capture_uploaded_bytes_total", "Their bytes."),
    counter("lego_capture_failed_uploads_total", "Tries that failed; the file stays and is tried again."),
    gauge("lego_capture_waiting_files", "Parquet files on this machine that are not in object storage yet."),
    gauge("lego_capture_waiting_bytes", "Their bytes."),
    short("lego_capture_fsync_seconds", "Time of a sync of the journal to disk, drafts included."),
    short(
        "lego_capture_lag_seconds",
        "From the end of a call, or of a choice, to its records being durable.",
    ),
    by(
        "reason",
        counter(
            "lego_trainer_lineage_breaks_total",
            "Calls of trials that do not extend the call whose history they have (docs/lineages.md).",
        ),
    ),
    by("status", counter("lego_proxy_calls_total", "Model calls that ended, attempts counted each.")),
    by(
        "route, status",
        counter(
            "lego_proxy_route_calls_total",
            "The same of the calls of proxy.routes, by the route's configured name.",
        ),
    ),
    by("status", counter("lego_proxy_records_total", "Records made durable: one a choice.")),
    by(
        "reason",
        counter(
            "lego_proxy_not_trainable_total",
            "Records made durable that are not trainable. One with several reasons counts in each.",
        ),
    ),
    counter("lego_proxy_captured_tokens_total", "Sampled tokens made durable."),
    by(
        "rows",
        counter(
            "lego_capture_routing_rows_total",
            "Rows of expert routing of records: `stored`; `held_already`, by an earlier call of the session, and not \
             stored again; `routed_otherwise` than an earlier call stored it, and stored (they count twice); `not_told` \
             by an engine that was asked for a stream since its streams have them. Of replies that went on after they were \
             given up: `resumed_otherwise`, which a later part routed otherwise than the part that read them first, whose \
             rows are stored; `resumed_lost`, which are not stored, since a part did not tell its rows, or came before \
             one that did not.",
        ),
    ),
    counter("lego_proxy_capture_failures_total", "Appends that failed: the calls' clients got an error."),
    by(
        "code",
        counter("lego_proxy_refused_total", "Calls refused before they went upstream, by error code."),
    ),
    by(
        "prompt",
        counter(
            "lego_proxy_token_in_calls_total",
            "Calls of the token-in relay, by what their prompt is: `extended`, an earlier call's prompt and reply with \
             new messages behind them; else rendered anew: `first` of its session, `other_conversation`, \
             `tools_changed`, `system_changed`, `message_changed`, `repeated` (nothing new was said), \
             `template_not_incremental`, `template_exact` (as configured); `in_chat`, asked in chat's words since ids \
             cannot stand for all of the request.",
        ),
    ),
    counter(
        "lego_proxy_resumed_replies_total",
        "Replies of the token-in relay that went on after their upstream gave them up, or after `/admin/pause` \
         interrupted them.",
    ),
    counter("lego_proxy_rejoined_total", "Clients that came back for the reply of the call that they left."),
    counter("lego_proxy_sessions_expired_total", "Sessions that were ended for being idle."),
    gauge("lego_proxy_calls_without_client", "Model calls that run on after their clients left."),
    counter("lego_proxy_retries_total", "Attempts that were followed by another."),
    gauge("lego_proxy_calls_in_flight", "Model calls sent upstream whose reply has not ended."),
    by(
        "reason",
        gauge(
            "lego_proxy_calls_waiting",
            "Model calls that wait to be sent: `pause`, until `/admin/resume`; `place`, for one of \
             `proxy.max_in_flight` or for their route's limits.",
        ),
    ),
    gauge("lego_proxy_open_streams", "Streams that clients have open, de-streamed ones included."),
    gauge(
        "lego_proxy_buffered_bytes",
        "Bytes of replies that are in memory: incomplete events, what waits to be durable, copies until their record \
         is durable, bodies being read.",
    ),
    gauge(
        "lego_proxy_spilled_bytes",
        "Bytes of replies that wait for their record in the nameless file of the folder of the capture.",
    ),
    gauge("lego_proxy_paused", "1 while calls are held back by `/admin/pause`."),
    seconds("lego_proxy_call_seconds", "Time of a model call, receipt to end."),
    seconds("lego_proxy_ttft_seconds", "From a call's receipt to the first event of its upstream's stream."),
    short(
        "lego_proxy_inter_token_seconds",
        "Between an event of an upstream's stream and the next, as they came.",
    ),
    by(
        "side",
        short(
            "lego_proxy_added_seconds",
            "What lego adds: `request`, from a call's receipt to its sending (its body's arrival and the wait for \
             admission included); `reply`, from a piece's receipt to its way to the client (the wait to be durable \
             included).",
        ),
    ),
];

/// `docs/metrics.md`.
#[must_use]
pub fn reference_markdown() -> String {
    let mut out = String::from(INTRODUCTION);
    let mut group = "";
    for column in COLUMNS {
        if column.group != group {
            group = column.group;
            let _ = write!(out, "\n### {group}\n\n| column | type | what it is |\n|---|---|---|\n");
        }
        let kind = if column.kind == Kind::Integer { "int64" } else { "float64" };
        let _ = writeln!(out, "| `{}` | {kind} | {} |", column.name, column.description);
    }
    out.push_str("\n## `/metrics`\n\nPrometheus text format, served by the proxy.\n\n");
    out.push_str(
        "Labels are words of lego's own: never a session, a model or anything else that a client chose.\n\n",
    );
    out.push_str("| metric | type | label | what it is |\n|---|---|---|---|\n");
    for metric in PROMETHEUS {
        let kind = format!("{:?}", metric.kind).to_lowercase();
        let label = metric.label.map_or_else(String::new, |label| format!("`{label}`"));
        let _ = writeln!(out, "| `{}` | {kind} | {label} | {} |", metric.name, metric.description);
    }
    out
}

const INTRODUCTION: &str = "\
# Metrics

Generated by `lego config docs --metrics` from `src/telemetry/catalog.rs`.

## `metrics.parquet`

One row for each optimizer step, in the run folder; the same numbers are TensorBoard curves under
`tensorboard/`, named `group/column`. A value that does not exist is null, never 0. The file is replaced as a
whole after each step, so it can be read at any time, and after a kill:

```
python3 -c \"import duckdb; print(duckdb.sql(\\\"select step, solve_rate, loss from 'runs/NAME/metrics.parquet'\\\"))\"
tensorboard --logdir runs/NAME/tensorboard
```

Two runs with the same seed have equal values in every column except those of `time` and `throughput`.
First comes `step` (int64, never null): the number of optimizer steps taken, from 1. With several optimizer steps a
policy version, groups `trials`, `lengths`, `throughput`, `time` and all of `tokens` but `trained_tokens` are of the
version, the same in each of its rows: `sampled_tokens` is the sum of the other token columns and the `trained_tokens`
of all its rows.
";
