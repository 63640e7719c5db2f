//! What a call's choices were sampled after.

use super::Open;
use crate::protocol::chat::Reply;
use crate::protocol::completions::Prompt;
use crate::record::IdsSource;

impl Open {
    /// The ids of a choice's prompt: as the engine told them, else as it was sent them.
    pub(super) fn prompt_ids<'a>(&'a self, reply: &'a Reply, choice: u16) -> (Option<&'a [u32]>, IdsSource) {
        let each = self.request.n_each;
        if let Some(ids) = reply.prompt_ids_of(choice, each) {
            return (Some(ids), IdsSource::Engine);
        }
        let prompt = u64::from(choice).checked_div(each).and_then(|prompt| usize::try_from(prompt).ok());
        match prompt.and_then(|prompt| self.prepared.sent_prompts.get(prompt)) {
            Some(Prompt::TokenIds(ids)) => (Some(ids), IdsSource::SentByUs),
            _ => (None, IdsSource::Absent),
        }
    }

    /// Tokens of the prompts of a call that has several, as usage counts them: of those that have an output yet.
    pub(super) fn prompt_tokens(&self, reply: &Reply) -> Option<u64> {
        let each = self.request.n_each;
        self.request.n.checked_div(each).filter(|prompts| *prompts > 1)?;
        let mut prompts: Vec<(u64, u16)> =
            reply.choices.keys().map(|choice| (u64::from(*choice) / each, *choice)).collect();
        prompts.dedup_by_key(|(prompt, _)| *prompt);
        prompts.into_iter().map(|(_, choice)| Some(self.prompt_ids(reply, choice).0?.len() as u64)).sum()
    }
}
