//! The recorded histories of real harnesses give the trees that were written down before the builder read them
//! (`tests/fixtures/trees/README.md`), rendered as it says.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use lego::config::SideKind;
use lego::protocol::translate::ReplyNames;
use lego::protocol::{messages, responses};
use lego::record::{Call, CallId};
use lego::trajectory::{BreakReason, LineageKind, LineageRow, Lineages, ParentBy, lineages};
use serde_json::{Value, json};

use crate::chat::table_of;
use crate::histories::{Tree, read, trees};

/// Its calls, as captured with a template, by their numbers.
struct Built {
    calls: BTreeMap<u64, Arc<Call>>,
    found: Lineages,
    rows: Vec<LineageRow>,
}

fn decode(ids: &[u32]) -> String {
    String::from_utf8_lossy(&ids.iter().map(|id| *id as u8).collect::<Vec<_>>()).into_owned()
}

/// Of the one tree with ids of its own: any texts that say what the README says of them.
fn decode_given(ids: &[u32]) -> String {
    let text = |id: &u32| match id {
        20 => "re".to_owned(),
        21 => "tokenised".to_owned(),
        22 => "retokenised".to_owned(),
        other => format!("<{other}>"),
    };
    ids.iter().map(text).collect()
}

/// Builds what a tree's calls give.
fn build(tree: &Tree, rendering: &str) -> Built {
    let calls = tree.calls().iter();
    let calls: BTreeMap<u64, Arc<Call>> = calls
        .map(|call| (call["call"].as_u64().expect("a number"), Arc::new(tree.call(call, rendering))))
        .collect();
    let all: Vec<Arc<Call>> = calls.values().rev().cloned().collect();
    let found = lineages(&all);
    let decode: lego::trajectory::Decode<'_> = if rendering == "given" { &decode_given } else { &decode };
    let rows =
        found.sessions().next().map(|session| table_of(&all, session, Some(decode))).unwrap_or_default();
    Built { calls, found, rows }
}

/// Where in the request's own list the message of the chat request is that it was translated to: `own`, if it is a
/// part of that.
fn own_message(tree: &Tree, call: u64, message: u32, own: Option<u64>) -> Option<u64> {
    let request = read(tree.calls()[call as usize - 1]["request"].as_str().expect("a request"));
    let list = if tree.wire() == "responses" { "input" } else { "messages" };
    let all = request[list].as_array().expect("a list").len();
    // With a last message to be answered, which is not counted.
    let count = |first: usize| -> usize {
        let mut part = request.clone();
        let messages = part[list].as_array_mut().expect("a list");
        messages.truncate(first);
        messages.push(json!({"role": "user", "content": "x"}));
        let names = ReplyNames { call_id: String::new(), model: String::new(), created: 0 };
        let body = Bytes::from(part.to_string());
        let chat = match tree.wire() {
            "messages" => messages::translate(&body, names).map(|translation| translation.chat),
            "responses" => responses::translate(&body, names, None).map(|translation| translation.chat),
            _ => Ok(body),
        };
        let chat: Value = serde_json::from_slice(&chat.expect("a request")).expect("JSON");
        chat["messages"].as_array().expect("a list").len() - 1
    };
    let is_part = |place: usize| {
        let (before, with) = (count(place), count(place + 1));
        // An item may go on with the message that the one before began.
        (before.min(with - 1)..with).contains(&(message as usize))
    };
    own.filter(|own| (*own as usize) < all && is_part(*own as usize))
        .or_else(|| (0..all).find(|place| is_part(*place)).map(|place| place as u64))
}

fn kind(word: &str) -> LineageKind {
    match word {
        "main" => LineageKind::Main,
        "sub_agent" => LineageKind::Beside(SideKind::SubAgent),
        "side" => LineageKind::Beside(SideKind::Side),
        "compaction" => LineageKind::Beside(SideKind::Compaction),
        other => panic!("{other}"),
    }
}

/// The word of the trees.
fn word(reason: BreakReason) -> &'static str {
    match reason {
        BreakReason::ReasoningDropped => "template dropped reasoning",
        BreakReason::ArgumentsReserialised => "tool arguments re-serialised",
        BreakReason::Retokenised => "text re-tokenised",
        BreakReason::SystemChanged => "system text changed",
        BreakReason::ToolsChanged => "tools changed",
        BreakReason::HistoryCompacted => "history compacted",
        BreakReason::MessageEdited => "message edited",
        // The trees have no word of its own for this.
        BreakReason::WhitespaceChanged | BreakReason::Unknown => "unknown",
    }
}

impl Built {
    fn number(&self, id: CallId) -> u64 {
        *self.calls.iter().find(|(_, call)| call.call_id == id).expect("of the tree").0
    }

    /// Own calls of each lineage.
    fn chains(&self) -> Vec<Vec<u64>> {
        let of = |lineage: &lego::trajectory::Lineage| {
            lineage.own().map(|one| self.number(one.call.call_id)).collect()
        };
        self.found.lineages.iter().map(of).collect()
    }
}

fn numbers(list: &Value) -> Vec<u64> {
    serde_json::from_value(list.clone()).expect("numbers")
}

#[test]
fn recorded_histories_build_the_trees_that_were_written_down() {
    let mut differences = vec![];
    let (mut compared, mut links) = (0, vec![]);
    for tree in trees() {
        for (rendering, level) in tree.tree["tokens"].as_object().expect("renderings") {
            compared += 1;
            let mut differ = |what: String| differences.push(format!("{} {rendering}: {what}", tree.name));
            let built = build(&tree, rendering);
            let expected = level["lineages"].as_array().expect("lineages");
            let as_set = |chains: Vec<Vec<u64>>| chains.into_iter().collect::<BTreeSet<_>>();
            let chains = as_set(built.chains());
            let own = as_set(expected.iter().map(|lineage| numbers(&lineage["calls"])).collect());
            let mut right = vec![own.clone()];
            for other in level["or"].as_array().into_iter().flatten() {
                right.push(as_set(other.as_array().expect("lineages").iter().map(numbers).collect()));
            }
            if !right.contains(&chains) {
                differ(format!("lineages {chains:?}, expected {right:?}"));
                continue;
            }
            let superseded: Vec<u64> =
                built.found.set_aside.iter().map(|one| built.number(one.entry.call_id)).collect();
            if level["superseded"].is_array() && superseded != numbers(&level["superseded"]) {
                differ(format!("superseded {superseded:?}"));
            }
            for row in &built.rows {
                let first = built.number(row.first_call_id);
                let call = &tree.calls()[first as usize - 1];
                let is_known = !(tree.name == "aider" && first == 2);
                if is_known && row.kind != kind(call["kind"].as_str().expect("a kind")) {
                    differ(format!("call {first} is {}, expected {}", row.kind.as_str(), call["kind"]));
                }
                let parent = row.parent.map(|parent| built.number(parent.call_id));
                let cause = call["caused_by"].as_u64();
                let is_cause = row.parent.is_none_or(|parent| {
                    matches!(parent.by, ParentBy::Record | ParentBy::Reply | ParentBy::ToolCall)
                });
                if !is_cause {
                    let known = [&call["parent"], &call["retry_of"]].map(Value::as_u64);
                    if !known.contains(&parent) {
                        differ(format!("call {first} goes on from {parent:?}, expected {known:?}"));
                    }
                } else if parent != cause {
                    match parent {
                        Some(other) => {
                            differ(format!("call {first} is caused by {other}, expected {cause:?}"))
                        }
                        None => links.push(format!("{} {rendering} {first}", tree.name)),
                    }
                }
                let lineage = expected.iter().find(|lineage| lineage["calls"][0] == first);
                let expected = lineage.map_or(&Value::Null, |lineage| &lineage["break"]);
                let Some(broke) = row.broke else {
                    if !expected.is_null() {
                        differ(format!("call {first} has no break, expected {expected}"));
                    }
                    continue;
                };
                let reason = word(broke.reason);
                let accepted = expected["accept"].as_array().into_iter().flatten();
                let is_right = expected["reason"] == reason || accepted.clone().any(|one| *one == reason);
                if !is_right {
                    differ(format!("call {first}: {reason}, expected {expected}"));
                    continue;
                }
                let from = built.number(broke.from);
                let of_compaction = tree.calls()[from as usize - 1]["kind"] == "compaction";
                if expected["from"] != from && !of_compaction {
                    differ(format!("call {first} breaks from {from}, expected {expected}"));
                }
                let own = expected["message"].as_u64();
                let message = broke.message.and_then(|message| own_message(&tree, first, message, own));
                // Of the system's own text in front of the messages nobody says where it is.
                let in_front = expected["message"].is_null() && broke.reason == BreakReason::SystemChanged;
                if message != expected["message"].as_u64()
                    && !in_front
                    && broke.reason != BreakReason::Unknown
                {
                    differ(format!(
                        "call {first} differs at {message:?} ({:?}), expected {expected}",
                        broke.message
                    ));
                }
                if let Some(position) = expected["position"].as_u64()
                    && position != broke.token.index() as u64
                {
                    differ(format!("call {first} differs at token {}", broke.token.index()));
                }
            }
        }
    }
    assert_eq!(compared, 169);
    // aider's commit message is asked for without tools, as all that aider asks: nothing tells it from another talk.
    assert_eq!(links, ["aider as_is 2", "aider qwen3 2", "aider drop_all 2"]);
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}
