//! The request: what of it the chat request is made of.

use bytes::Bytes;
use serde_json::value::RawValue;

use super::echo::Echo;
use super::items::Conversation;
use super::names::response_id;
use super::raw::{Fields, Object, compact, decoded, elements, list};
use super::refuse::{invalid, unsupported};
use super::tools::Tools;
use super::writer::Writer;
use crate::protocol::error::ApiError;
use crate::protocol::translate::{ReplyNames, chat_effort};

/// Sampling members that chat engines take beside the protocol's own: passed on as they are.
const EXTRAS: [&str; 11] = [
    "seed",
    "stop",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "chat_template_kwargs",
    "cache_salt",
    "priority",
];

/// What a request says about responses that are kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    /// The response that this one goes on from.
    pub previous_response_id: Option<String>,
    /// The conversation that this response is added to.
    pub conversation: Option<String>,
    /// This response may be gone on from: `store`, which the protocol takes for true when it is left out.
    pub store: bool,
}

impl Kept {
    /// Reads a request's body.
    ///
    /// # Errors
    /// 400 if the body is no JSON object.
    pub fn read(body: &Bytes) -> Result<Self, ApiError> {
        Self::of(&open(body)?)
    }

    fn of(request: &Fields<'_>) -> Result<Self, ApiError> {
        let id = |name: &str, raw: Option<&str>| match raw {
            None => Ok(None),
            Some(raw) => {
                let object = Fields::read(raw).and_then(|object| object.string("id"));
                match object.or_else(|| super::raw::decoded(raw)) {
                    Some(id) => Ok(Some(id)),
                    None => Err(invalid(name, "is not an id")),
                }
            }
        };
        let kept = Self {
            previous_response_id: id("previous_response_id", request.get("previous_response_id"))?,
            conversation: id("conversation", request.get("conversation"))?,
            store: request.get("store") != Some("false"),
        };
        if kept.previous_response_id.is_some() && kept.conversation.is_some() {
            return Err(invalid("conversation", "cannot be given together with `previous_response_id`"));
        }
        Ok(kept)
    }
}

/// A Responses request as a chat request's body, and the writer of its reply.
///
/// `earlier`: the items, each as JSON, that a store has for the request's `previous_response_id` or `conversation`
/// ([`Kept`]); they stand before the request's own. `None`: there is no such response here.
///
/// # Errors
/// 400 for a body that is no Responses request, and for what has no chat form; the message names the place.
pub fn open_call(
    body: &Bytes,
    names: ReplyNames,
    earlier: Option<&[Bytes]>,
) -> Result<(Bytes, Writer), ApiError> {
    let request = open(body)?;
    refuse(&request)?;
    let Some(model) = request.text("model").filter(|model| decoded(model).is_some()) else {
        return Err(invalid("model", "is missing, or not a string of whole characters"));
    };
    let kept = Kept::of(&request)?;
    let tools = Tools::read(request.get("tools"))?;

    let mut conversation = Conversation::default();
    match request.get("instructions") {
        None => {}
        Some(text) if text.starts_with('"') => conversation.add_text("system", text),
        Some(_) => return Err(invalid("instructions", "is not a string")),
    }
    let mut items = add_earlier(&mut conversation, &kept, earlier)?;
    add_input(&mut conversation, request.get("input"), &mut items)?;
    let messages = conversation.end();
    if messages.is_empty() {
        return Err(invalid("input", "is missing or empty: give at least one item"));
    }

    let mut chat = Object::new().raw("model", model).raw("messages", &list(&messages));
    let choice = tools.choice(request.get("tool_choice"))?;
    if !tools.is_empty() {
        chat = chat
            .raw("tools", &tools.chat())
            .maybe("tool_choice", choice.as_deref())
            .maybe("parallel_tool_calls", request.get("parallel_tool_calls"));
    }
    let effort =
        request.get("reasoning").and_then(Fields::read).and_then(|reasoning| reasoning.get("effort"));
    // What is no level is the upstream's to refuse.
    let level = effort.and_then(|effort| serde_json::from_str::<String>(effort).ok());
    let effort = level.and_then(|level| chat_effort(&level)).or(effort);
    let format = response_format(&request)?;
    chat = chat
        .maybe("reasoning_effort", effort)
        .maybe("response_format", format.as_deref())
        .maybe("max_completion_tokens", request.get("max_output_tokens"))
        .maybe("temperature", request.get("temperature"))
        .maybe("top_p", request.get("top_p"));
    for name in EXTRAS {
        chat = chat.maybe(name, request.get(name));
    }
    if request.is_true("stream") {
        chat = chat.raw("stream", "true").raw("stream_options", r#"{"include_usage":true}"#);
    }
    let echo = Echo::new(&request, &names);
    let includes_encrypted = includes(&request, "reasoning.encrypted_content");
    let id = kept.store.then(|| response_id(&names.call_id));
    let writer = Writer::new(names, echo, tools.into_targets(), includes_encrypted, (id, items));
    Ok((Bytes::from(chat.end()), writer))
}

fn open(body: &Bytes) -> Result<Fields<'_>, ApiError> {
    if let Err(error) = serde_json::from_slice::<&RawValue>(body) {
        return Err(invalid("the request body", &format!("is not JSON: {error}")));
    }
    let text = std::str::from_utf8(body).unwrap_or_default();
    Fields::read(text).ok_or_else(|| invalid("the request body", "is not a JSON object"))
}

/// What no chat upstream can be asked.
fn refuse(request: &Fields<'_>) -> Result<(), ApiError> {
    if request.is_true("background") {
        let problem = "is true: this proxy answers in the same request, so leave it out or send false";
        return Err(unsupported("background", problem));
    }
    if request.get("prompt").is_some() {
        return Err(unsupported("prompt", "names a stored prompt, and this proxy has none: send `input`"));
    }
    let asks_logprobs = request.get("top_logprobs").is_some_and(|count| count != "0")
        || includes(request, "message.output_text.logprobs");
    if asks_logprobs {
        let problem = "asks for log-probs, which this proxy gives in the chat protocol only";
        return Err(unsupported("include", problem));
    }
    Ok(())
}

fn includes(request: &Fields<'_>, what: &str) -> bool {
    let list = request.get("include").and_then(elements).unwrap_or_default();
    list.into_iter().any(|name| super::raw::decoded(name).as_deref() == Some(what))
}

/// Puts the earlier items in front; gives them back, for the store.
fn add_earlier(
    conversation: &mut Conversation,
    kept: &Kept,
    earlier: Option<&[Bytes]>,
) -> Result<Vec<Bytes>, ApiError> {
    let id = kept.previous_response_id.as_ref().map(|id| ("previous_response_id", id));
    let id = id.or_else(|| kept.conversation.as_ref().map(|id| ("conversation", id)));
    let Some((name, id)) = id else { return Ok(Vec::new()) };
    let Some(earlier) = earlier else {
        let problem = format!(
            "is {id:?}, and this proxy has no such response: send the whole conversation in `input`, with `store` false"
        );
        return Err(unsupported(name, &problem));
    };
    for (index, item) in earlier.iter().enumerate() {
        let path = format!("{name}: item {index} of {id:?}");
        let text = serde_json::from_slice::<&RawValue>(item).map_err(|_| invalid(&path, "is not JSON"))?;
        conversation.add(text.get(), &path)?;
    }
    Ok(earlier.to_vec())
}

fn add_input(
    conversation: &mut Conversation,
    input: Option<&str>,
    items: &mut Vec<Bytes>,
) -> Result<(), ApiError> {
    let Some(input) = input else { return Ok(()) };
    if input.starts_with('"') {
        conversation.add_text("user", input);
        let part = Object::new().text("type", "input_text").raw("text", input).end();
        let item = Object::new().text("type", "message").text("role", "user").raw("content", &list(&[part]));
        items.push(Bytes::from(item.end()));
        return Ok(());
    }
    let Some(list) = elements(input) else {
        return Err(invalid("input", "is neither a string nor a list of items"));
    };
    for (index, item) in list.into_iter().enumerate() {
        conversation.add(item, &format!("input[{index}]"))?;
        items.push(Bytes::from(compact(item)));
    }
    Ok(())
}

/// `text.format` as chat's `response_format`; `None` for plain text.
fn response_format(request: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let format = request.get("text").and_then(Fields::read).and_then(|text| text.get("format"));
    let Some(raw) = format else { return Ok(None) };
    let Some(format) = Fields::read(raw) else {
        return Err(invalid("text.format", "is not an object"));
    };
    match format.string("type").as_deref() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Object::new().text("type", "json_object").end())),
        Some("json_schema") => {
            let Some(schema) = format.get("schema") else {
                return Err(invalid("text.format", "is a json_schema without a `schema`"));
            };
            let inner = Object::new()
                .raw("name", format.get("name").unwrap_or("\"response\""))
                .maybe("description", format.get("description"))
                .raw("schema", schema)
                .maybe("strict", format.get("strict"))
                .end();
            Ok(Some(Object::new().text("type", "json_schema").raw("json_schema", &inner).end()))
        }
        other => {
            let kind = other.unwrap_or_default();
            Err(unsupported("text.format", &format!("is of type {kind:?}, which has no chat form")))
        }
    }
}
