//! A reply whose parts are read again later keeps nothing that grows.

use super::Reply;

impl Reply {
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
