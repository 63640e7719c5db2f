//! Conversation files, and their token ids with the tokens an assistant sampled marked.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;

use super::folder::SourceFolder;
use crate::kernels::Pool;
use crate::text::{ChatInput, ChatTemplate, Tokenizer, encode_chat};
use crate::train::TrainError;

/// One line of a conversation file: `{"messages": [...], "tools": [...]}`, in the form of `/v1/chat/completions`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Conversation {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
    #[serde(skip)]
    source: (PathBuf, usize),
}

/// Token ids of a conversation; `is_sampled[i]` is true where an assistant sampled `token_ids[i]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedConversation {
    pub token_ids: Vec<u32>,
    pub is_sampled: Vec<bool>,
}

/// Reads a JSONL file of conversations. Blank lines are skipped.
///
/// # Errors
/// An unreadable file, a line that is not a conversation with an assistant turn, an empty file; each with file and line.
pub fn read_conversations(path: &Path) -> Result<Vec<Conversation>, TrainError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| TrainError::Read { path: path.to_owned(), source })?;
    let mut conversations = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let refuse =
            |message: String| TrainError::Conversation { path: path.to_owned(), line: index + 1, message };
        let mut conversation: Conversation = serde_json::from_str(line).map_err(|error| {
            refuse(format!("not a conversation ({error}); expected {{\"messages\": [...]}}"))
        })?;
        if !conversation.messages.iter().any(is_assistant) {
            return Err(refuse("no message of role \"assistant\": nothing to learn from".to_owned()));
        }
        conversation.source = (path.to_owned(), index + 1);
        conversations.push(conversation);
    }
    if conversations.is_empty() {
        let message = "holds no conversation".to_owned();
        return Err(TrainError::File { path: path.to_owned(), message });
    }
    Ok(conversations)
}

fn is_assistant(message: &Value) -> bool {
    message["role"] == "assistant"
}

impl Conversation {
    /// The rendered text, as a tokenizer is trained on.
    ///
    /// # Errors
    /// What the template refuses, with file and line.
    pub fn render(&self, template: &ChatTemplate) -> Result<String, TrainError> {
        template
            .render(&self.messages, self.tools.as_deref(), false)
            .map_err(|error| self.refuse(error.to_string()))
    }

    fn refuse(&self, message: String) -> TrainError {
        let (path, line) = self.source.clone();
        TrainError::Conversation { path, line, message }
    }
}

/// Ids of a conversation up to the end of its last assistant turn, and which of them the assistant sampled.
///
/// Each turn's prompt is encoded as the engine encodes it when the turn is sampled; the whole conversation must
/// extend it, so that training sees the ids that sampling sees.
///
/// # Errors
/// What the template or tokenizer refuses, a template that rewrites history, a turn that does not end with one of the
/// tokenizer's end tokens; each with file and line.
pub fn encode(
    conversation: &Conversation,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
) -> Result<EncodedConversation, TrainError> {
    let messages = &conversation.messages;
    let ids = |messages: &[Value], add_generation_prompt: bool| {
        let tools = conversation.tools.as_deref();
        let input = ChatInput { messages, tools, add_generation_prompt, template_kwargs: None };
        encode_chat(tokenizer, template, &input).map_err(|error| conversation.refuse(error.to_string()))
    };
    let last = messages.iter().rposition(is_assistant).unwrap_or(0);
    let mut token_ids = ids(&messages[..=last], false)?;
    let mut is_sampled = vec![false; token_ids.len()];
    let mut end = 0;
    for turn in (0..=last).filter(|&turn| is_assistant(&messages[turn])) {
        let prompt = ids(&messages[..turn], true)?;
        if prompt.len() < end || !token_ids.starts_with(&prompt) {
            return Err(conversation.refuse(format!(
                "the chat template renders messages[..{turn}] differently once the conversation goes on; split the \
                 conversation there"
            )));
        }
        let length = token_ids[prompt.len()..]
            .iter()
            .position(|id| tokenizer.eos_token_ids().contains(id))
            .ok_or_else(|| {
            conversation.refuse(format!(
                "messages[{turn}] does not end with an end token; name the template's one as eos_token in \
                     tokenizer_config.json"
            ))
        })?;
        end = prompt.len() + length + 1;
        is_sampled[prompt.len()..end].fill(true);
    }
    token_ids.truncate(end);
    is_sampled.truncate(end);
    Ok(EncodedConversation { token_ids, is_sampled })
}

/// [`encode`] for all conversations, in order, on all threads of `pool`.
///
/// # Errors
/// The first conversation that cannot be encoded.
pub fn encode_all(
    conversations: &[Conversation],
    source: &SourceFolder,
    pool: &Pool,
) -> Result<Vec<EncodedConversation>, TrainError> {
    let results: Vec<OnceLock<Result<EncodedConversation, TrainError>>> =
        conversations.iter().map(|_| OnceLock::new()).collect();
    pool.run(conversations.len(), |index| {
        let encoded = encode(&conversations[index], &source.tokenizer, &source.template);
        results[index].get_or_init(|| encoded);
    });
    results.into_iter().map(|result| result.into_inner().expect("the pool ran every index")).collect()
}
