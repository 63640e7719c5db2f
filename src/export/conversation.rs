//! Calls to conversations: which call goes on from which, by the messages that each was asked.
//!
//! Invariant: a conversation is what one call was asked, message by message as it was sent, and that call's reply. The
//! replies of the calls before it stand in it as the harness sent them back.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::counts::{Counts, WRITTEN};
use super::episodes::{Episode, Episodes};
use super::index::Sessions;
use super::messages::{Asked, asked, defect, is_same_reply, reply};
use super::output::Output;
use super::{ExportError, Format, atif, sharegpt};
use crate::record::{Call, CallId, SessionId};

/// Bucket of a session with nothing that could be written.
const NO_CONVERSATION: &str = "no conversation";

/// A call among those of its session.
struct Node<'a> {
    call: &'a Arc<Call>,
    /// Of tools and messages: the `i`-th says what the first `i` messages are.
    prints: Vec<[u8; 32]>,
    roles: Vec<bool>,
}

impl Node<'_> {
    fn end(&self) -> [u8; 32] {
        self.prints[self.prints.len() - 1]
    }
}

/// A reply in a conversation.
pub(super) struct Turn {
    pub call: Arc<Call>,
    /// Which message it is.
    pub at: usize,
    /// It is in an earlier conversation of the session too.
    pub is_shared: bool,
}

/// What one call was asked, and its reply.
pub(super) struct Conversation {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
    /// Calls whose replies are among the messages, the last of them with its own.
    pub turns: Vec<Turn>,
}

/// The conversations of a session, and why some calls are in none.
#[derive(Default)]
struct Found {
    conversations: Vec<Conversation>,
    left_out: HashMap<(CallId, u16), String>,
}

fn name(call: &Call) -> (CallId, u16) {
    (call.call_id, call.choice_index)
}

fn prints(asked: &Asked) -> Vec<[u8; 32]> {
    let step = |before: &[u8], value: &str| -> [u8; 32] {
        Sha256::new().chain_update(before).chain_update(value).finalize().into()
    };
    let tools = json!(asked.tools).to_string();
    let mut prints = vec![step(&[], &tools)];
    for message in &asked.messages {
        prints.push(step(&prints[prints.len() - 1], &message.to_string()));
    }
    prints
}

/// Finds the conversations of one session's calls, which are in the order they were made.
fn conversations(calls: &[Arc<Call>]) -> Found {
    let mut found = Found::default();
    let mut nodes: Vec<Node<'_>> = vec![];
    for call in calls {
        let defect = defect(call).map(Err).unwrap_or_else(|| asked(call).map_err(str::to_owned));
        match defect {
            Ok(asked) => {
                let roles = asked.messages.iter().map(|message| message["role"] == "assistant").collect();
                nodes.push(Node { call, prints: prints(&asked), roles });
            }
            Err(reason) => {
                found.left_out.insert(name(call), reason);
            }
        }
    }
    let mut by_end: HashMap<[u8; 32], Vec<usize>> = HashMap::new();
    for (index, node) in nodes.iter().enumerate() {
        by_end.entry(node.end()).or_default().push(index);
    }
    // A call with each call that it may go on from, the latest of the conversation first.
    let continued: BTreeSet<[u8; 32]> = nodes
        .iter()
        .flat_map(|node| (1..node.prints.len() - 1).filter(|at| node.roles[*at]).map(|at| node.prints[at]))
        .filter(|print| by_end.contains_key(print))
        .collect();
    let mut taken: BTreeSet<(CallId, u16)> = BTreeSet::new();
    for (index, node) in nodes.iter().enumerate() {
        let alike = &by_end[&node.end()];
        if continued.contains(&node.end()) {
            continue;
        }
        // Of calls with one prompt the last counts, and of its choices the first.
        let last = alike.iter().max_by_key(|other| {
            let call = nodes[**other].call;
            (call.received_at, call.call_id, std::cmp::Reverse(call.choice_index))
        });
        if last == Some(&index) {
            let conversation = conversation(node, &nodes, &by_end, &taken);
            taken.extend(conversation.turns.iter().map(|turn| name(&turn.call)));
            found.conversations.push(conversation);
        }
    }
    for node in &nodes {
        if !taken.contains(&name(node.call)) {
            let is_sister = taken.iter().any(|(id, _)| *id == node.call.call_id);
            let reason = if is_sister { "another choice of the call was used" } else { "superseded" };
            found.left_out.insert(name(node.call), reason.to_owned());
        }
    }
    found
}

/// The conversation that ends with the call's reply.
fn conversation(
    leaf: &Node<'_>,
    nodes: &[Node<'_>],
    by_end: &HashMap<[u8; 32], Vec<usize>>,
    taken: &BTreeSet<(CallId, u16)>,
) -> Conversation {
    // It could be read when it was found.
    let Asked { mut messages, tools } = asked(leaf.call).unwrap_or(Asked { messages: vec![], tools: None });
    let mut turns = vec![];
    for (at, message) in messages.iter().enumerate().skip(1).filter(|(at, _)| leaf.roles[*at]) {
        let alike = by_end.get(&leaf.prints[at]).map_or(&[][..], Vec::as_slice);
        let is_it = |index: &&usize| is_same_reply(message, &reply(nodes[**index].call));
        // What the harness changed is nobody's for sure, unless there was only one.
        let of = alike.iter().rfind(is_it).or(match alike {
            [only] => Some(only),
            _ => None,
        });
        turns.extend(of.map(|index| Turn {
            call: Arc::clone(nodes[*index].call),
            at,
            is_shared: taken.contains(&name(nodes[*index].call)),
        }));
    }
    let at = messages.len();
    messages.push(reply(leaf.call));
    turns.push(Turn { call: Arc::clone(leaf.call), at, is_shared: false });
    Conversation { messages, tools, turns }
}

/// A conversation's line.
#[derive(Serialize)]
struct Line {
    #[serde(flatten)]
    form: Map<String, Value>,
    #[serde(flatten)]
    columns: Map<String, Value>,
}

/// What a form makes of a conversation.
fn form(
    format: Format,
    session: &SessionId,
    index: usize,
    found: Conversation,
    columns: &mut Map<String, Value>,
) -> Result<Map<String, Value>, &'static str> {
    let calls = found.turns.iter().map(|turn| {
        json!({"call_id": turn.call.call_id, "choice_index": turn.call.choice_index, "message": turn.at})
    });
    columns.insert("calls".to_owned(), calls.collect::<Vec<_>>().into());
    let form = match format {
        Format::Sharegpt => {
            let tools = found.tools.as_ref().map(|tools| json!(tools).to_string());
            json!({"conversations": sharegpt::turns(&found.messages)?, "tools": tools})
        }
        Format::Atif => {
            let columns = std::mem::take(columns);
            atif::trajectory(session, index, &found, columns)
        }
        _ => json!({"messages": found.messages, "tools": found.tools}),
    };
    match form {
        Value::Object(form) => Ok(form),
        _ => Err("no object"),
    }
}

/// Writes the conversations of all sessions.
pub(super) fn write(
    sessions: &Sessions<'_>,
    episodes: &Episodes,
    format: Format,
    output: &mut Output,
    counts: &mut Counts,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ExportError> {
    sessions.each(episodes, true, counts, progress, &mut |id, calls, counts| {
        let written = write_session(id, calls, &episodes.by_session[id], format, output, counts)?;
        Ok(if written > 0 { WRITTEN } else { NO_CONVERSATION })
    })
}

fn write_session(
    id: &SessionId,
    calls: &[Arc<Call>],
    episode: &Episode,
    format: Format,
    output: &mut Output,
    counts: &mut Counts,
) -> Result<usize, ExportError> {
    let Found { conversations, mut left_out } = conversations(calls);
    let mut lines = vec![];
    for (index, conversation) in conversations.into_iter().enumerate() {
        counts.rows.all += 1;
        let names: Vec<_> = conversation.turns.iter().map(|turn| name(&turn.call)).collect();
        let mut columns = episode.columns(id);
        match form(format, id, index, conversation, &mut columns) {
            Ok(form) => {
                names.iter().for_each(|name| {
                    left_out.remove(name);
                });
                counts.rows.add(WRITTEN, 1);
                lines.push((names, Line { form, columns }));
            }
            Err(reason) => {
                counts.rows.add(reason, 1);
                for name in names {
                    let is_written = lines.iter().any(|(of, _)| of.contains(&name));
                    if !is_written {
                        left_out.insert(name, reason.to_owned());
                    }
                }
            }
        }
    }
    for call in calls {
        counts.calls.add(left_out.get(&name(call)).map_or(WRITTEN, String::as_str), 1);
    }
    let of = lines.len();
    for (index, (_, mut line)) in lines.into_iter().enumerate() {
        let place = json!({"conversation_index": index, "episode_conversations": of});
        let Value::Object(place) = place else { continue };
        match line.form.get_mut("extra").and_then(Value::as_object_mut) {
            // ATIF has a place for what is not its own.
            Some(extra) => extra.extend(place),
            None => line.columns.extend(place),
        }
        output.line(&line)?;
    }
    Ok(of)
}
