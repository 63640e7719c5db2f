//! The texts of ids, where it is known whose they are.

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::config::{Config, Environment};
use crate::record::Call;
use crate::text::{ChatInput, ChatTemplate, TextError, Tokenizer, difference};
use crate::trajectory::{self, IdTexts};

/// The texts of ids.
pub(super) struct Texts {
    pub(super) ids: IdTexts,
    template: Option<ChatTemplate>,
}

impl Texts {
    /// Those of the tokenizer that was named, else of the policy whose run these captures are of.
    pub(super) fn find(named: Option<&Path>, captures: &Path) -> Result<Option<Self>, TextError> {
        match named {
            Some(folder) => {
                let template = ChatTemplate::load_if_present(folder)?;
                Ok(Some(Self { ids: IdTexts::of_all(Arc::new(Tokenizer::load(folder)?)), template }))
            }
            None => Ok(Self::of_run(captures)),
        }
    }

    fn of_run(captures: &Path) -> Option<Self> {
        let path = captures.parent()?.join("config.resolved.toml");
        let config = Config::load_resolved(&path, Environment::from_process()).ok()?;
        let tokenizer = Tokenizer::load(config.model_path()).ok()?;
        let template = ChatTemplate::load_if_present(config.model_path()).ok()?;
        Some(Self { ids: IdTexts::of_embedded(Arc::new(tokenizer)), template })
    }

    /// How the prompt of a call that was asked with tokens, and goes on from another, differs from what the chat template
    /// makes of its messages; `None`: it is no such call, or the template is another or refuses them.
    pub(super) fn kept(&self, call: &Call) -> Option<String> {
        #[derive(Deserialize)]
        struct Body {
            messages: Vec<Value>,
            #[serde(default)]
            tools: Option<Vec<Value>>,
            #[serde(default)]
            chat_template_kwargs: Option<Map<String, Value>>,
            #[serde(default)]
            reasoning_effort: Option<Value>,
        }
        call.parent_call_id?;
        let template = self.template.as_ref().filter(|_| self.ids.fits(call))?;
        if call.template_sha256.as_deref() != Some(template.sha256()) {
            return None;
        }
        let body: Body = serde_json::from_str(&trajectory::chat_request(call)?).ok()?;
        let mut kwargs = body.chat_template_kwargs.unwrap_or_default();
        if let Some(effort) = body.reasoning_effort {
            kwargs.entry("reasoning_effort").or_insert(effort);
        }
        let input = ChatInput {
            messages: &body.messages,
            tools: body.tools.as_deref().filter(|tools| !tools.is_empty()),
            add_generation_prompt: true,
            template_kwargs: (!kwargs.is_empty()).then_some(&kwargs),
        };
        let prompt = call.prompt_token_ids.as_deref()?;
        let found = difference(&self.ids.tokenizer, template, prompt, &input).ok()?;
        Some(found.map_or("the prompt is what the chat template renders".to_owned(), |found| {
            format!(
                "the chat template would render {} ids in the place of {} from id {} on: {:?} instead of {:?}",
                found.rendered_len, found.lineage_len, found.at, found.rendered_text, found.lineage_text
            )
        }))
    }

    pub(super) fn of(&self, id: u32) -> String {
        let bytes = self.ids.tokenizer.token_bytes(id);
        match std::str::from_utf8(bytes) {
            Ok("") => "(not in this tokenizer)".to_owned(),
            Ok(text) => format!("{text:?}"),
            // A part of a character.
            Err(_) => format!("b\"{}\"", bytes.escape_ascii()),
        }
    }
}
