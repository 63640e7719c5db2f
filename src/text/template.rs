//! Chat templates of Hugging Face models, rendered as `transformers` does.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use minijinja::{AutoEscape, Environment, Value as Jinja};
use serde_json::{Map, Value, json};

use super::chat::ChatInput;
use super::{TextError, functions, read, read_json_if_present, sha256_hex};

const DEFAULT: &str = "default";
/// Templates that a model keeps apart for conversations with tools.
const WITH_TOOLS: &str = "tool_use";

/// The chat template of a model folder. Immutable; share it.
pub struct ChatTemplate {
    environment: Environment<'static>,
    has_tool_template: bool,
    special_tokens: Map<String, Value>,
    reads_argument_text: bool,
    source: String,
    sha256: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("sha256", &self.sha256).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.
    ///
    /// # Errors
    /// No template, or one that Jinja cannot parse.
    pub fn load(dir: &Path) -> Result<Self, TextError> {
        Self::load_if_present(dir)?.ok_or_else(|| TextError::File {
            path: dir.join("chat_template.jinja"),
            message: "does not exist, and tokenizer_config.json has no chat_template either; \
                      take the template that the model was trained with"
                .to_owned(),
        })
    }

    /// As [`Self::load`]; `None` when the folder has no template.
    ///
    /// # Errors
    /// A file that cannot be read, or a template that Jinja cannot parse.
    pub fn load_if_present(dir: &Path) -> Result<Option<Self>, TextError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json_if_present(&config_path)?.unwrap_or(Value::Null);
        let path = dir.join("chat_template.jinja");
        let (path, templates) = match read(&path) {
            Ok(bytes) => {
                let text = String::from_utf8(bytes).map_err(|_| TextError::File {
                    path: path.clone(),
                    message: "is not UTF-8 text".to_owned(),
                })?;
                (path, vec![(DEFAULT.to_owned(), text)])
            }
            Err(TextError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                (config_path, templates_of_config(&config["chat_template"]))
            }
            Err(error) => return Err(error),
        };
        if !templates.iter().any(|(name, _)| name == DEFAULT) {
            return Ok(None);
        }
        let mut special_tokens = Map::new();
        for (name, token) in config.as_object().into_iter().flatten() {
            if let (true, Some(text)) =
                (name.ends_with("_token"), token.as_str().or_else(|| token["content"].as_str()))
            {
                special_tokens.insert(name.clone(), Value::from(text));
            }
        }
        Self::build(path, templates, special_tokens).map(Some)
    }

    /// A template from its source, with the special tokens that it may name (`bos_token`, …).
    ///
    /// # Errors
    /// A template that Jinja cannot parse.
    pub fn from_source(source: &str, special_tokens: Map<String, Value>) -> Result<Self, TextError> {
        let templates = vec![(DEFAULT.to_owned(), source.to_owned())];
        Self::build(PathBuf::from("chat template"), templates, special_tokens)
    }

    fn build(
        path: PathBuf,
        templates: Vec<(String, String)>,
        special_tokens: Map<String, Value>,
    ) -> Result<Self, TextError> {
        let fail = |error: minijinja::Error| TextError::File {
            path: path.clone(),
            message: format!("is not a template that Jinja can parse: {error:#}"),
        };
        let source: String = templates.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("\n");
        let mut environment = environment().map_err(fail)?;
        let has_tool_template = templates.iter().any(|(name, _)| name == WITH_TOOLS);
        for (name, text) in templates {
            environment.add_template_owned(name, without_generation_tags(&text)).map_err(fail)?;
        }
        Ok(Self {
            environment,
            has_tool_template,
            special_tokens,
            reads_argument_text: source.contains("arguments is string"),
            sha256: sha256_hex(source.as_bytes()),
            source,
        })
    }

    /// The rendered text, as `transformers`' `apply_chat_template(tokenize=False)` gives it.
    ///
    /// # Errors
    /// What the template raises.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        self.render_input(&ChatInput { messages, tools, add_generation_prompt, template_kwargs: None })
    }

    /// As [`Self::render`], with `chat_template_kwargs`.
    ///
    /// # Errors
    /// What the template raises.
    pub fn render_input(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        let name = if input.tools.is_some() && self.has_tool_template { WITH_TOOLS } else { DEFAULT };
        let messages: Vec<Value> = input.messages.iter().map(with_both_reasoning_names).collect();
        let mut context = self.special_tokens.clone();
        context.insert("messages".to_owned(), Value::Array(messages));
        context.insert("tools".to_owned(), json!(input.tools));
        context.insert("documents".to_owned(), Value::Null);
        context.insert("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt));
        for (key, value) in input.template_kwargs.into_iter().flatten() {
            context.insert(key.clone(), value.clone());
        }
        let render = |error: minijinja::Error| TextError::Render(format!("{error:#}"));
        let template = self.environment.get_template(name).map_err(render)?;
        template.render(Jinja::from(minijinja::value::Serde(&context))).map_err(render)
    }

    /// Whether the template prints tool-call arguments that are text as they are, so that sampled bytes survive.
    pub(super) fn reads_argument_text(&self) -> bool {
        self.reads_argument_text
    }

    /// The same template, for which the time is always `moment`.
    #[must_use]
    pub fn at(mut self, moment: SystemTime) -> Self {
        let now = move |format: String| functions::strftime(moment, &format);
        self.environment.add_function("strftime_now", now);
        self
    }

    /// True if what it renders may be another text at another time.
    #[must_use]
    pub fn reads_the_clock(&self) -> bool {
        self.source.contains("strftime_now")
    }

    /// The template's own text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// SHA-256 of the template's source, lower-case hex.
    #[must_use]
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

fn templates_of_config(entry: &Value) -> Vec<(String, String)> {
    if let Some(text) = entry.as_str() {
        return vec![(DEFAULT.to_owned(), text.to_owned())];
    }
    let named =
        |item: &Value| Some((item["name"].as_str()?.to_owned(), item["template"].as_str()?.to_owned()));
    entry.as_array().into_iter().flatten().filter_map(named).collect()
}

/// Jinja as `transformers` sets it up.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    minijinja_contrib::add_to_environment(&mut environment);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.add_filter("tojson", |value: Jinja, options: minijinja::value::Kwargs| {
        functions::tojson(&value, options)
    });
    environment.add_function("raise_exception", functions::raise_exception);
    environment
        .add_function("strftime_now", |format: String| functions::strftime(SystemTime::now(), &format));
    // Python's None cannot be iterated over; minijinja's none can.
    environment.add_test("iterable", |value: &Jinja| !value.is_none() && value.try_iter().is_ok());
    Ok(environment)
}

/// `{% generation %}` marks what the assistant wrote and prints nothing: an empty `if` with the same white-space control.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        result.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inner = &tag[2..tag.len() - 2];
        let name = inner.trim_matches(['-', '+']).trim();
        if name == "generation" || name == "endgeneration" {
            let left = if inner.starts_with('-') { "-" } else { "" };
            let right = if inner.ends_with('-') { "-" } else { "" };
            result.push_str(&format!("{{%{left} if true {right}%}}{{%{left} endif {right}%}}"));
        } else {
            result.push_str(tag);
        }
        rest = after;
    }
    result.push_str(rest);
    result
}

/// Templates read an assistant's reasoning under either name: `transformers` gives both.
fn with_both_reasoning_names(message: &Value) -> Value {
    let mut message = message.clone();
    let reasoning = ["reasoning_content", "thinking", "reasoning"]
        .iter()
        .map(|name| &message[name])
        .find(|value| !value.is_null())
        .cloned();
    if let (Some(reasoning), Some(fields)) = (reasoning, message.as_object_mut()) {
        for name in ["reasoning_content", "thinking"] {
            if fields.get(name).is_none_or(Value::is_null) {
                fields.insert(name.to_owned(), reasoning.clone());
            }
        }
    }
    message
}
