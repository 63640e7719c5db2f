//! What a request's conversation is known by.

use serde_json::Value;

use super::lineages::{Key, Lineages, Spelling};
use super::{Origin, request};
use crate::protocol::chat::Request;
use crate::protocol::said::Said;
use crate::protocol::volatile::Rules;

/// A request's conversation before its first message, and up to each one.
pub(super) struct Keys {
    pub(super) whole: Vec<Key>,
    /// Whatever the tools and the template's parameters.
    pub(super) bare: Vec<Key>,
    /// Also whatever the first message, if it is the system's.
    pub(super) talk: Vec<Key>,
    /// Of each message.
    pub(super) spelled: Vec<Spelling>,
}

impl Keys {
    pub(super) fn of(
        request: &Request,
        conversation: &request::Conversation,
        volatile: &Rules,
    ) -> Result<Self, String> {
        let shape = serde_json::json!([conversation.tools, conversation.kwargs]).to_string();
        let begin = |shape: &str| vec![Key::of_shape(shape.as_bytes())];
        let mut keys =
            Self { whole: begin(&shape), bare: begin("bare"), talk: begin("talk"), spelled: vec![] };
        for (index, message) in request.messages().into_iter().enumerate() {
            let compared = volatile.compared(&message);
            let message: Value = serde_json::from_slice(&compared).map_err(|error| error.to_string())?;
            let said =
                Said::read(&message).ok_or_else(|| format!("`messages[{index}]`, which has no role"))?;
            let identity = said.identity();
            keys.spelled.push(Spelling::of(&said));
            let is_system = index == 0 && message["role"] == "system";
            for chain in [&mut keys.whole, &mut keys.bare, &mut keys.talk] {
                chain.push(chain[chain.len() - 1].with(&identity));
            }
            if is_system {
                keys.talk = begin("talk");
            }
        }
        Ok(keys)
    }

    /// Why the request goes on from nothing.
    pub(super) fn origin(&self, lineages: &Lineages) -> Origin {
        let seen = |chain: &[Key]| lineages.seen(chain);
        match seen(&self.whole) {
            _ if lineages.is_empty() => Origin::First,
            0 if seen(&self.bare) > 0 => Origin::ToolsChanged,
            0 if seen(&self.talk) > 0 => Origin::SystemChanged,
            0 => Origin::Other,
            all if all + 1 == self.whole.len() => Origin::Repeated,
            _ => Origin::MessageChanged,
        }
    }
}
