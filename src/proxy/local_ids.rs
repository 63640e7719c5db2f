//! Ids of replies that carry none, from a tokenizer in a local folder, where the configuration asks for them.
//!
//! Invariants:
//! - What the upstream says wins: a reply with any ids of its own is left as it is.
//! - The ids are exact for what they are said to be, or absent. A completion's are those of the reply's text, where
//!   the text is all that was said and reads back from one sequence of ids; a prompt's are those of the rendered chat
//!   template, where nothing else shapes the prompt and their number is the one that the upstream counted.
//! - Such a call is never trained: nobody knows that these ids were sampled. It has no log-probs.
//! - No text is tokenised on a thread that serves connections.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use super::token_in::Renderer;
use super::verdict::{LOCAL_COMPLETION_REFUSED, LOCAL_IDS, LOCAL_IDS_USAGE, LOCAL_PROMPT_REFUSED};
use crate::config::{Config, ConfigError, Server};
use crate::protocol::chat::Reply;
use crate::record::{Call, CallStatus, ClientApi, IdsSource, JsonText};
use crate::text::{ChatInput, ChatTemplate, TextError, Tokenizer, encode_chat};

/// Members of a chat request that are no part of the prompt, or that say nothing with these values. With any other
/// member it is the server's to say what the model saw.
const NO_PART_OF_THE_PROMPT: [&str; 36] = [
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "parallel_tool_calls",
    "user",
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "skip_special_tokens",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_weight_versions",
    "return_meta_info",
    "return_prompt_token_ids",
];

/// Tokenizer and chat template of a folder. Clones of the `Arc` share it.
pub struct LocalTokenizer {
    tokenizer: Tokenizer,
    /// `None`: the folder has none, and prompts get no ids.
    template: Option<ChatTemplate>,
    /// As many texts at once as there are cores.
    slots: Semaphore,
}

impl std::fmt::Debug for LocalTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalTokenizer")
            .field("tokenizer", &self.tokenizer)
            .field("template", &self.template)
            .finish_non_exhaustive()
    }
}

impl LocalTokenizer {
    /// Reads a folder with `tokenizer.json` and, if it has one, a chat template.
    ///
    /// # Errors
    /// A file that is missing or broken.
    pub fn load(folder: &Path) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::load(folder)?;
        let template = ChatTemplate::load_if_present(folder)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { tokenizer, template, slots: Semaphore::new(cores) })
    }

    /// The ids of a text, if it reads back from them and can be nothing but text.
    fn ids_of(&self, text: &str) -> Option<Vec<u32>> {
        // What stands there may be a character that a token cut; and a space before it may have been left out.
        if text.contains('\u{fffd}') || self.tokenizer.depends_on_position() {
            return None;
        }
        let ids = self.tokenizer.encode_text(text).ok()?;
        // The text of a control token: it was sampled as that token or as text, and nobody knows which.
        let is_plain = self.tokenizer.encode(text).is_ok_and(|other| other == ids);
        (is_plain && self.tokenizer.decode(&ids, false) == text).then_some(ids)
    }

    /// The ids of a chat request's prompt, if nothing but the template shapes it.
    fn prompt_of(&self, request: &JsonText) -> Option<Vec<u32>> {
        #[derive(Deserialize)]
        struct View {
            messages: Vec<Value>,
            #[serde(default)]
            tools: Option<Vec<Value>>,
            #[serde(default)]
            chat_template_kwargs: Option<Map<String, Value>>,
        }
        let template = self.template.as_ref().filter(|template| !template.reads_the_clock())?;
        let members: Map<String, Value> = serde_json::from_str(request.get()).ok()?;
        let is_silent = |(name, value): (&String, &Value)| {
            value.is_null()
                || NO_PART_OF_THE_PROMPT.contains(&name.as_str())
                || (name == "tool_choice" && value == "auto")
        };
        if !members.iter().all(is_silent) {
            return None;
        }
        let view: View = serde_json::from_value(Value::Object(members)).ok()?;
        let input = ChatInput {
            messages: &view.messages,
            tools: view.tools.as_deref().filter(|tools| !tools.is_empty()),
            add_generation_prompt: true,
            template_kwargs: view.chat_template_kwargs.as_ref(),
        };
        encode_chat(&self.tokenizer, template, &input).ok()
    }
}

/// The local tokenizers of a configuration, each folder loaded once.
#[derive(Debug, Clone, Default)]
pub struct LocalTokenizers {
    filling: BTreeMap<PathBuf, Arc<LocalTokenizer>>,
    /// Of the models that are asked with tokens.
    renderers: BTreeMap<PathBuf, Arc<Renderer>>,
}

impl LocalTokenizers {
    /// Loads the folders that the configuration names.
    ///
    /// # Errors
    /// A folder that cannot be used, with the key that names it.
    pub fn load(config: &Config) -> Result<Self, ConfigError> {
        let mut loaded = BTreeMap::new();
        for (key, folder) in config.local_tokenizers() {
            if loaded.contains_key(&folder) {
                continue;
            }
            let tokenizer = LocalTokenizer::load(&folder).map_err(|error| ConfigError::Value {
                file: config.file(&key),
                value: format!("{:?}", folder.display().to_string()),
                problem: error.to_string(),
                remedy: format!(
                    "Set {key} to a folder with the tokenizer.json of the upstream's model, or take it out."
                ),
                key,
            })?;
            loaded.insert(folder, Arc::new(tokenizer));
        }
        let mut renderers = BTreeMap::new();
        for (key, folder) in config.rendered_folders() {
            if !renderers.contains_key(&folder) {
                renderers.insert(folder.clone(), Arc::new(Renderer::configured(config, &key, &folder)?));
            }
        }
        Ok(Self { filling: loaded, renderers })
    }

    /// What renders the prompts of this server's model; `local`: the folder of its tokenizer.
    #[must_use]
    pub fn renderer(&self, server: &Server, local: Option<&Path>) -> Option<Arc<Renderer>> {
        self.renderers.get(server.rendered_folder(local)?.1).cloned()
    }

    /// The one of this folder.
    #[must_use]
    pub fn get(&self, folder: &Path) -> Option<Arc<LocalTokenizer>> {
        self.filling.get(folder).cloned()
    }

    /// The one of the calls that no route has.
    #[must_use]
    pub fn of_proxy(&self, config: &Config) -> Option<Arc<LocalTokenizer>> {
        self.get(config.proxy.local_tokenizer.as_deref()?)
    }
}

/// Some records whose reply carries no ids, and what is needed to fill them in.
pub(super) struct Missing {
    tokenizer: Arc<LocalTokenizer>,
    /// The text of each record, where it is all that the choice said.
    texts: Vec<Option<String>>,
    /// The reply's usage is of one choice.
    is_only: bool,
    request: Option<JsonText>,
}

/// What was found for them.
struct Found {
    completions: Vec<Option<Vec<u32>>>,
    is_only: bool,
    prompt: Option<Vec<u32>>,
}

impl Missing {
    /// `None`: nothing is to be filled in.
    pub(super) fn of(tokenizer: Option<&Arc<LocalTokenizer>>, reply: &Reply, calls: &[Call]) -> Option<Self> {
        let tokenizer = Arc::clone(tokenizer?);
        let has_ids = |choice: &crate::protocol::chat::Choice| {
            choice.token_ids.is_some() || choice.prompt_token_ids.is_some()
        };
        let has_reply = calls.iter().any(|call| call.status == CallStatus::Ok);
        if !has_reply || reply.prompt_token_ids.is_some() || reply.choices.values().any(has_ids) {
            return None;
        }
        // What was thought and is not in the reply was sampled all the same.
        let is_spoken = reply.usage.is_none_or(|usage| usage.reasoning_tokens.unwrap_or(0) == 0);
        let texts = calls.iter().map(|call| {
            let choice = reply.choices.get(&call.choice_index)?;
            let is_all = call.status == CallStatus::Ok
                && is_spoken
                && choice.tool_calls.is_empty()
                && choice.reasoning.is_empty()
                && choice.refusal.is_empty()
                && !choice.text.is_empty();
            is_all.then(|| choice.text.clone())
        });
        let of_chat = calls.first().filter(|call| call.upstream_api == ClientApi::OpenaiChat);
        let request =
            of_chat.and_then(|call| call.upstream_request.as_ref().or(call.client_request.as_ref()));
        let is_one = |call: &Call| call.sampling_sent.n.is_none_or(|n| n == 1);
        let is_only = reply.choices.len() == 1 && calls.iter().all(is_one);
        Some(Self { texts: texts.collect(), is_only, request: request.cloned(), tokenizer })
    }

    /// Fills in what can be stated, and says of the rest that it cannot.
    pub(super) async fn fill(self, calls: &mut [Call]) {
        let Self { tokenizer, texts, is_only, request } = self;
        let Ok(_slot) = tokenizer.slots.acquire().await else {
            return;
        };
        let found = {
            let tokenizer = Arc::clone(&tokenizer);
            tokio::task::spawn_blocking(move || Found {
                completions: texts.iter().map(|text| tokenizer.ids_of(text.as_deref()?)).collect(),
                is_only,
                prompt: request.and_then(|request| tokenizer.prompt_of(&request)),
            })
        };
        match found.await {
            Ok(found) => found.put(&tokenizer, calls),
            Err(error) => tracing::error!(%error, "the local tokenizer failed; ids stay absent"),
        }
    }
}

impl Found {
    fn put(self, tokenizer: &LocalTokenizer, calls: &mut [Call]) {
        for (call, completion) in calls.iter_mut().zip(self.completions) {
            if call.status != CallStatus::Ok {
                continue;
            }
            let counted = call.usage.map(|usage| usage.prompt_tokens);
            let prompt = self.prompt.as_ref().filter(|ids| counted == Some(ids.len() as u64));
            let mut say = |reason: &str| call.not_trainable_reasons.push(reason.to_owned());
            if completion.is_some() || prompt.is_some() {
                say(LOCAL_IDS);
            }
            if completion.is_none() {
                say(LOCAL_COMPLETION_REFUSED);
            }
            if prompt.is_none() {
                say(LOCAL_PROMPT_REFUSED);
            }
            let sampled = call.usage.filter(|_| self.is_only).map(|usage| usage.completion_tokens);
            if let (Some(ids), Some(sampled)) = (&completion, sampled)
                && ids.len() as u64 != sampled
            {
                say(LOCAL_IDS_USAGE);
            }
            call.trainable = false;
            if completion.is_some() || prompt.is_some() {
                call.tokenizer_sha256 = Some(tokenizer.tokenizer.sha256().to_owned());
            }
            if let Some(ids) = completion {
                call.completion_token_ids = Some(ids);
                call.completion_ids_source = IdsSource::LocalTokenizer;
                // Those that came are of the sampled tokens, whose ids are not known.
                if call.completion_logprobs.take().is_some() {
                    call.not_trainable_reasons.push("no_logprobs".to_owned());
                }
            }
            if let Some(ids) = prompt {
                call.prompt_token_ids = Some(ids.clone());
                call.prompt_ids_source = IdsSource::LocalTokenizer;
                call.template_sha256 = tokenizer.template.as_ref().map(|t| t.sha256().to_owned());
            }
        }
    }
}
