//! How a reply ended and what it used, in the terms of Messages.

use serde_json::Value;

use crate::protocol::chat::{ReplyUsage, ToolCall};

/// Why the model stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stop {
    pub reason: &'static str,
    /// The stop sequence that matched.
    pub sequence: Option<String>,
}

impl Stop {
    const fn plain(reason: &'static str) -> Self {
        Self { reason, sequence: None }
    }
}

/// The end of a chat choice as Messages says it. `matched` is the stop string that the engine names.
///
/// What is no end of the model's own (`abort`, `error`, a reason that nobody knows, none at all) is an error with
/// its reason: a client must not take it for a finished turn.
pub(super) fn stop(
    finish_reason: Option<&str>,
    matched: Option<&str>,
    is_refusal: bool,
    calls: &[ToolCall],
) -> Result<Stop, String> {
    let are_whole = !calls.is_empty() && calls.iter().all(|call| is_whole(&call.arguments));
    match finish_reason {
        // A limit ended it: what came is cut, calls and all. `repetition` is vLLM's limit on repeated text.
        Some("length" | "repetition") => Ok(Stop::plain("max_tokens")),
        Some("content_filter" | "refusal") => Ok(Stop::plain("refusal")),
        Some("stop" | "tool_calls" | "eos" | "eos_token") => Ok(match matched {
            // A stop string that cut a call's arguments is what ended the turn.
            Some(sequence) if !are_whole => {
                Stop { reason: "stop_sequence", sequence: Some(sequence.to_owned()) }
            }
            // Engines end a forced tool with `stop`.
            _ if !calls.is_empty() => Stop::plain("tool_use"),
            _ if is_refusal => Stop::plain("refusal"),
            _ => Stop::plain("end_turn"),
        }),
        Some("abort") => Err("the engine aborted the call".to_owned()),
        Some(reason) => {
            Err(format!("the upstream ended the call with finish_reason {}", Value::from(reason)))
        }
        None => Err("the upstream's reply has no finish_reason".to_owned()),
    }
}

/// True if arguments are nothing, or one whole JSON object.
pub(super) fn is_whole(arguments: &str) -> bool {
    arguments.trim().is_empty() || is_object(arguments)
}

/// True if the text is one whole JSON object.
pub(super) fn is_object(text: &str) -> bool {
    text.trim_start().starts_with('{') && serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

/// Token counts as Messages splits them. A count that nobody reported is 0, as the protocol has no null there; the
/// capture keeps what was reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MessageUsage {
    /// Prompt tokens that came from no cache.
    pub input_tokens: u64,
    pub cache_read_input_tokens: u64,
    pub output_tokens: u64,
}

impl MessageUsage {
    /// Chat counts cached tokens as prompt tokens, Messages does not.
    pub fn of(usage: Option<ReplyUsage>) -> Self {
        let Some(usage) = usage else {
            return Self::default();
        };
        let cached = usage.cached_tokens.unwrap_or(0);
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(cached),
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens,
        }
    }

    /// As before the first token.
    pub const fn at_start(self) -> Self {
        Self { output_tokens: 0, ..self }
    }

    pub fn json(&self) -> String {
        format!(
            "{{\"input_tokens\":{},\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":{},\"output_tokens\":{}}}",
            self.input_tokens, self.cache_read_input_tokens, self.output_tokens
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(arguments: &str) -> ToolCall {
        ToolCall::new("x", "f", arguments)
    }

    #[test]
    fn every_finish_reason_has_its_stop_reason_or_is_an_error() {
        let whole = [call("{\"a\":1}"), call("")];
        let cut = [call("{\"a\":1}"), call("{\"b\":")];
        let cases = [
            (Some("stop"), None, &[][..], Some("end_turn")),
            (Some("stop"), Some("END"), &[][..], Some("stop_sequence")),
            (Some("length"), Some("END"), &whole[..], Some("max_tokens")),
            (Some("length"), None, &[][..], Some("max_tokens")),
            (Some("tool_calls"), None, &whole[..], Some("tool_use")),
            // A forced tool.
            (Some("stop"), None, &whole[..], Some("tool_use")),
            (Some("stop"), Some("END"), &whole[..], Some("tool_use")),
            (Some("stop"), Some("END"), &cut[..], Some("stop_sequence")),
            (Some("tool_calls"), None, &cut[..], Some("tool_use")),
            (Some("tool_calls"), None, &[][..], Some("end_turn")),
            (Some("content_filter"), None, &[][..], Some("refusal")),
            (Some("repetition"), None, &[][..], Some("max_tokens")),
            (Some("abort"), None, &[][..], None),
            (Some("abort"), None, &whole[..], None),
            (Some("error"), None, &[][..], None),
            (Some("weird"), None, &[][..], None),
            (None, None, &[][..], None),
        ];
        for (finish, matched, calls, expected) in cases {
            let stop = stop(finish, matched, false, calls).ok();
            assert_eq!(stop.as_ref().map(|stop| stop.reason), expected, "{finish:?} {matched:?}");
            let is_sequence = expected == Some("stop_sequence");
            assert_eq!(stop.and_then(|stop| stop.sequence), is_sequence.then(|| "END".to_owned()));
        }
        assert_eq!(stop(Some("stop"), None, true, &[]).expect("a stop").reason, "refusal");
    }

    #[test]
    fn b14_cached_tokens_are_taken_out_once() {
        let usage = |prompt, cached| {
            MessageUsage::of(Some(ReplyUsage {
                prompt_tokens: prompt,
                completion_tokens: 3,
                cached_tokens: cached,
                reasoning_tokens: None,
            }))
        };
        let read = |prompt, cached| {
            let usage = usage(prompt, cached);
            (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens)
        };
        assert_eq!(read(10_000, Some(9_993)), (7, 9_993, 3));
        assert_eq!(read(10_000, None), (10_000, 0, 3));
        assert_eq!(read(5, Some(9)), (0, 9, 3));
    }
}
