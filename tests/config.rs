//! The three config files, seen from outside.

use std::path::{Path, PathBuf};

use lego::config::{
    Config, ConfigError, ConfigPaths, Environment, FileKind, HarnessType, Origin, UpstreamKind, Use,
    reference_markdown,
};
use serde_json::json;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn environment(variables: &[(&str, &str)]) -> Environment {
    variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Loads one file with this text.
fn load(kind: FileKind, text: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join(kind.file_name());
    std::fs::write(&path, text).expect("written");
    Config::load(&ConfigPaths::default().with(kind, path), environment(variables))
}

fn message(kind: FileKind, text: &str) -> String {
    load(kind, text, &[]).expect_err("refused").to_string()
}

#[test]
fn the_three_files_at_the_top_level_are_ready_to_train() {
    let config = Config::load(&ConfigPaths::in_folder(root()), Environment::default()).expect("valid");
    config.refuse_unsupported(Use::Train).expect("nothing is refused");
    assert!(config.notes(Use::Train).iter().all(|note| !note.was_set));
    assert!(config.proxy.is_embedded());
    assert_eq!(config.harness.r#type, HarnessType::Mini);
    assert_eq!(config.sandbox.image, "host");
}

#[test]
fn absent_keys_have_the_documented_defaults() {
    let config = Config::defaults(Environment::default()).expect("valid");
    let (proxy, sandbox, training) = (&config.proxy, &config.sandbox, &config.training);
    assert_eq!((proxy.listen_host.addresses(), proxy.listen_port), (&["127.0.0.1".to_owned()][..], 18080));
    assert!(proxy.capture_token_ids && proxy.capture_logprobs && proxy.capture_expert_routing);
    assert!(proxy.history_rewrite_tolerance);
    assert_eq!(proxy.capture_dir, PathBuf::from("./captures"));
    assert_eq!(config.harness.r#type, HarnessType::Openhands);
    assert_eq!(sandbox.max_concurrent, 32);
    assert_eq!(sandbox.hidden_test_mount, PathBuf::from("/opt/hidden_tests"));
    assert!(sandbox.termination_aware_filter);
    assert_eq!(sandbox.cache.cache_ttl_hours, 72);
    assert_eq!(
        (training.batch_size, training.rollout_batch_size, training.group_size, training.max_turns),
        (64, 256, 8, 30)
    );
    assert_eq!((training.learning_rate, training.kl_coef, training.clip_range), (1e-6, 0.01, 0.2));
    assert_eq!((training.r#async.max_staleness, training.r#async.long_tail_timeout_sec), (2, 600));
}

#[test]
fn files_as_people_publish_them_are_accepted_and_a_run_names_what_it_refuses() {
    let paths = ConfigPaths::in_folder(&root().join("docs/examples/lego-rl"));
    assert!(paths.proxy.is_some() && paths.sandbox.is_some() && paths.train.is_some());
    let config = Config::load(&paths, Environment::default()).expect("accepted");
    let refusal = config.refuse_unsupported(Use::Train).expect_err("refused").to_string();
    for key in ["harness.type", "sandbox.image", "training.async.enable", "policy.upstream"] {
        assert!(refusal.contains(key), "{key} in {refusal}");
    }
}

#[test]
fn an_upstream_without_token_ids_is_refused_by_the_trainer_naming_the_key() {
    let text = r#"{"proxy": {"upstream_base_url": "https://api.example.com/v1", "upstream_kind": "openai"}}"#;
    let messages = load(FileKind::Proxy, &text.replace("openai", "anthropic"), &[]).expect("accepted");
    let refusal = messages.refuse_unsupported(Use::Train).expect_err("refused").to_string();
    assert!(refusal.contains("token ids"), "{refusal}");
    let config = load(FileKind::Proxy, text, &[]).expect("accepted");
    let refusal = config.refuse_unsupported(Use::Train).expect_err("refused").to_string();
    assert!(refusal.contains("proxy.upstream_kind = \"openai\""), "{refusal}");
    assert!(refusal.contains("token ids"), "{refusal}");
    config.refuse_unsupported(Use::Proxy).expect("the proxy alone serves it");
}

#[test]
fn sampling_that_cannot_be_pinned_is_refused() {
    let text = r#"{"proxy": {"upstream_base_url": "https://api.example.com", "upstream_kind": "anthropic",
        "pinned_sampling": {"temperature": 1.0}}}"#;
    let config = load(FileKind::Proxy, text, &[]).expect("accepted");
    let refusal = config.refuse_unsupported(Use::Proxy).expect_err("refused").to_string();
    assert!(refusal.contains("proxy.pinned_sampling") && refusal.contains("Messages"), "{refusal}");
    let refusal = config.refuse_unsupported(Use::Eval).expect_err("refused").to_string();
    assert!(refusal.contains("proxy.upstream_kind"), "{refusal}");
    let other = load(FileKind::Proxy, &text.replace("anthropic", "openai"), &[]).expect("accepted");
    other.refuse_unsupported(Use::Proxy).expect("a chat server takes it");
}

#[test]
fn a_misspelt_key_is_an_error_with_its_nearest_name() {
    let text = message(FileKind::Train, "[training]\nlearning_rat = 1e-4\n");
    assert!(text.contains("train.toml: training.learning_rat: unknown key"), "{text}");
    assert!(text.contains("Did you mean learning_rate?"), "{text}");
    let text = message(FileKind::Train, "seed = 1\n[training]\n");
    assert!(text.contains("That key is training.seed."), "{text}");
    let text = message(FileKind::Sandbox, "[sandbox]\nkl_coef = 0.1\n");
    assert!(text.contains("That key is training.kl_coef, in train.toml."), "{text}");
    let text = message(FileKind::Sandbox, "[training]\nkl_coef = 0.1\n");
    assert!(text.contains("belongs in train.toml"), "{text}");
    let text = message(FileKind::Proxy, r#"{"proxy": {"upstream_api_key": "sk-123"}}"#);
    assert!(text.contains("Did you mean upstream_api_key_env?"), "{text}");
    assert!(!text.contains("sk-123"), "{text}");
}

#[test]
fn a_wrong_type_names_file_key_value_and_remedy() {
    let text = message(FileKind::Train, "[training]\nbatch_size = \"many\"\n");
    assert!(text.contains("train.toml: training.batch_size = \"many\": expected whole number"), "{text}");
    let text = message(FileKind::Train, "[training]\nbetas = [0.9]\n");
    assert!(text.contains("training.betas"), "{text}");
    let text = message(FileKind::Proxy, r#"{"proxy": {"listen_port": 99999}}"#);
    assert!(text.contains("proxy.listen_port = 99999: expected whole number, 0 to 65535"), "{text}");
    let text = message(FileKind::Train, "[training]\nalgorithm = \"grp\"\n");
    assert!(text.contains("Did you mean \"grpo\"?"), "{text}");
    let text = message(FileKind::Train, "[training.async]\nenable = 1\n");
    assert!(text.contains("training.async.enable = 1: expected `true` or `false`"), "{text}");
    let text = message(FileKind::Train, "training = 3\n");
    assert!(text.contains("training = 3: expected table"), "{text}");
    let text = message(FileKind::Train, "[training]\nlearning_rate = nan\n");
    assert!(text.contains("training.learning_rate"), "{text}");
}

#[test]
fn batches_that_do_not_divide_each_other_are_refused() {
    let text = message(FileKind::Train, "[training]\ngroup_size = 8\nbatch_size = 60\n");
    assert!(text.contains("training.batch_size = 60: training.group_size = 8 does not divide it"), "{text}");
    let text = message(FileKind::Train, "[training]\nbatch_size = 64\nrollout_batch_size = 100\n");
    assert!(text.contains("training.rollout_batch_size = 100"), "{text}");
    let text = message(FileKind::Train, "[training]\nbatch_size = 0\n");
    assert!(text.contains("training.batch_size = 0"), "{text}");
}

#[test]
fn impossible_values_are_refused_together() {
    let lines = "clip_range = 2.0\nlearning_rate = 0.0\nmax_turns = 0\n[training.observability]\ntrace_sample_rate = -1.0";
    let text = message(FileKind::Train, &format!("[training]\n{lines}\n"));
    for key in ["clip_range = 2.0", "learning_rate = 0.0", "max_turns = 0", "trace_sample_rate = -1.0"] {
        assert!(text.contains(key), "{key} in {text}");
    }
    let text = message(FileKind::Train, "[training]\nthreads = 100000\ndataset = \"\"\n");
    assert!(
        text.contains("threads = 100000: more than") && text.contains("dataset = \"\": an empty path"),
        "{text}"
    );
    let text = message(FileKind::Sandbox, "[sandbox]\nmemory_mb = 5\n");
    assert!(text.contains("memory_mb = 5") && text.contains("32 or more"), "{text}");
    let text = message(FileKind::Proxy, r#"{"proxy": {"listen_host": "0.0.0.0", "large_bodies_bytes": 5}}"#);
    assert!(text.contains("client_token_env") && text.contains("large_bodies_bytes = 5"), "{text}");
    let text = message(FileKind::Proxy, r#"{"proxy": {"upstream_base_url": "localhost:8000"}}"#);
    assert!(text.contains("neither embedded nor an http(s) URL"), "{text}");
    let text = message(
        FileKind::Proxy,
        r#"{"proxy": {"upstream_base_url": "http://h:8000", "upstream_ca_file": "ca.pem", "upstream_responses": "pass_through", "routing_top_k": 0}}"#,
    );
    for part in ["proxy.upstream_ca_file", "not an https URL", "upstream_responses", "proxy.routing_top_k"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn broken_syntax_names_the_place() {
    let text = message(FileKind::Train, "[training]\nbatch_size = = 3\n");
    assert!(text.contains("train.toml: ") && text.contains("line 2"), "{text}");
    let text = message(FileKind::Proxy, "{\"proxy\": {,}}");
    assert!(text.contains("proxy_config.json: ") && text.contains("line 1 column 12"), "{text}");
    let twice = r#"{"proxy": {"listen_port": 1, "capture_dir": "c", "listen_port": 2}}"#;
    let text = message(FileKind::Proxy, twice);
    assert!(text.contains("the key listen_port is there twice") && text.contains("line 1"), "{text}");
    let paths = ConfigPaths::default().with(FileKind::Train, PathBuf::from("/nowhere/train.toml"));
    let text = Config::load(&paths, Environment::default()).expect_err("refused").to_string();
    assert!(text.contains("/nowhere/train.toml: cannot read"), "{text}");
}

#[test]
fn secrets_come_from_the_environment_and_are_never_shown() {
    let text = r#"{"proxy": {"upstream_base_url": "http://${HOST_PART}:8000", "listen_port": "${PORT}",
        "upstream_api_key_env": "MY_KEY"}}"#;
    let variables = [("HOST_PART", "s3cr3t-host"), ("PORT", "1234"), ("MY_KEY", "sk-s3cr3t")];
    let config = load(FileKind::Proxy, text, &variables).expect("valid");
    assert_eq!(config.proxy.upstream_base_url, "http://s3cr3t-host:8000");
    assert_eq!(config.proxy.listen_port, 1234);
    let key = config.upstream_api_key().expect("set").expect("named");
    assert_eq!(key.expose(), "sk-s3cr3t");
    let shown = format!("{:?} {} {key:?}", config.entries(), config.to_resolved_toml());
    assert!(!shown.contains("s3cr3t"), "{shown}");
    assert!(shown.contains("${HOST_PART}"), "{shown}");

    let refusal = load(FileKind::Proxy, text, &variables[1..]).expect_err("refused").to_string();
    assert!(
        refusal.contains("proxy.upstream_base_url: environment variable HOST_PART is not set"),
        "{refusal}"
    );
    let refusal = load(FileKind::Proxy, text, &[("HOST_PART", "h"), ("PORT", "s3cr3t")]);
    let refusal = refusal.expect_err("refused").to_string();
    assert!(!refusal.contains("s3cr3t") && refusal.contains("proxy.listen_port"), "{refusal}");
    let config = load(FileKind::Proxy, text, &variables[..2]).expect("valid");
    let refusal = config.upstream_api_key().expect_err("refused").to_string();
    assert!(refusal.contains("environment variable MY_KEY is not set"), "{refusal}");
    let refusal = message(FileKind::Proxy, r#"{"proxy": {"upstream_api_key_env": "sk-s3cr3t"}}"#);
    assert!(refusal.contains("upstream_api_key_env") && !refusal.contains("s3cr3t"), "{refusal}");
    let refusal = message(FileKind::Proxy, r#"{"proxy": {"upstream_base_url": "http://me:s3cr3t@h/v1"}}"#);
    assert!(!refusal.contains("s3cr3t"), "{refusal}");
}

#[test]
fn overrides_are_applied_and_their_origin_is_known() {
    let variables = [("LEGO_RL_SANDBOX_IMAGE", "img:1"), ("LEGO_RL_LOG_DIR", "/var/log/lego")];
    let text = "[training]\nseed = 5\n[policy]\nupstream = \"vllm\"\nbase_url = \"http://h:1/v1\"\n";
    let config = load(FileKind::Train, text, &variables).expect("valid");
    assert_eq!(config.sandbox.image, "img:1");
    assert_eq!(config.origin("sandbox.image"), Origin::Env("LEGO_RL_SANDBOX_IMAGE".to_owned()));
    assert_eq!(config.training.observability.log_dir, PathBuf::from("/var/log/lego"));
    assert_eq!(config.proxy.upstream_base_url, "http://h:1/v1");
    assert_eq!(config.proxy.upstream_kind, UpstreamKind::Vllm);
    let origin = config.origin("proxy.upstream_base_url").to_string();
    assert!(origin.contains("train.toml, policy.base_url"), "{origin}");
    assert!(matches!(config.origin("training.seed"), Origin::File(_)));
    assert_eq!(config.origin("training.max_turns"), Origin::Default);

    let config = config.set("training.seed", json!(9), "--seed").expect("valid");
    assert_eq!(config.training.seed, 9);
    assert_eq!(config.origin("training.seed"), Origin::Flag("--seed".to_owned()));
    let refusal = config.set("training.max_steps", json!(0), "--max-steps").expect_err("refused").to_string();
    assert!(refusal.contains("--max-steps: training.max_steps = 0"), "{refusal}");

    let text = "[policy]\nupstream = \"vllm\"\n";
    let refusal = message(FileKind::Train, text);
    assert!(refusal.contains("policy.base_url"), "{refusal}");
}

#[test]
fn the_resolved_file_gives_the_same_values_back() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut config = Config::load(&ConfigPaths::in_folder(root()), Environment::default()).expect("valid");
    let path = folder.path().join("config.resolved.toml");
    std::fs::write(&path, config.to_resolved_toml()).expect("written");
    let again = Config::load_resolved(&path, Environment::default()).expect("valid");
    assert_eq!(again.to_resolved_toml(), config.to_resolved_toml());
    // It is read from any folder.
    let models = [Some(&mut config.proxy.model_path), config.policy.model_path.as_mut()];
    for path in models.into_iter().chain([config.training.dataset.as_mut()]).flatten() {
        assert!(path.is_relative(), "{path:?}");
        *path = std::path::absolute(&*path).expect("a folder to be in");
    }
    assert_eq!((&again.proxy, &again.harness), (&config.proxy, &config.harness));
    assert_eq!((&again.sandbox, &again.training), (&config.sandbox, &config.training));
    assert_eq!(again.policy, config.policy);
}

#[test]
fn the_reference_is_up_to_date() {
    let committed = std::fs::read_to_string(root().join("docs/configuration.md")).expect("committed");
    let generated = reference_markdown().expect("defaults are valid");
    assert!(committed == generated, "run: cargo run -- config docs > docs/configuration.md");
    for key in ["learning_rate", "termination_aware_filter", "commit_wait_ms", "long_tail_timeout_sec"] {
        assert!(generated.contains(&format!("| `{key}` |")), "{key}");
    }
}

const ROUTES: &str = r#"{"proxy": {
    "upstream_base_url": "http://main:1", "upstream_kind": "sglang", "upstream_api_key_env": "MAIN_KEY",
    "idle_timeout_secs": 7, "routes": {
        "alias": {"models": ["gpt-4.1", "claude-3.5"], "upstream_model": "m"},
        "judge": {"upstream_base_url": "http://${JUDGE_HOST}:2", "kind": "judge", "requests_per_minute": "${RPM}"},
        "plain": {},
        "slow": {"upstream_api_key_env": "SLOW_KEY", "idle_timeout_secs": 9}
    }}}"#;

#[test]
fn a_route_has_the_proxys_values_where_it_gives_none_but_never_another_servers_key() {
    let variables = [("JUDGE_HOST", "s3cr3t-host"), ("RPM", "30"), ("MAIN_KEY", "k1")];
    let config = load(FileKind::Proxy, ROUTES, &variables).expect("valid");
    let routes = &config.proxy.routes;
    let server = |name: &str| config.proxy.server_of(name, &routes[name]);
    let alias = server("alias");
    assert_eq!((alias.base_url.as_str(), alias.kind), ("http://main:1", UpstreamKind::Sglang));
    assert!(!routes["alias"].has_own_server() && !routes["plain"].has_own_server());
    assert_eq!(routes["plain"].model_names("plain"), ["plain"]);
    assert_eq!(routes["judge"].requests_per_minute, Some(30));
    let judge = server("judge");
    assert_eq!((judge.base_url.as_str(), judge.kind), ("http://s3cr3t-host:2", UpstreamKind::Auto));
    assert_eq!((judge.api_key_env, judge.idle_timeout.as_secs()), (None, 7));
    let slow = server("slow");
    assert_eq!((slow.base_url.as_str(), slow.idle_timeout.as_secs()), ("http://main:1", 9));
    let error = config.server_key(&slow).expect_err("not set").to_string();
    assert!(
        error.contains("proxy.routes.slow.upstream_api_key_env: environment variable SLOW_KEY"),
        "{error}"
    );
    assert_eq!(config.servers().len(), 3, "the default, judge and slow");
    assert!(config.has_default_route());

    let shown = format!("{:?} {}", config.entries(), config.to_resolved_toml());
    assert!(!shown.contains("s3cr3t") && shown.contains("${JUDGE_HOST}"), "{shown}");
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("config.resolved.toml");
    std::fs::write(&path, config.to_resolved_toml()).expect("written");
    let again = Config::load_resolved(&path, environment(&variables)).expect("valid");
    let mut proxy = config.proxy;
    proxy.model_path = std::path::absolute(&proxy.model_path).expect("a folder to be in");
    assert_eq!(again.proxy, proxy);
}

#[test]
fn without_an_upstream_of_its_own_the_proxy_serves_its_routes_only() {
    let only = r#"{"proxy": {"routes": {"judge": {"upstream_base_url": "http://h:1"}}}}"#;
    let config = load(FileKind::Proxy, only, &[]).expect("valid");
    assert!(!config.has_default_route());
    assert!(config.embedded_models().is_empty(), "no engine is started");
    let config = config.set("proxy.upstream_base_url", json!("http://h:2"), "--upstream").expect("valid");
    assert!(config.has_default_route());
    assert!(Config::defaults(Environment::default()).expect("valid").has_default_route());
}

#[test]
fn an_empty_table_is_not_an_absent_one() {
    let config = load(FileKind::Proxy, r#"{"proxy": {"pinned_sampling": {}}}"#, &[]).expect("valid");
    assert_eq!(config.proxy.pinned_sampling.expect("pinned").temperature, 1.0);
    assert!(Config::defaults(Environment::default()).expect("valid").proxy.pinned_sampling.is_none());
    assert_eq!(load(FileKind::Train, "[training.async]\n", &[]).expect("valid").training.seed, 1);
}

#[test]
fn routes_that_cannot_be_are_refused_naming_the_key() {
    let with = |routes: &str| message(FileKind::Proxy, &format!(r#"{{"proxy": {{"routes": {routes}}}}}"#));
    for (routes, parts) in [
        (r#"{"a": {"modle": []}}"#, vec!["proxy.routes.a.modle: unknown key", "Did you mean models?"]),
        (r#"{"a": {"kind": "juge"}}"#, vec!["proxy.routes.a.kind = \"juge\"", "Did you mean \"judge\"?"]),
        (r#"{"gpt-4.1": {}}"#, vec!["proxy.routes = \"gpt-4.1\"", "letters, digits"]),
        (r#"{"a": 3}"#, vec!["proxy.routes.a = 3"]),
        (r#"{"a": {"models": []}}"#, vec!["proxy.routes.a.models", "no model name"]),
        (
            r#"{"a": {"models": ["m"]}, "m": {}}"#,
            vec!["proxy.routes.m.models", "also a model of the route a"],
        ),
        (r#"{"a": {"max_concurrent": 0}}"#, vec!["proxy.routes.a.max_concurrent = 0"]),
        (r#"{"a": {"requests_per_second": 0}}"#, vec!["proxy.routes.a.requests_per_second = 0"]),
        (r#"{"a": {"upstream_base_url": "h:1"}}"#, vec!["proxy.routes.a.upstream_base_url", "http(s) URL"]),
        (r#"{"a": {"upstream_kind": "vllm"}}"#, vec!["proxy.routes.a.upstream_kind", "the embedded engine"]),
        (
            r#"{"a": {"pinned_sampling": {"temperature": -1}}}"#,
            vec!["proxy.routes.a.pinned_sampling.temperature"],
        ),
    ] {
        let text = with(routes);
        assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} in {text}");
    }
    for routes in [
        r#"{"a": {"upstream_base_url": "http://h:1", "upstream_api_key_env": "sk-s3cr3t"}}"#,
        r#"{"a": {"upstream_base_url": "http://me:s3cr3t@h:1"}}"#,
    ] {
        let text = with(routes);
        assert!(text.contains("proxy.routes.a.upstream_") && !text.contains("s3cr3t"), "{text}");
    }
    for (rule, part) in [
        (r#"{"pattern": "("}"#, "not a regular expression"),
        (r#"{"pattern": "a*"}"#, "an empty text"),
        ("{}", "an empty text"),
    ] {
        let text = message(
            FileKind::Proxy,
            &format!(r#"{{"proxy": {{"volatile": {{"rules": {{"date": {rule}}}}}}}}}"#),
        );
        assert!(text.contains("proxy.volatile.rules.date.pattern") && text.contains(part), "{text}");
    }
}

#[test]
fn a_trainers_routes_are_not_the_policys() {
    let refusal = |route: &str| {
        let text = format!(r#"{{"proxy": {{"routes": {{"a": {route}}}}}, "harness": {{"type": "mini"}}}}"#);
        let config = load(FileKind::Proxy, &text, &[]).expect("accepted");
        config.refuse_unsupported(Use::Train).err().map(|error| error.to_string()).unwrap_or_default()
    };
    for route in ["{}", r#"{"kind": "policy"}"#] {
        assert!(refusal(route).contains("proxy.routes.a.kind"), "{}", refusal(route));
    }
    assert!(!refusal(r#"{"kind": "aux", "upstream_base_url": "http://h:1"}"#).contains("proxy.routes"));
    let engine = r#"{"kind": "teacher", "model_path": "models/other"}"#;
    assert!(refusal(engine).contains("proxy.routes.a.upstream_base_url"), "{}", refusal(engine));
    let messages =
        r#"{"upstream_base_url": "http://h:1", "upstream_kind": "anthropic", "pinned_sampling": {}}"#;
    assert!(refusal(messages).contains("proxy.routes.a.upstream_kind"), "{}", refusal(messages));
}

#[test]
fn a_default_that_is_refused_is_not_blamed_on_a_file_that_does_not_set_it() {
    let defaults = Config::defaults(Environment::default()).expect("valid");
    let error = defaults.refuse_unsupported(Use::Train).expect_err("refused").to_string();
    let part = "proxy_config.json (no such file, so the default holds): harness.type = \"openhands\"";
    assert!(error.contains(part), "{error}");
    let unset = load(FileKind::Proxy, r#"{"proxy": {"listen_port": 1}}"#, &[]).expect("valid");
    let error = unset.refuse_unsupported(Use::Train).expect_err("refused").to_string();
    let part = "proxy_config.json (does not set it, so the default holds): harness.type";
    assert!(error.contains(part), "{error}");
    let set = load(FileKind::Proxy, r#"{"harness": {"type": "codex"}}"#, &[]).expect("valid");
    let error = set.refuse_unsupported(Use::Train).expect_err("refused").to_string();
    assert!(error.contains("proxy_config.json: harness.type = \"codex\""), "{error}");
}

#[test]
fn a_routes_local_tokenizer_is_that_of_the_proxy_only_at_the_proxys_server() {
    let text = r#"{"proxy": {"upstream_base_url": "http://h:1", "local_tokenizer": "base", "routes": {
        "same": {"upstream_model": "m"}, "own": {"local_tokenizer": "mine"}, "far": {"upstream_base_url": "http://o:1"}}}}"#;
    let config = load(FileKind::Proxy, text, &[]).expect("valid");
    let of = |name: &str| {
        let found = config.proxy.routes[name].local_tokenizer(name, &config.proxy);
        found.map(|(key, folder)| (key, folder.to_owned()))
    };
    assert_eq!(of("same"), Some(("proxy.local_tokenizer".to_owned(), PathBuf::from("base"))));
    assert_eq!(of("own"), Some(("proxy.routes.own.local_tokenizer".to_owned(), PathBuf::from("mine"))));
    assert_eq!(of("far"), None);
    let entries = config.entries();
    let origin = |key: &str| entries.iter().find(|(path, ..)| path == key).expect("shown").2.clone();
    assert_eq!(
        origin("proxy.routes.same.local_tokenizer"),
        Origin::Inherited("proxy.local_tokenizer".to_owned())
    );
    assert_eq!(origin("proxy.routes.far.local_tokenizer"), Origin::Default);
}

#[test]
fn places_inside_a_sandbox_that_cannot_be_are_refused() {
    for place in [
        "relative",
        "/",
        "/workspace",
        "/workspace/tests",
        "/usr/x",
        "/opt",
        "/opt/lego",
        "/opt/lego/runner.py",
        "/tmp",
        "/tmp/t",
        "/etc/x",
        "/a/../etc",
        "/proc/self",
        "/dev/shm",
        "/lib64/x",
    ] {
        let text = format!("[sandbox]\nhidden_test_mount = {place:?}\n");
        let refusal = message(FileKind::Sandbox, &text);
        for part in ["sandbox.hidden_test_mount", place, "such as /opt/hidden_tests"] {
            assert!(refusal.contains(part), "{place}: {refusal}");
        }
    }
    for place in ["/opt/hidden_tests", "/opt/legos", "/hidden", "/tmpx/t", "/srv/a/b"] {
        let text = format!("[sandbox]\nhidden_test_mount = {place:?}\n");
        load(FileKind::Sandbox, &text, &[]).expect(place);
    }
    for place in ["/workspace", "/tmp/x", "/", "/dev/shm", "usr", "/usr/../tmp"] {
        let text = format!("[sandbox.defense]\nreadonly_system_paths = [\"/usr\", {place:?}]\n");
        let refusal = message(FileKind::Sandbox, &text);
        for part in ["sandbox.defense.readonly_system_paths", place, "set the key to true"] {
            assert!(refusal.contains(part), "{place}: {refusal}");
        }
    }
    let text = "[sandbox.defense]\nreadonly_system_paths = [\"/usr\", \"/etc\", \"/bin\"]\n";
    load(FileKind::Sandbox, text, &[]).expect("system folders");
}

#[test]
fn a_harness_is_given_its_settings_and_only_the_address_that_is_there() {
    let config = |harness: serde_json::Value, port: u16| {
        let text = json!({"proxy": {"listen_port": port}, "harness": harness}).to_string();
        load(FileKind::Proxy, &text, &[]).expect("valid")
    };
    let with = |url: &str| {
        json!({"type": "codex", "command": ["x"],
               "llm_config_override": {"base_url": url, "model": "m", "auth_type": "api_key"}})
    };
    // The listener inside is where it is, whatever port lego's own has outside.
    for port in [18080, 9000] {
        for url in ["http://127.0.0.1:18080/v1", "http://127.0.0.1:18080", "http://localhost:18080/v1/"] {
            let notes = config(with(url), port).notes(Use::Eval);
            let about = |key: &str| notes.iter().any(|note| note.key.starts_with(key));
            assert!(!about("harness."), "{url} with listen_port {port}: {notes:?}");
        }
        let refusal = config(with("http://127.0.0.1:9000/v1"), port).refuse_unsupported(Use::Eval);
        let refusal = refusal.expect_err("refused").to_string();
        assert!(
            refusal.contains("llm_config_override.base_url") && refusal.contains(":18080/v1"),
            "{refusal}"
        );
    }
    let mini = json!({"type": "mini", "llm_config_override": {"auth_type": "api_key"}});
    let notes = config(mini, 18080).notes(Use::Eval);
    assert!(notes.iter().any(|note| note.key.ends_with("auth_type") && !note.is_refused), "{notes:?}");
}
