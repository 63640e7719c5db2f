//! A reply whose parts are read again later keeps nothing that grows.

use super::Reply;

impl Reply {
    /// About how many bytes [`Reply::forget`] lets go of.
    #[must_use]
    pub fn growing_bytes(&self) -> usize {
        let ids = |list: &Option<Vec<u32>>| list.as_ref().map_or(0, |ids| 4 * ids.len());
        let choices = self.choices.values().map(|choice| {
            let texts = choice.text.len() + choice.reasoning.len() + choice.refusal.len();
            let arguments: usize = choice.tool_calls.iter().map(|call| call.arguments.len()).sum();
            let logprobs = choice.logprobs.as_ref().map_or(0, |values| 8 * values.len());
            let routing = choice.routed_experts.as_ref().map_or(0, String::len);
            let ids = ids(&choice.prompt_token_ids) + ids(&choice.token_ids);
            texts + arguments + logprobs + routing + ids
        });
        ids(&self.prompt_token_ids) + choices.sum::<usize>()
    }

    /// Lets go of what grows with the reply: ids, log-probs, texts, routing. Which choices there are, their finish
    /// reasons, usage and errors stay, and later parts are read all the same.
    pub fn forget(&mut self) {
        let emptied = |list: &mut Option<Vec<u32>>| *list = list.take().map(|_| Vec::new());
        emptied(&mut self.prompt_token_ids);
        for choice in self.choices.values_mut() {
            emptied(&mut choice.prompt_token_ids);
            emptied(&mut choice.token_ids);
            choice.logprobs = choice.logprobs.take().map(|_| Vec::new());
            choice.routed_experts = None;
            for text in [&mut choice.text, &mut choice.reasoning, &mut choice.refusal] {
                *text = String::new();
            }
            for call in &mut choice.tool_calls {
                call.arguments = String::new();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::sse;

    #[test]
    fn what_is_asked_of_a_reply_while_it_comes_is_the_same_and_nothing_grows() {
        let folder = format!("{}/tests/fixtures/wire", env!("CARGO_MANIFEST_DIR"));
        let mut streams = 0;
        for file in std::fs::read_dir(folder).expect("fixtures") {
            let path = file.expect("readable").path();
            if path.extension().is_none_or(|extension| extension != "sse") {
                continue;
            }
            let (mut whole, mut short) = (Reply::default(), Reply::default());
            let mut parser = sse::Parser::new();
            parser.push(&std::fs::read(&path).expect("readable"));
            while let Some(event) = parser.next_event() {
                let (one, other) = (whole.feed(&event.data()), short.feed(&event.data()));
                assert_eq!(one.ok(), other.ok(), "{}", path.display());
                short.forget();
                assert_eq!(whole.is_finished(1), short.is_finished(1));
                assert_eq!((&whole.error, whole.usage), (&short.error, short.usage));
                assert!(whole.choices.keys().eq(short.choices.keys()));
                let pairs = || whole.choices.values().zip(short.choices.values());
                assert!(pairs().all(|(one, other)| one.finish_reason == other.finish_reason));
                for choice in short.choices.values() {
                    let ids = choice.token_ids.as_ref().map_or(0, Vec::capacity);
                    let logprobs = choice.logprobs.as_ref().map_or(0, Vec::capacity);
                    let texts = choice.text.capacity() + choice.reasoning.capacity();
                    assert_eq!((ids, logprobs, texts), (0, 0, 0));
                }
            }
            streams += usize::from(!whole.choices.is_empty());
        }
        assert!(streams > 5, "{streams}");
    }
}
