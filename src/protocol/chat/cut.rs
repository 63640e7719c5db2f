//! What lego caused is cut out of the original bytes of a chat or completions reply (law 5). Nothing is
//! re-serialised.

use crate::protocol::json::{self, Edit, Member, ScanError};

/// The text is no chat reply, so nothing can be cut out of it.
#[derive(Debug, thiserror::Error)]
#[error("the upstream's reply could not be cut: {0}")]
pub struct CutError(#[from] ScanError);

/// How an engine writes a member that nobody asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unasked {
    /// It leaves the member out.
    Absent,
    /// It writes the member with `null`.
    Null,
}

/// What lego added to a request, and so must come out of the reply. `None`, false: the client asked itself, or
/// nobody did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cut {
    /// Ids of sampled tokens, by whatever name.
    pub token_ids: Option<Unasked>,
    /// Ids of the prompt, at the top or in the choices.
    pub prompt_token_ids: Option<Unasked>,
    pub logprobs: Option<Unasked>,
    pub weight_versions: Option<Unasked>,
    /// Expert routing in the choices.
    pub routed_experts: Option<Unasked>,
    /// SGLang's `meta_info` in the choices.
    pub meta_info: Option<Unasked>,
    /// SGLang's extension: ids and routing at the top of a body, or as an event of its own.
    pub sglext: bool,
    /// The engine sends a chunk with an empty text only for its ids.
    pub empty_text: bool,
    /// `usage` of a stream.
    pub usage: bool,
    /// Reasoning that the client did not want.
    pub reasoning: bool,
    /// The name that the client asked for, to be echoed.
    pub model: Option<String>,
}

impl Cut {
    /// True if replies pass untouched.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// False if none of the names that would be cut out is in the text: a client that asks for nearly all that lego
    /// wants need not have its reply taken apart.
    fn may_touch(&self, text: &[u8]) -> bool {
        let has = |name: &str| memchr::memmem::find(text, name.as_bytes()).is_some();
        // Names as ends of names, with the quote: `response_token_ids` ends like `token_ids`.
        (self.token_ids.is_some() && has("token_ids\""))
            || (self.prompt_token_ids.is_some() && has("prompt_token_ids\""))
            || (self.logprobs.is_some() && has("logprobs\""))
            || (self.weight_versions.is_some() && has("weight_versions\""))
            || (self.routed_experts.is_some() && has("routed_experts\""))
            || (self.meta_info.is_some() && has("meta_info\""))
            || (self.sglext && (has("sglext\"") || has("output_ids\"")))
            || (self.usage && has("usage\""))
            || (self.reasoning && has("\"reasoning"))
            || self.model.is_some()
    }
}

/// The edits of one event or body.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CutReply {
    /// In ascending order, disjoint.
    pub edits: Vec<Edit>,
    /// The event exists only because of what lego asked for: it is dropped as a whole.
    pub is_dropped: bool,
}

/// What to cut out of a stream's event or a whole body.
///
/// # Errors
/// [`CutError`] when the text is no JSON object.
pub fn cut(text: &[u8], cut: &Cut) -> Result<CutReply, CutError> {
    if text.trim_ascii_start().starts_with(b"{") && !cut.may_touch(text) {
        return Ok(CutReply::default());
    }
    let members = json::members(text, 0)?;
    let mut edits = Vec::new();
    let mut gone: Vec<usize> = Vec::new();
    let mut has_choice = false;
    let mut all_empty = true;
    let mut has_choices = false;
    let mut has_usage = false;
    let mut keeps_usage = false;
    let mut has_ids = false;
    let mut has_bare_ids = false;
    for (index, member) in members.iter().enumerate() {
        match named(text, member) {
            "choices" if text[member.value.start] == b'[' => {
                has_choices = true;
                for choice in json::elements(text, member.value.start)? {
                    has_choice = true;
                    all_empty &= cut_choice(text, choice.start, cut, &mut edits)?;
                }
            }
            "prompt_token_ids" => take(text, member, index, cut.prompt_token_ids, &mut gone, &mut edits),
            "usage" if cut.usage => {
                has_usage |= !is_null(text, member);
                gone.push(index);
            }
            "usage" => keeps_usage |= !is_null(text, member),
            "sglext" if cut.sglext => {
                has_ids |= !is_null(text, member);
                gone.push(index);
            }
            // The extension as an event of its own, `sglext_ids`.
            "output_ids" if cut.sglext => has_bare_ids = true,
            "model" => echo_model(text, member, cut, &mut edits),
            // A stream of Messages names the model in the message that it begins with.
            "message" if cut.model.is_some() && text[member.value.start] == b'{' => {
                let message = json::members(text, member.value.start)?;
                if let Some(model) = json::find(text, &message, "model") {
                    echo_model(text, model, cut, &mut edits);
                }
            }
            _ => {}
        }
    }
    remove(&members, &gone, &mut edits);
    edits.sort_by_key(|edit| edit.span.start);
    let has_extra = has_usage || has_ids || (has_bare_ids && !has_choices);
    let is_extra_event = has_extra && !has_choice && !keeps_usage;
    Ok(CutReply { edits, is_dropped: is_extra_event || (has_choice && all_empty) })
}

/// The name that the client asked for in the place of the upstream's.
fn echo_model(text: &[u8], member: &Member, cut: &Cut, edits: &mut Vec<Edit>) {
    if let Some(model) = &cut.model {
        let name = serde_json::Value::from(model.as_str()).to_string();
        if member.text(text) != name.as_bytes() {
            edits.push(Edit::replace(member.value.clone(), name.into_bytes()));
        }
    }
}

/// Cuts one choice. True if nothing but what lego asked for was in it.
fn cut_choice(text: &[u8], at: usize, cut: &Cut, edits: &mut Vec<Edit>) -> Result<bool, ScanError> {
    let members = json::members(text, at)?;
    let mut gone = Vec::new();
    let mut has_ids = false;
    let mut has_logprobs = false;
    let mut is_finish = false;
    let mut is_delta_empty = false;
    let mut lost_reasoning = false;
    for (index, member) in members.iter().enumerate() {
        match named(text, member) {
            "token_ids" | "response_token_ids" => {
                has_ids |= !is_null(text, member);
                take(text, member, index, cut.token_ids, &mut gone, edits);
            }
            "logprobs" => {
                has_logprobs = !is_null(text, member);
                take(text, member, index, cut.logprobs, &mut gone, edits);
            }
            // In completions every choice has its prompt's ids.
            "prompt_token_ids" => take(text, member, index, cut.prompt_token_ids, &mut gone, edits),
            "weight_versions" => take(text, member, index, cut.weight_versions, &mut gone, edits),
            "routed_experts" => take(text, member, index, cut.routed_experts, &mut gone, edits),
            "meta_info" => take(text, member, index, cut.meta_info, &mut gone, edits),
            "finish_reason" => is_finish = !matches!(member.text(text), b"null" | b"\"\""),
            // Completions: what `delta` is in chat.
            "text" => is_delta_empty = cut.empty_text && member.text(text) == b"\"\"",
            name @ ("delta" | "message") if text[member.value.start] == b'{' => {
                let fields = json::members(text, member.value.start)?;
                let is_reasoning = |field: &Member| {
                    cut.reasoning && matches!(named(text, field), "reasoning" | "reasoning_content")
                };
                lost_reasoning = fields.iter().any(|field| is_reasoning(field) && !is_null(text, field));
                json::remove_members(&fields, edits, is_reasoning);
                let is_nothing = |field: &Member| {
                    let is_empty_text =
                        cut.empty_text && named(text, field) == "content" && field.text(text) == b"\"\"";
                    is_reasoning(field) || is_empty_text
                };
                is_delta_empty = name == "delta" && fields.iter().all(is_nothing);
            }
            _ => {}
        }
    }
    remove(&members, &gone, edits);
    // An engine sends a chunk without any delta only to deliver ids or log-probs: without lego there is none.
    // A client that asked for log-probs itself may be owed it.
    let is_for_ids = has_ids && cut.token_ids.is_some() && (!has_logprobs || cut.logprobs.is_some());
    Ok(is_delta_empty && !is_finish && (is_for_ids || lost_reasoning))
}

fn take(
    text: &[u8],
    member: &Member,
    index: usize,
    unasked: Option<Unasked>,
    gone: &mut Vec<usize>,
    edits: &mut Vec<Edit>,
) {
    match unasked {
        // A null was the engine's own: it writes it asked or not.
        None => {}
        Some(_) if is_null(text, member) => {}
        Some(Unasked::Absent) => gone.push(index),
        Some(Unasked::Null) => edits.push(Edit::replace(member.value.clone(), &b"null"[..])),
    }
}

fn remove(members: &[Member], gone: &[usize], edits: &mut Vec<Edit>) {
    if !gone.is_empty() {
        let starts: Vec<usize> = gone.iter().map(|&index| members[index].key.start).collect();
        json::remove_members(members, edits, |member| starts.contains(&member.key.start));
    }
}

fn named<'a>(text: &'a [u8], member: &Member) -> &'a str {
    // Engines do not escape the names that matter here.
    std::str::from_utf8(&text[member.key.start + 1..member.key.end - 1]).unwrap_or_default()
}

fn is_null(text: &[u8], member: &Member) -> bool {
    member.text(text) == b"null"
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn all(unasked: Unasked) -> Cut {
        Cut {
            token_ids: Some(unasked),
            prompt_token_ids: Some(unasked),
            logprobs: Some(Unasked::Null),
            weight_versions: Some(unasked),
            usage: true,
            ..Cut::default()
        }
    }

    fn fixture(name: &str) -> String {
        let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).expect("fixture")
    }

    fn events(name: &str) -> Vec<String> {
        fixture(name).lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    #[test]
    fn cutting_a_stream_equals_deleting_from_the_parsed_stream() {
        for name in
            ["vllm_chat_stream.sse", "vllm_chat_tools_stream.sse", "openai_chat_stream_nologprobs.sse"]
        {
            let mut kept = 0;
            for text in events(name).iter().filter(|text| *text != "[DONE]") {
                let result = cut(text.as_bytes(), &all(Unasked::Absent)).expect("chunk");
                let mut expected: Value = serde_json::from_str(text).expect("JSON");
                let top = expected.as_object_mut().expect("object");
                let usage = top.shift_remove("usage").unwrap_or_default();
                if top.get("prompt_token_ids").is_some_and(Value::is_array) {
                    top.shift_remove("prompt_token_ids");
                }
                let mut is_only_ids = false;
                for choice in top["choices"].as_array_mut().expect("choices") {
                    let choice = choice.as_object_mut().expect("choice");
                    choice.insert("logprobs".into(), Value::Null);
                    let ids = choice.shift_remove("token_ids");
                    choice.shift_remove("weight_versions");
                    is_only_ids = ids.is_some()
                        && choice["delta"] == serde_json::json!({})
                        && choice["finish_reason"].is_null();
                }
                let is_usage = !usage.is_null() && top["choices"] == serde_json::json!([]);
                assert_eq!(result.is_dropped, is_only_ids || is_usage, "{text}");
                if !result.is_dropped {
                    kept += 1;
                    let out = json::apply(text.as_bytes(), &result.edits);
                    let expected = serde_json::to_string(&expected).expect("JSON");
                    assert_eq!(String::from_utf8(out).expect("text"), expected);
                }
            }
            assert!(kept > 3);
        }
    }

    #[test]
    fn a_body_keeps_the_nulls_that_the_engine_would_have_written() {
        let text = fixture("vllm_chat.json");
        let result = cut(text.as_bytes(), &Cut { usage: false, ..all(Unasked::Null) }).expect("body");
        assert!(!result.is_dropped);
        let mut expected: Value = serde_json::from_str(&text).expect("JSON");
        expected["prompt_token_ids"] = Value::Null;
        for key in ["token_ids", "logprobs", "weight_versions"] {
            expected["choices"][0][key] = Value::Null;
        }
        let out: Value = serde_json::from_slice(&json::apply(text.as_bytes(), &result.edits)).expect("JSON");
        assert_eq!(out, expected);
    }

    #[test]
    fn what_sglang_was_asked_for_goes_and_what_is_its_own_stays() {
        let wanted = Cut {
            meta_info: Some(Unasked::Absent),
            routed_experts: Some(Unasked::Absent),
            sglext: true,
            usage: false,
            ..all(Unasked::Absent)
        };
        let text = fixture("sglang_chat.json").replace(
            "\"matched_stop\"",
            "\"meta_info\": {\"routed_experts\": \"AAAA\"}, \"routed_experts\": \"AAAA\", \"matched_stop\"",
        );
        let result = cut(text.as_bytes(), &wanted).expect("body");
        assert!(!result.is_dropped);
        let mut expected: Value = serde_json::from_str(&text).expect("JSON");
        expected.as_object_mut().expect("object").shift_remove("sglext");
        expected["choices"][0]["logprobs"] = Value::Null;
        let choice = expected["choices"][0].as_object_mut().expect("choice");
        for key in ["meta_info", "routed_experts", "prompt_token_ids", "response_token_ids"] {
            assert!(choice.shift_remove(key).is_some(), "{key}");
        }
        let out: Value = serde_json::from_slice(&json::apply(text.as_bytes(), &result.edits)).expect("JSON");
        assert_eq!(out, expected);
        assert_eq!(out["metadata"]["weight_version"], "step-42");
        let dropped = |text: &str, wanted: &Cut| cut(text.as_bytes(), wanted).expect("event").is_dropped;
        let extension = events("sglang_chat_stream_sglext.sse")
            .into_iter()
            .find(|text| text.contains("sglext"))
            .expect("the extension's chunk");
        let bare = r#"{"input_ids":[1],"output_ids":[[2]]}"#;
        for event in [extension.as_str(), bare] {
            assert!(dropped(event, &wanted), "{event}");
            assert!(!dropped(event, &Cut { sglext: false, ..wanted.clone() }), "{event}");
        }
        let with_usage = extension.replace("\"usage\":null", "\"usage\":{\"prompt_tokens\":1}");
        assert!(!dropped(&with_usage, &wanted));
    }

    #[test]
    fn unwanted_reasoning_goes_and_the_asked_name_is_echoed() {
        let wanted = Cut { reasoning: true, model: Some("gpt-x".into()), ..Cut::default() };
        let text = br#"{"model":"lego","choices":[{"index":0,"delta":{"reasoning":"hm","content":"a"}}]}"#;
        let result = cut(text, &wanted).expect("chunk");
        assert_eq!(
            String::from_utf8(json::apply(text, &result.edits)).expect("text"),
            r#"{"model":"gpt-x","choices":[{"index":0,"delta":{"content":"a"}}]}"#
        );
        let only =
            br#"{"model":"lego","choices":[{"index":0,"delta":{"reasoning":"hm"},"finish_reason":null}]}"#;
        assert!(cut(only, &wanted).expect("chunk").is_dropped);
    }
}
