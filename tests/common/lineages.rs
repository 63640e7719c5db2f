//! Lineages over a chat template: what lego sends turn by turn, with sampled turns that are the template's own.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use lego::text::{ChatInput, ChatTemplate, Extender, NotIncremental, TextError, Tokenizer, encode_chat};
use serde_json::{Value, json};

/// Tokens of chat templates that are not written as `<|…|>`.
const TOKENS: [&str; 30] = [
    "<s>",
    "</s>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[gMASK]",
    "<sop>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
    "<|think|>",
    "<end_of_utterance>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<image>",
];

/// Tokens that end a turn, as the models' generation_config.json name them.
fn ends(template: &str) -> &'static [&'static str] {
    let family = [
        ("gptoss", &["<|return|>", "<|call|>"][..]),
        ("glm4moe", &["<|user|>", "<|observation|>"]),
        ("gemma4", &["<turn|>", "<|tool_response>"]),
        ("diffusion_gemma", &["<turn|>", "<|tool_response>"]),
        ("muse", &["<|eot|>"]),
        ("phi3", &["<|end|>"]),
    ];
    let general: &[&str] = &[
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<｜end▁of▁sentence｜>",
        "<|END_OF_TURN_TOKEN|>",
        "</s>",
        "<end_of_utterance>",
    ];
    family.iter().find(|(start, _)| template.starts_with(start)).map_or(general, |(_, ends)| ends)
}

/// A byte-level tokenizer that knows the control tokens of a template.
pub fn tokenizer_for(source: &str, ends: &[&str]) -> Tokenizer {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(fixture).expect("fixture")).expect("JSON");
    let mut tokens: BTreeSet<String> =
        TOKENS.iter().filter(|token| source.contains(*token)).map(ToString::to_string).collect();
    for (open, close) in [("<|", "|>"), ("<｜", "｜>")] {
        for (at, _) in source.match_indices(open) {
            let rest = &source[at..];
            if let Some(end) = rest.find(close) {
                let token = &rest[..end + close.len()];
                if token.len() < 40 && !token[1..].contains('<') && !token.contains([' ', '\'', '"']) {
                    tokens.insert(token.to_owned());
                }
            }
        }
    }
    tokens.extend(ends.iter().filter(|end| source.contains(*end)).map(ToString::to_string));
    tokens.insert("</s>".to_owned());
    // The crate `tokenizers` numbers special tokens first.
    let is_special = |token: &String| token.contains('|') || token.contains("turn") || token == "</s>";
    let (special, markup): (Vec<String>, Vec<String>) = tokens.into_iter().partition(is_special);
    let tokens = [special, markup].concat();
    let vocab = json["model"]["vocab"].as_object().expect("vocabulary").clone();
    let mut next = vocab.values().filter_map(Value::as_u64).max().expect("ids");
    let ids: Vec<u64> = tokens
        .iter()
        .map(|token| {
            vocab.get(token).and_then(Value::as_u64).unwrap_or_else(|| {
                next += 1;
                next
            })
        })
        .collect();
    json["added_tokens"] = tokens
        .iter()
        .zip(&ids)
        .map(|(token, id)| {
            json!({"id": id, "content": token, "special": is_special(token), "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let is_end = |(token, _): &(&String, &u64)| ends.contains(&token.as_str());
    let ids: Vec<&u64> = tokens.iter().zip(&ids).filter(is_end).map(|(_, id)| id).collect();
    let folder = tempfile::tempdir().expect("folder");
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).expect("writes");
    std::fs::write(folder.path().join("generation_config.json"), json!({"eos_token_id": ids}).to_string())
        .expect("writes");
    Tokenizer::load(folder.path()).expect("loads")
}

/// A template, its tokenizer, and what was proven of them.
pub struct Model {
    pub tokenizer: Arc<Tokenizer>,
    pub template: Arc<ChatTemplate>,
    pub extender: Extender,
}

/// A source of choices: a number below `n`.
pub type Choose<'a> = &'a mut dyn FnMut(usize) -> usize;

/// A conversation, and the lineage that grew with it.
pub struct Lineage {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
    pub ids: Vec<u32>,
}

const WORDS: [&str; 8] =
    ["plan", " the fix", "\nline", " é🎉", "<|im_end|>", "<|im_start|>system\n", "</tool_call>", "  x = 1\n"];

fn words(choose: Choose<'_>, last: usize) -> String {
    let count = 1 + choose(4);
    let text: String = (0..count).map(|_| WORDS[choose(last)]).collect();
    // Most templates trim; what they trim is no part of what this is about.
    format!("w{}w", text.trim())
}

fn call(number: usize, choose: Choose<'_>) -> Value {
    json!({"id": format!("call{number:05}"), "type": "function",
        "function": {"name": "run", "arguments": json!({"command": words(choose, 4)}).to_string()}})
}

impl Model {
    /// A model of this template, if it can be continued.
    pub fn new(name: &str, source: &str) -> Result<Self, NotIncremental> {
        let special =
            json!({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"});
        let special = special.as_object().expect("object").clone();
        Self::of(
            tokenizer_for(source, ends(name)),
            ChatTemplate::from_source(source, special).expect("parses"),
        )
    }

    pub fn of(tokenizer: Tokenizer, template: ChatTemplate) -> Result<Self, NotIncremental> {
        let (tokenizer, template) = (Arc::new(tokenizer), Arc::new(template));
        let extender = Extender::prove(tokenizer.clone(), template.clone(), None)?;
        Ok(Self { tokenizer, template, extender })
    }

    pub fn input<'a>(
        &self,
        messages: &'a [Value],
        tools: Option<&'a [Value]>,
        prompt: bool,
    ) -> ChatInput<'a> {
        ChatInput { messages, tools, add_generation_prompt: prompt, template_kwargs: None }
    }

    /// The ids of the whole conversation, to its next turn.
    pub fn whole(&self, messages: &[Value], tools: Option<&[Value]>) -> Result<Vec<u32>, TextError> {
        encode_chat(&self.tokenizer, &self.template, &self.input(messages, tools, true))
    }

    /// What the model samples for the last message: what the template writes behind the prompt, to the end token.
    /// `None` where the template does not go on from the prompt.
    fn sampled(&self, messages: &[Value], tools: Option<&[Value]>) -> Option<Vec<u32>> {
        let prompt = self.whole(&messages[..messages.len() - 1], tools).ok()?;
        let turn = encode_chat(&self.tokenizer, &self.template, &self.input(messages, tools, false)).ok()?;
        let sampled = turn.strip_prefix(&prompt[..])?;
        let end = sampled.iter().position(|id| self.tokenizer.eos_token_ids().contains(id))?;
        Some(sampled[..=end].to_vec())
    }

    /// A conversation of `turns` turns. Each tail is checked against the rendering of the whole conversation. `Err`:
    /// the refusal of a tail, or of a message by the template.
    pub fn lineage(&self, turns: usize, has_calls: bool, choose: Choose<'_>) -> Result<Lineage, String> {
        let tools = (has_calls && choose(2) == 1).then(|| {
            vec![json!({"type": "function", "function": {"name": "run", "description": words(choose, 7),
                "parameters": {"type": "object", "properties": {"command": {"type": "string", "description": "a"}}}}})]
        });
        let mut messages = Vec::new();
        if choose(2) == 1 {
            messages.push(json!({"role": "system", "content": words(choose, 7)}));
        }
        messages.push(json!({"role": "user", "content": words(choose, 7)}));
        let refused = |error: TextError| error.to_string();
        let mut ids = self.whole(&messages, tools.as_deref()).map_err(refused)?;
        for _ in 0..turns {
            let count = if has_calls { choose(3) } else { 0 };
            let content = if count == 0 { words(choose, 4) } else { String::new() };
            let mut turn = json!({"role": "assistant", "content": content});
            if count > 0 {
                turn["tool_calls"] = (0..count).map(|number| call(number, choose)).collect();
            }
            messages.push(turn);
            let Some(mut sampled) = self.sampled(&messages, tools.as_deref()) else {
                return Err("the template does not go on from its prompt".to_owned());
            };
            if choose(4) == 0 {
                sampled.pop();
            }
            let answered = messages.len();
            messages.extend((0..count).map(|number| {
                json!({"role": "tool", "name": "run", "tool_call_id": format!("call{number:05}"), "content": words(choose, 7)})
            }));
            if count == 0 || choose(4) == 0 {
                messages.push(json!({"role": "user", "content": words(choose, 7)}));
            }
            let input = self.input(&messages, tools.as_deref(), true);
            let tail = self.extender.tail(&sampled, answered, &input).map_err(refused)?;
            let whole = self.whole(&messages, tools.as_deref()).map_err(refused)?;
            assert!(whole.ends_with(&tail), "{}", self.tokenizer.decode(&tail, false));
            ids.extend(sampled);
            ids.extend(tail);
        }
        Ok(Lineage { messages, tools, ids })
    }
}

/// The same choices each time: xorshift, from a seed that is not 0.
pub fn choices(mut state: u64) -> impl FnMut(usize) -> usize {
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).expect("31 bits") % below
    }
}
