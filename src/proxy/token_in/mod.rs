//! Tokens in, tokens out: lego renders a conversation itself, asks a token endpoint, and reads what was sampled.
//!
//! A prompt is the ids of the conversation's last reply (prompt and sampled), and behind them only what is new. So a
//! prompt extends the one before it, whatever the client did to the spelling of its history ([`lineages`]). Where the
//! history no longer matches, or the template cannot be rendered in parts, the prompt is rendered anew and begins a
//! lineage; [`Origin`] says why. The request goes out as one of completions ([`request`]), which each dialect speaks; the
//! reply comes back as one of chat, and in the client's own protocol ([`writer`], [`reading`]).
//!
//! Invariants:
//! - Sampled ids are never tokenised again: they are in the next prompt as they were sampled.
//! - What the new messages say never becomes a control token.
//! - What cannot be asked for in ids ([`request::conversation`]) is asked for in chat's words, and counted.

mod keys;
mod lineages;
mod reading;
mod request;
pub(super) mod segments;
mod writer;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

pub(super) use lineages::{Given, Lineages, OfModels};

use keys::Keys;
use lineages::{Key, Reply, Spelling, Turn};
use reading::Reading;
use writer::TokenWriter;

use super::verdict::OUTSIDE;
use crate::config::{Config, ConfigError, TokenHistory};
use crate::protocol::chat::Request;
use crate::protocol::said::{Said, ToolUse};
use crate::protocol::translate::{ReplyNames, ReplyWriter};
use crate::protocol::volatile::Rules;
use crate::record::{Call, CallStatus, CapturedToolCall, ChoiceId};
use crate::text::parsers::{Forms, ReasoningForm, ToolForm, ToolSchemas, UnknownForm};
use crate::text::{ChatInput, ChatTemplate, Extender, TextError, Tokenizer, encode_chat};

/// Why a prompt is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// It extends an earlier call's prompt and reply.
    Extended,
    /// The session's first call.
    First,
    /// No message is one of an earlier call's: a sub-agent, a side call.
    Other,
    /// Its tools or template parameters are none of an earlier call's.
    ToolsChanged,
    /// The first message is another.
    SystemChanged,
    /// A later message is another, or left out.
    MessageChanged,
    /// All its messages were asked before: a retry of a call that goes on from none, or history that was cut short.
    Repeated,
    /// The template renders a message differently when others follow it.
    NotIncremental,
    /// The configuration has every prompt rendered whole.
    Template,
}

impl Origin {
    /// All of them.
    const ALL: [Self; 9] = [
        Self::Extended,
        Self::First,
        Self::Other,
        Self::ToolsChanged,
        Self::SystemChanged,
        Self::MessageChanged,
        Self::Repeated,
        Self::NotIncremental,
        Self::Template,
    ];

    /// In metrics and logs.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Extended => "extended",
            Self::First => "first",
            Self::Other => "other_conversation",
            Self::ToolsChanged => "tools_changed",
            Self::SystemChanged => "system_changed",
            Self::MessageChanged => "message_changed",
            Self::Repeated => "repeated",
            Self::NotIncremental => "template_not_incremental",
            Self::Template => "template_exact",
        }
    }
}

/// What became of calls of the token-in relay, counted.
pub(super) fn count(outcome: &'static str) {
    metrics::counter!("lego_proxy_token_in_calls_total", "prompt" => outcome).increment(1);
}

/// Shows the counter before it counts.
pub(super) fn none_yet(outcome: &'static str) {
    metrics::counter!("lego_proxy_token_in_calls_total", "prompt" => outcome).increment(0);
}

/// Every value of the counter's label.
pub(super) fn outcomes() -> impl Iterator<Item = &'static str> {
    Origin::ALL.iter().map(|origin| origin.as_str()).chain([IN_CHAT])
}

/// A call that was asked for in chat's words.
pub(super) const IN_CHAT: &str = "in_chat";

/// Renders prompts of one model and reads its replies. Share it.
pub struct Renderer {
    tokenizer: Arc<Tokenizer>,
    template: Arc<ChatTemplate>,
    forms: Forms,
    history: TokenHistory,
    /// By the template parameters that a request gives.
    extenders: Mutex<BTreeMap<String, Option<Arc<Extender>>>>,
    /// As many prompts at once as there are cores.
    slots: Semaphore,
}

/// More sets of template parameters than this are proven again each time.
const MOST_EXTENDERS: usize = 16;

impl std::fmt::Debug for Renderer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Renderer")
            .field("template", &self.template)
            .field("forms", &self.forms)
            .finish_non_exhaustive()
    }
}

impl Renderer {
    /// Reads tokenizer and chat template of a folder, and proves that the template can be rendered in parts.
    ///
    /// # Errors
    /// A file that is missing or broken, or a template that reads the clock.
    pub fn load(
        folder: &Path,
        tools: Option<ToolForm>,
        reasoning: Option<ReasoningForm>,
        history: TokenHistory,
    ) -> Result<Self, TextError> {
        let tokenizer = Arc::new(Tokenizer::load(folder)?);
        let template = Arc::new(ChatTemplate::load(folder)?);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let own = Forms::of_template(template.source());
        let renderer = Self {
            forms: Forms { tools: tools.or(own.tools), reasoning: reasoning.or(own.reasoning) },
            tokenizer,
            template,
            history,
            extenders: Mutex::default(),
            slots: Semaphore::new(cores),
        };
        renderer.extender(&Map::new());
        Ok(renderer)
    }

    /// Of the tokenizer and of the template.
    fn sha256(&self) -> (&str, &str) {
        (self.tokenizer.sha256(), self.template.sha256())
    }

    /// `None`: with these parameters the template cannot be rendered in parts.
    fn extender(&self, kwargs: &Map<String, Value>) -> Option<Arc<Extender>> {
        let lock = || self.extenders.lock().unwrap_or_else(PoisonError::into_inner);
        let key = Value::Object(kwargs.clone()).to_string();
        if let Some(known) = lock().get(&key) {
            return known.clone();
        }
        let given = (!kwargs.is_empty()).then_some(kwargs);
        let proven = Extender::prove(Arc::clone(&self.tokenizer), Arc::clone(&self.template), given);
        let proven = proven.inspect_err(|why| {
            tracing::warn!(%why, "the chat template cannot be rendered in parts: each prompt begins a lineage");
        });
        let proven = proven.ok().map(Arc::new);
        let mut known = lock();
        if known.len() < MOST_EXTENDERS {
            known.insert(key, proven.clone());
        }
        proven
    }
}

/// The prompt of one call, and how its replies are read.
#[derive(Debug)]
pub(super) struct Rendered {
    renderer: Arc<Renderer>,
    names: ReplyNames,
    /// The request in the words of completions.
    pub(super) body: Bytes,
    pub(super) prompt: Vec<u32>,
    pub(super) origin: Origin,
    /// Where what the model says is held.
    lineages: Arc<Lineages>,
    before: Option<Arc<Turn>>,
    /// The conversation up to the request's last message, and how many messages that are.
    asked: (Key, usize),
    /// When it was asked ([`Lineages::ask`]).
    number: u64,
    reading: Reading,
    n: u64,
    asks_usage: bool,
}

impl Rendered {
    /// Why the prompt is what it is, for metrics.
    pub(super) fn outcome(&self) -> &'static str {
        self.origin.as_str()
    }

    /// Renders a request's prompt, off the threads that serve connections.
    ///
    /// # Errors
    /// Why it is to be asked for in chat's words instead.
    pub(super) async fn of(
        renderer: &Arc<Renderer>,
        lineages: &Arc<Lineages>,
        request: &Request,
        volatile: &Arc<Rules>,
        names: ReplyNames,
    ) -> Result<Arc<Self>, String> {
        let _slot = renderer.slots.acquire().await.map_err(|error| error.to_string())?;
        let (renderer, lineages, request, volatile) =
            (Arc::clone(renderer), Arc::clone(lineages), request.clone(), Arc::clone(volatile));
        let rendered = move || Self::render(renderer, lineages, &request, &volatile, names);
        let rendered = tokio::task::spawn_blocking(rendered).await.map_err(|error| error.to_string())?;
        rendered.map(Arc::new)
    }

    fn render(
        renderer: Arc<Renderer>,
        lineages: Arc<Lineages>,
        request: &Request,
        volatile: &Rules,
        names: ReplyNames,
    ) -> Result<Self, String> {
        let Prompt { conversation, keys, ids: prompt, before, origin } =
            renderer.prompt(&lineages, request, volatile)?;
        let number = lineages.ask([&keys.whole, &keys.bare, &keys.talk]);
        let reading = renderer.reading(request, &conversation, &prompt, &names);
        Ok(Self {
            body: request::completions(request, &prompt),
            asked: (keys.whole[keys.whole.len() - 1], keys.spelled.len()),
            number,
            n: request.n,
            asks_usage: request.asks_usage,
            prompt,
            lineages,
            before,
            origin,
            reading,
            renderer,
            names,
        })
    }

    /// Writes the reply for a client: in chat, or through its own protocol's writer.
    pub(super) fn writer(
        self: &Arc<Self>,
        inner: Option<Box<dyn ReplyWriter>>,
        is_native: bool,
    ) -> Box<dyn ReplyWriter> {
        Box::new(TokenWriter::new(Arc::clone(self), inner, is_native))
    }

    /// Ids that end a reply.
    fn ends(&self) -> &[u32] {
        &self.reading.ends
    }

    /// The engine goes on behind them, as it was asked to.
    fn ignores_ends(&self) -> bool {
        serde_json::from_slice::<Value>(&self.body).is_ok_and(|body| body["ignore_eos"] == true)
    }

    /// The reply that this call extends.
    pub(super) fn parent(&self) -> Option<ChoiceId> {
        self.before.as_ref().map(|turn| turn.choice())
    }

    /// Says in a record what only ids tell, and holds what a later call may go on from. `given` is said of the reply later.
    pub(super) fn fill(&self, call: &mut Call, is_final: bool, given: &Given) {
        call.parent_call_id = self.parent().map(|reply| reply.call_id);
        let (tokenizer, template) = self.renderer.sha256();
        call.tokenizer_sha256 = Some(tokenizer.to_owned());
        call.template_sha256 = Some(template.to_owned());
        let Some(ids) = &call.completion_token_ids else {
            return;
        };
        let finish_reason = call.finish_reason.as_deref().unwrap_or_default();
        let whole = self.reading.whole(call.choice_index, ids, finish_reason);
        if ids.iter().any(|id| *id as usize >= self.renderer.tokenizer.vocab_size()) {
            call.not_trainable_reasons.push(OUTSIDE.to_owned());
        }
        // A part of it may be missing.
        let is_whole =
            self.n > 1 || call.usage.is_none_or(|usage| usage.completion_tokens == ids.len() as u64);
        if is_final && call.status == CallStatus::Ok && is_whole {
            let used = |call: &CapturedToolCall| ToolUse {
                id: call.id.clone(),
                name: call.name.clone(),
                arguments: call.arguments.clone(),
            };
            let mut said = Said::reply(whole.text.clone(), whole.calls.iter().map(used).collect());
            if !whole.reasoning.is_empty() {
                said.reasoning.clone_from(&whole.reasoning);
            }
            let (asked, at) = self.asked;
            let reply = Reply {
                call_id: call.call_id,
                choice: call.choice_index,
                at,
                spelling: Spelling::of(&said),
                asked: self.number,
                given: given.clone(),
            };
            let turn = Turn::new(self.before.clone(), &self.prompt, ids, reply);
            self.lineages.hold(asked.with(&said.identity()), turn);
        }
        call.text = Some(whole.text);
        call.tool_calls = (!whole.calls.is_empty()).then_some(whole.calls);
    }
}

impl Renderer {
    /// That of the folder that `key` of a configuration names.
    ///
    /// # Errors
    /// A folder that cannot be used, or a parser that there is not, with the key that names it.
    pub fn configured(config: &Config, key: &str, folder: &Path) -> Result<Self, ConfigError> {
        let proxy = &config.proxy;
        let bad = |key: &str, value: String, problem: String, remedy: String| ConfigError::Value {
            file: config.file(key),
            key: key.to_owned(),
            value: format!("{value:?}"),
            problem,
            remedy,
        };
        let unknown = |key: &str, name: &str, error: UnknownForm| {
            bad(
                key,
                name.to_owned(),
                error.to_string(),
                format!("Set {key} to a parser's name, or take it out."),
            )
        };
        let tools = proxy
            .tool_call_parser
            .as_deref()
            .map(|name| name.parse().map_err(|error| unknown("proxy.tool_call_parser", name, error)));
        let reasoning = proxy
            .reasoning_parser
            .as_deref()
            .map(|name| name.parse().map_err(|error| unknown("proxy.reasoning_parser", name, error)));
        Self::load(folder, tools.transpose()?, reasoning.transpose()?, proxy.token_history).map_err(|error| {
            let remedy = format!("Set {key} to the folder of the upstream's model, or proxy.relay to auto.");
            bad(key, folder.display().to_string(), error.to_string(), remedy)
        })
    }

    /// How many ids the prompt of a call would have that asked this now. `None`: it would be asked in chat's words.
    pub(super) async fn count(
        self: &Arc<Self>,
        lineages: Arc<Lineages>,
        request: Request,
        volatile: &Arc<Rules>,
    ) -> Option<usize> {
        let _slot = self.slots.acquire().await.ok()?;
        let (renderer, volatile) = (Arc::clone(self), Arc::clone(volatile));
        let prompt = move || renderer.prompt(&lineages, &request, &volatile).map(|prompt| prompt.ids.len());
        tokio::task::spawn_blocking(prompt).await.ok()?.ok()
    }

    fn prompt(&self, lineages: &Lineages, request: &Request, volatile: &Rules) -> Result<Prompt, String> {
        let conversation = request::conversation(request)?;
        let keys = Keys::of(request, &conversation, volatile)?;
        let input = ChatInput {
            messages: &conversation.messages,
            tools: conversation.tools.as_deref(),
            add_generation_prompt: true,
            template_kwargs: (!conversation.kwargs.is_empty()).then_some(&conversation.kwargs),
        };
        let (ids, before, origin) = self.ids(lineages, &keys, &input)?;
        Ok(Prompt { conversation, keys, ids, before, origin })
    }

    fn ids(
        &self,
        lineages: &Lineages,
        keys: &Keys,
        input: &ChatInput<'_>,
    ) -> Result<(Vec<u32>, Option<Arc<Turn>>, Origin), String> {
        let anew = |origin| {
            let ids =
                encode_chat(&self.tokenizer, &self.template, input).map_err(|error| error.to_string())?;
            Ok((ids, None, origin))
        };
        if self.history == TokenHistory::Template {
            return anew(Origin::Template);
        }
        let Some((answered, turn)) = lineages.longest(&keys.whole, &keys.spelled) else {
            return anew(keys.origin(lineages));
        };
        let empty = Map::new();
        let Some(extender) = self.extender(input.template_kwargs.unwrap_or(&empty)) else {
            return anew(Origin::NotIncremental);
        };
        match extender.tail(turn.sampled_ids(), answered, input) {
            Ok(tail) => Ok(([turn.all_ids(), tail].concat(), Some(turn), Origin::Extended)),
            Err(error) => {
                tracing::debug!(%error, "these messages cannot be rendered by themselves");
                anew(Origin::NotIncremental)
            }
        }
    }

    fn reading(
        &self,
        request: &Request,
        conversation: &request::Conversation,
        prompt: &[u32],
        names: &ReplyNames,
    ) -> Reading {
        let mut ends = self.tokenizer.eos_token_ids().to_vec();
        let own = request.get("stop_token_ids");
        let own = own.iter().filter_map(Value::as_array).flatten().filter_map(Value::as_u64);
        ends.extend(own.filter_map(|id| u32::try_from(id).ok()));
        let last = &prompt[prompt.len().saturating_sub(16)..];
        let include = request.get("include_stop_str_in_output") == Some(Value::Bool(true));
        // Without tools what looks like a call is text.
        let tools = self.forms.tools.filter(|_| conversation.tools.is_some());
        let reasoning = self.forms.reasoning;
        let tags = tools.into_iter().flat_map(ToolForm::tags);
        let tags = tags.chain(reasoning.into_iter().flat_map(ReasoningForm::tags));
        Reading {
            tokenizer: Arc::clone(&self.tokenizer),
            tags: tags.filter_map(|tag| self.tokenizer.control_id(tag)).collect(),
            forms: Forms { tools, reasoning },
            starts_in_reasoning: reasoning
                .is_some_and(|form| form.is_open_at_end(&self.tokenizer.decode(last, false))),
            schemas: ToolSchemas::new(conversation.tools.as_deref().unwrap_or_default()),
            stop: reading::stop_texts(request.get("stop"), include),
            ends: if include { Vec::new() } else { ends },
            seed: names.call_id.clone(),
        }
    }
}

/// What a request is asked with.
struct Prompt {
    conversation: request::Conversation,
    keys: Keys,
    ids: Vec<u32>,
    before: Option<Arc<Turn>>,
    origin: Origin,
}
