//! The three files together: effective values, and where each came from.

use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::layers::{Layers, at, insert, one_or_several};
use super::read::{nearest, read};
use super::schema::{ANY_NAME, Schema};
use super::{ConfigError, Environment, Harness, Policy, Proxy, Sandbox, Secret, Training};

/// Environment variables that override a key.
const OVERRIDES: [(&str, &str); 2] =
    [("LEGO_RL_SANDBOX_IMAGE", "sandbox.image"), ("LEGO_RL_LOG_DIR", "training.observability.log_dir")];

/// One of the three files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileKind {
    Proxy,
    Sandbox,
    Train,
}

impl FileKind {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Proxy, Self::Sandbox, Self::Train];

    /// Its usual name.
    #[must_use]
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Proxy => "proxy_config.json",
            Self::Sandbox => "sandbox.toml",
            Self::Train => "train.toml",
        }
    }

    /// Its top-level tables.
    #[must_use]
    pub const fn tables(self) -> &'static [&'static str] {
        match self {
            Self::Proxy => &["proxy", "harness"],
            Self::Sandbox => &["sandbox"],
            Self::Train => &["training", "policy"],
        }
    }

    /// Which file this is: by its name, else by its tables.
    ///
    /// # Errors
    /// [`ConfigError`] when it cannot be read, or is none of the three.
    pub fn detect(path: &Path) -> Result<Self, ConfigError> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(kind) = Self::ALL.into_iter().find(|kind| kind.file_name() == name) {
            return Ok(kind);
        }
        let tree = read(path)?;
        Self::ALL
            .into_iter()
            .find(|kind| kind.tables().iter().any(|table| tree.contains_key(*table)))
            .ok_or_else(|| {
                let tables: Vec<_> = Self::ALL.iter().flat_map(|kind| kind.tables()).copied().collect();
                let has: Vec<_> = tree.keys().map(String::as_str).collect();
                let has = if has.is_empty() { "nothing".to_owned() } else { has.join(", ") };
                let cause = format!("none of the tables {} is in it, but {has}", tables.join(", "));
                ConfigError::Syntax { file: path.to_owned(), cause }
            })
    }

    /// The file that holds this key.
    #[must_use]
    pub fn of_key(key: &str) -> Option<Self> {
        let table = key.split('.').next().unwrap_or_default();
        Self::ALL.into_iter().find(|kind| kind.tables().contains(&table))
    }
}

/// Where the three files are. `None`: the defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigPaths {
    pub proxy: Option<PathBuf>,
    pub sandbox: Option<PathBuf>,
    pub train: Option<PathBuf>,
}

impl ConfigPaths {
    /// Those files that exist in a folder under their usual names.
    #[must_use]
    pub fn in_folder(folder: &Path) -> Self {
        let find = |kind: FileKind| Some(folder.join(kind.file_name())).filter(|path| path.exists());
        Self { proxy: find(FileKind::Proxy), sandbox: find(FileKind::Sandbox), train: find(FileKind::Train) }
    }

    /// The path given for a file.
    #[must_use]
    pub fn get(&self, kind: FileKind) -> Option<&Path> {
        match kind {
            FileKind::Proxy => self.proxy.as_deref(),
            FileKind::Sandbox => self.sandbox.as_deref(),
            FileKind::Train => self.train.as_deref(),
        }
    }

    /// The same paths with one more.
    #[must_use]
    pub fn with(mut self, kind: FileKind, path: PathBuf) -> Self {
        match kind {
            FileKind::Proxy => self.proxy = Some(path),
            FileKind::Sandbox => self.sandbox = Some(path),
            FileKind::Train => self.train = Some(path),
        }
        self
    }
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    Default,
    File(String),
    /// This environment variable.
    Env(String),
    /// A key of `[policy]`, in this file.
    Policy {
        file: String,
        key: String,
    },
    /// A command-line flag.
    Flag(String),
    /// A route's key that is absent: the value of this key of `proxy`.
    Inherited(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(file) => f.write_str(file),
            Self::Env(variable) => write!(f, "environment {variable}"),
            Self::Policy { file, key } => write!(f, "{file}, {key} (overrides proxy_config.json)"),
            Self::Flag(flag) => f.write_str(flag),
            Self::Inherited(key) => write!(f, "as {key}"),
        }
    }
}

/// All top-level tables of the three files.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Tables {
    proxy: Proxy,
    harness: Harness,
    sandbox: Sandbox,
    training: Training,
    policy: Policy,
}

/// Effective values of the three files, checked, and where each came from.
#[derive(Debug, Clone)]
pub struct Config {
    pub proxy: Proxy,
    pub harness: Harness,
    pub sandbox: Sandbox,
    pub training: Training,
    pub policy: Policy,
    layers: Layers,
    environment: Environment,
}

impl Config {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// [`ConfigError`]: everything that is wrong, not only the first.
    pub fn load(paths: &ConfigPaths, environment: Environment) -> Result<Self, ConfigError> {
        let schema = Schema::new();
        let mut layers = Layers::default();
        let mut errors = Vec::new();
        for kind in FileKind::ALL {
            let Some(path) = paths.get(kind) else {
                continue;
            };
            layers.files.insert(kind, path.display().to_string());
            match read(path) {
                Ok(tree) => layers.add_file(&schema, kind.tables(), path, tree, &environment, &mut errors),
                Err(error) => errors.push(error),
            }
        }
        Self::finish(&schema, layers, environment, errors)
    }

    /// Folder of the embedded policy.
    #[must_use]
    pub fn model_path(&self) -> &Path {
        self.policy.model_path.as_ref().unwrap_or(&self.proxy.model_path)
    }

    /// Reads a run's `config.resolved.toml`, as [`Config::to_resolved_toml`] wrote it.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_resolved(path: &Path, environment: Environment) -> Result<Self, ConfigError> {
        let schema = Schema::new();
        let mut layers = Layers { is_resolved: true, ..Layers::default() };
        let mut errors = Vec::new();
        for kind in FileKind::ALL {
            layers.files.insert(kind, path.display().to_string());
        }
        let tables: Vec<_> = FileKind::ALL.iter().flat_map(|kind| kind.tables()).copied().collect();
        layers.add_file(&schema, &tables, path, read(path)?, &environment, &mut errors);
        Self::finish(&schema, layers, environment, errors)
    }

    /// The defaults, as if no file were there.
    ///
    /// # Errors
    /// When an environment override has an impossible value.
    pub fn defaults(environment: Environment) -> Result<Self, ConfigError> {
        Self::load(&ConfigPaths::default(), environment)
    }

    /// Overrides one key by a command-line flag, and checks everything again.
    ///
    /// # Errors
    /// As [`Config::load`], naming the flag's value.
    pub fn set(self, key: &str, value: Value, flag: &str) -> Result<Self, ConfigError> {
        let Self { mut layers, environment, .. } = self;
        layers.set(key, value.clone(), value, Origin::Flag(flag.to_owned()));
        Self::finish(&Schema::new(), layers, environment, Vec::new())
    }

    fn finish(
        schema: &Schema,
        mut layers: Layers,
        environment: Environment,
        mut errors: Vec<ConfigError>,
    ) -> Result<Self, ConfigError> {
        for (variable, key) in OVERRIDES {
            let is_flag = matches!(layers.origins.get(key), Some(Origin::Flag(_)));
            if let Some(value) = environment.get(variable).filter(|_| !is_flag && !layers.is_resolved) {
                layers.set(key, value.into(), value.into(), Origin::Env(variable.to_owned()));
            }
        }
        layers.apply_policy();
        let tables = match layers.deserialize(schema) {
            Ok(tables) => tables,
            Err(error) => {
                errors.push(error);
                return Err(one_or_several(errors));
            }
        };
        let Tables { proxy, harness, sandbox, training, policy } = tables;
        let config = Self { proxy, harness, sandbox, training, policy, layers, environment };
        errors.extend(config.problems());
        if errors.is_empty() { Ok(config) } else { Err(one_or_several(errors)) }
    }

    /// Where the value of a key came from.
    #[must_use]
    pub fn origin(&self, key: &str) -> Origin {
        self.layers.origins.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// The file that a key belongs to, for messages.
    #[must_use]
    pub fn file(&self, key: &str) -> String {
        self.layers.file(key)
    }

    /// Every key with its value and origin. What came from `${VAR}` is shown as it was written.
    #[must_use]
    pub fn entries(&self) -> Vec<(String, Value, Origin)> {
        let tree = self.tables();
        let schema = Schema::new();
        let paths = schema.leaf_paths().into_iter().flat_map(|path| named(&tree, path));
        // A table of names is shown by what is in it.
        let is_shown = |path: &String| {
            !schema.is_table_of_tables(path) || at(&tree, path).is_none_or(|table| *table == json!({}))
        };
        let entry = |path: String| {
            let value = self.layers.shown.get(&path).cloned();
            let value = value.unwrap_or_else(|| at(&tree, &path).cloned().unwrap_or_default());
            match self.inherited(&path).filter(|_| value.is_null()) {
                Some(from) => (path, self.shown(&from), Origin::Inherited(from)),
                None => {
                    let origin = self.origin(&path);
                    (path, value, origin)
                }
            }
        };
        paths.filter(is_shown).map(entry).collect()
    }

    /// The key whose value an absent key of a route has.
    fn inherited(&self, path: &str) -> Option<String> {
        let (name, key) = path.strip_prefix("proxy.routes.")?.split_once('.')?;
        let route = self.proxy.routes.get(name)?;
        let is_of_server =
            key.starts_with("upstream_") || key.starts_with("routing_") || key == "local_tokenizer";
        let is_inherited = match key {
            "upstream_model" => false,
            _ if is_of_server => route.upstream_base_url.is_none(),
            _ if key.starts_with("pinned_sampling") => route.is_policy() && route.pinned_sampling.is_none(),
            _ => true,
        };
        let from = format!("proxy.{key}");
        (is_inherited
            && Schema::new().keys(&from).is_none()
            && at(&self.tables(), &from).is_some_and(|value| !value.is_null()))
        .then_some(from)
    }

    /// The value of a key for messages and files: never a secret.
    #[must_use]
    pub fn shown(&self, key: &str) -> Value {
        let value = self.layers.shown.get(key).cloned();
        value.unwrap_or_else(|| at(&self.tables(), key).cloned().unwrap_or_default())
    }

    /// All effective values as one TOML text, for the run folder; [`Config::load_resolved`] reads it back.
    #[must_use]
    pub fn to_resolved_toml(&self) -> String {
        let mut tree = Map::new();
        // A route is there even if it sets nothing.
        for name in self.proxy.routes.keys() {
            insert(&mut tree, &format!("proxy.routes.{name}"), json!({}));
        }
        for (path, value, origin) in self.entries() {
            if !value.is_null() && !matches!(origin, Origin::Inherited(_)) {
                let value = resolved(&path, value);
                insert(&mut tree, &path, value);
            }
        }
        toml::to_string(&tree).expect("text, numbers, lists and tables without nulls are TOML")
    }

    /// The upstream's API key, from the variable that `proxy.upstream_api_key_env` names.
    ///
    /// # Errors
    /// [`ConfigError::MissingVariable`] when that variable is not set.
    pub fn upstream_api_key(&self) -> Result<Option<Secret>, ConfigError> {
        self.secret("proxy.upstream_api_key_env", self.proxy.upstream_api_key_env.as_deref())
    }

    /// The first key that a command-line flag set to another value than `other` has, as `flag value, other value`.
    /// A run that is resumed keeps its config: such a flag would have no effect.
    #[must_use]
    pub fn flag_against(&self, other: &Self) -> Option<String> {
        self.differences(other).find_map(|(key, origin)| {
            let Origin::Flag(flag) = origin else { return None };
            let (asked, own) = (self.shown(key), other.shown(key));
            Some(format!("{flag} {asked} was given, and the run has {key} = {own}"))
        })
    }

    /// The keys that the files set to other values than `other` has.
    #[must_use]
    pub fn files_against(&self, other: &Self) -> Vec<String> {
        let of_files =
            |(key, origin): (&str, &Origin)| matches!(origin, Origin::File(_)).then(|| key.to_owned());
        self.differences(other).filter_map(of_files).collect()
    }

    /// Keys that were set, and not to what `other` has.
    fn differences<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a str, &'a Origin)> {
        let (own, others) = (self.tables(), other.tables());
        let value = |tree: &Value, key: &str| resolved(key, at(tree, key).cloned().unwrap_or_default());
        let origins = self.layers.origins.iter().map(|(key, origin)| (key.as_str(), origin));
        origins.filter(move |(key, _)| value(&own, key) != value(&others, key))
    }

    /// Variables `LEGO_…` that are set although neither lego nor these files read them, each with the name that was
    /// most likely meant.
    #[must_use]
    pub fn stray_variables(&self) -> Vec<String> {
        let overrides = OVERRIDES.map(|(variable, _)| variable);
        // Cargo sets what build.rs told the compiler for what it runs, too.
        let built = "LEGO_GIT_COMMIT";
        // Both a name that a key `…_env` has, and one in a text.
        let shown: String = self.layers.shown.values().map(Value::to_string).collect();
        let is_read = |name: &str| {
            name == built
                || overrides.contains(&name)
                || shown.contains(&format!("\"{name}\""))
                || shown.contains(&format!("${{{name}}}"))
        };
        let strays = self.environment.names_with("LEGO_").filter(|name| !is_read(name));
        let say = |name: &str| {
            let meant = nearest(name, overrides.into_iter()).map(|meant| format!(" Did you mean {meant}?"));
            format!(
                "the environment variable {name} is set, and nothing reads it.{}",
                meant.unwrap_or_default()
            )
        };
        strays.map(say).collect()
    }

    /// The token that clients must send, from the variable that `proxy.client_token_env` names.
    ///
    /// # Errors
    /// [`ConfigError::MissingVariable`] when that variable is not set.
    pub fn client_token(&self) -> Result<Option<Secret>, ConfigError> {
        self.secret("proxy.client_token_env", self.proxy.client_token_env.as_deref())
    }

    /// The admin listener's token, from the variable that `proxy.admin_token_env` names.
    ///
    /// # Errors
    /// [`ConfigError::MissingVariable`] when that variable is not set.
    pub fn admin_token(&self) -> Result<Option<Secret>, ConfigError> {
        self.secret("proxy.admin_token_env", self.proxy.admin_token_env.as_deref())
    }

    pub(super) fn secret(&self, key: &str, variable: Option<&str>) -> Result<Option<Secret>, ConfigError> {
        let Some(variable) = variable else {
            return Ok(None);
        };
        match self.environment.get(variable) {
            Some(value) => Ok(Some(Secret::new(value.to_owned()))),
            None => Err(ConfigError::MissingVariable {
                file: self.file(key),
                key: key.to_owned(),
                variable: variable.to_owned(),
            }),
        }
    }

    pub(super) fn tables(&self) -> Value {
        let tables = Tables {
            proxy: self.proxy.clone(),
            harness: self.harness.clone(),
            sandbox: self.sandbox.clone(),
            training: self.training.clone(),
            policy: self.policy.clone(),
        };
        serde_json::to_value(tables).expect("config types are plain data")
    }
}

/// The paths that a path with a place for any name stands for.
fn named(tree: &Value, path: String) -> Vec<String> {
    let place = format!(".{ANY_NAME}.");
    let Some((table, key)) = path.split_once(&place) else {
        return vec![path];
    };
    let names = at(tree, table).and_then(Value::as_object).into_iter().flat_map(Map::keys);
    names.map(|name| format!("{table}.{name}.{key}")).collect()
}

/// A value as it is found from any folder: files that are read while a run goes on.
fn resolved(key: &str, value: Value) -> Value {
    let name = key.rsplit('.').next();
    let is_read = matches!(name, Some("dataset" | "model_path" | "local_tokenizer" | "upstream_ca_file"));
    // What a variable holds is not written out.
    match value.as_str().filter(|text| is_read && !text.contains("${")).map(std::path::absolute) {
        Some(Ok(path)) => path.to_string_lossy().into_owned().into(),
        _ => value,
    }
}
