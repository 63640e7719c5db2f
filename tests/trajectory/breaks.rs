//! Why a prompt does not begin with what was there before, and whose lineages are.

use std::sync::Arc;

use lego::config::SideKind;
use lego::record::CallId;
use lego::trajectory::{BreakReason, LineageKind, LineageRow, ParentBy};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::chat::{Agent, Says, Session, Template, says};

const SUB_AGENT: LineageKind = LineageKind::Beside(SideKind::SubAgent);
const SIDE: LineageKind = LineageKind::Beside(SideKind::Side);
const COMPACTION: LineageKind = LineageKind::Beside(SideKind::Compaction);
const OTHER: LineageKind = LineageKind::Beside(SideKind::Other);

fn tool(text: &str, arguments: &str) -> Says {
    Says { text: text.to_owned(), tool: Some(("bash".to_owned(), arguments.to_owned())), ..Says::default() }
}

fn thinks(thinking: &str, text: &str) -> Says {
    Says { thinking: thinking.to_owned(), text: text.to_owned(), ..Says::default() }
}

fn agent() -> Agent {
    Agent::new("Be brief, and use the tools.", "Repair the parser in main.rs")
}

/// Two turns, `change` between them, and what is said of the second lineage, without texts of ids and with them.
fn broken(first: &Says, change: impl FnOnce(&mut Agent)) -> (Agent, Session, [LineageRow; 2]) {
    let (mut agent, mut session) = (agent(), Session::default());
    agent.ask(&mut session, first);
    if first.tool.is_some() {
        agent.result("1 file");
    } else {
        agent.user("Go on with the next thing");
    }
    change(&mut agent);
    agent.ask(&mut session, &says("Done with all of it."));
    let rows = [false, true].map(|with_texts| {
        let rows = session.table(with_texts);
        assert_eq!(rows.iter().map(|row| row.kind).collect::<Vec<_>>(), [LineageKind::Main; 2]);
        rows[1].clone()
    });
    (agent, session, rows)
}

/// The reason and the message, without texts and with them. The token is where the ids differ, and the call the first.
fn reasons(first: &Says, change: impl FnOnce(&mut Agent)) -> [(BreakReason, Option<u32>); 2] {
    let (_, session, rows) = broken(first, change);
    rows.map(|row| {
        let broke = row.broke.expect("another lineage");
        assert_eq!(broke.from, session.calls[0].call_id);
        let [before, now] = [0, 1].map(|at| session.calls[at].prompt_token_ids.clone().expect("ids"));
        let before: Vec<u32> =
            before.into_iter().chain(session.calls[0].completion_token_ids.clone().expect("ids")).collect();
        let same = before.iter().zip(&now).take_while(|(a, b)| a == b).count();
        assert!(same < before.len(), "it is broken");
        assert_eq!(broke.token.index(), same);
        (broke.reason, broke.message)
    })
}

/// System, task, reply, result: the reply is message 2.
const REPLY: Option<u32> = Some(2);

#[test]
fn what_nobody_changed_is_not_broken() {
    let (mut agent, mut session) = (agent(), Session::default());
    agent.ask(&mut session, &tool("Looking.", r#"{"command": "ls"}"#));
    agent.result("a.py");
    agent.ask(&mut session, &thinks("hm", "One more."));
    agent.user("Yes");
    agent.ask(&mut session, &says("Done."));
    let rows = session.table(false);
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].kind, rows[0].calls, rows[0].broke, rows[0].parent),
        (LineageKind::Main, 3, None, None)
    );
}

#[test]
fn c13_thinking_that_template_or_harness_drops() {
    let first = thinks("First I list the files.", "I list them.");
    let by_template =
        |agent: &mut Agent| agent.template = Template { drops_thinking: true, ..Template::default() };
    assert_eq!(reasons(&first, by_template), [(BreakReason::ReasoningDropped, REPLY); 2]);
    let by_harness = |agent: &mut Agent| {
        let reply = agent.messages[1].as_object_mut().expect("a message");
        reply.remove("reasoning_content").expect("it had some");
    };
    assert_eq!(reasons(&first, by_harness), [(BreakReason::ReasoningDropped, REPLY); 2]);
}

#[test]
fn c14_arguments_that_harness_or_template_prints_again() {
    let first = tool("I look.", r#"{"a": 1,"b":2}"#);
    let by_harness = |agent: &mut Agent| {
        agent.messages[1]["tool_calls"][0]["function"]["arguments"] = json!(r#"{"b":2,"a":1}"#);
    };
    assert_eq!(reasons(&first, by_harness), [(BreakReason::ArgumentsReserialised, REPLY); 2]);
    let by_template = |agent: &mut Agent| agent.template.prints_arguments = true;
    let [without, with] = reasons(&first, by_template);
    assert_eq!(with, (BreakReason::ArgumentsReserialised, REPLY));
    // The messages are the same: without texts nobody knows what the template did.
    assert_eq!(without, (BreakReason::Unknown, None));
}

#[test]
fn where_nobody_tells_what_was_thought_only_texts_can_tell_what_was_printed_otherwise() {
    let first = Says { thinking: "I list the files.".to_owned(), ..tool("I look.", r#"{"a": 1,"b":2}"#) };
    let change = |agent: &mut Agent| {
        agent.messages[1]
            .as_object_mut()
            .expect("a message")
            .remove("reasoning_content")
            .expect("it had some");
        agent.messages[1]["tool_calls"][0]["function"]["arguments"] = json!(r#"{"b":2,"a":1}"#);
    };
    let (_, mut session, _) = broken(&first, change);
    for call in &mut session.calls {
        std::sync::Arc::make_mut(call).response = None;
    }
    let reason = |with_texts| session.table(with_texts)[1].broke.expect("broken").reason;
    assert_eq!([reason(false), reason(true)], [BreakReason::Unknown; 2]);
}

#[test]
fn the_same_text_in_other_tokens_needs_texts_to_be_known() {
    let first = Says { in_pieces: true, ..says("about an absolute path") };
    let [without, with] = reasons(&first, |_| {});
    assert_eq!((without.0, with), (BreakReason::Unknown, (BreakReason::Retokenised, REPLY)));
}

#[test]
fn what_the_harness_changed_is_named_with_its_place() {
    let first = tool("I look.", r#"{"command": "ls"}"#);
    let both = |change: &dyn Fn(&mut Agent)| {
        let [without, with] = reasons(&first, change);
        assert_eq!(without, with);
        with
    };
    assert_eq!(both(&|agent| agent.system.push_str(" Now.")), (BreakReason::SystemChanged, Some(0)));
    let more = json!([{"type": "function", "function": {"name": "bash"}}, {"type": "function", "function": {"name": "ask"}}]);
    assert_eq!(both(&|agent| agent.tools = more.clone()), (BreakReason::ToolsChanged, None));
    let edit = |at: usize, text: &str| {
        let text = text.to_owned();
        move |agent: &mut Agent| agent.messages[at]["content"] = json!(text)
    };
    assert_eq!(both(&edit(0, "Repair the lexer")), (BreakReason::MessageEdited, Some(1)));
    assert_eq!(both(&edit(1, "I looked.")), (BreakReason::MessageEdited, REPLY));
    assert_eq!(both(&edit(1, "I look.\n")), (BreakReason::WhitespaceChanged, REPLY));
}

#[test]
fn a_history_that_is_cut_or_summed_up_is_compacted() {
    let summary =
        "The user wants the parser repaired; so far main.rs was read and two tests were found to fail.";
    let turns = |agent: &mut Agent, session: &mut Session| {
        for turn in 0..3 {
            agent.ask(session, &tool(&format!("Step {turn}."), &format!(r#"{{"command": "step {turn}"}}"#)));
            agent.result(&format!("result {turn}"));
        }
    };
    // The oldest messages are gone.
    let (mut cut, mut session) = (agent(), Session::default());
    turns(&mut cut, &mut session);
    cut.messages.drain(1..3);
    cut.ask(&mut session, &says("Done."));
    let rows = session.table(false);
    let broke = rows[1].broke.expect("broken");
    assert_eq!((broke.reason, broke.message), (BreakReason::HistoryCompacted, Some(2)));
    assert_eq!(broke.from, session.calls[2].call_id);
    assert_eq!(rows[1].parent.expect("known").by, ParentBy::History);

    // The agent sums up in its own conversation, and begins anew from that.
    let (mut own, mut session) = (agent(), Session::default());
    turns(&mut own, &mut session);
    let history = own.clone();
    own.user("Sum up what was done so far, in text only.");
    let summed = own.ask(&mut session, &says(summary));
    own.messages =
        vec![json!({"role": "user", "content": format!("This goes on from before:\n{summary}\nGo on.")})];
    own.ask(&mut session, &says("Now the lexer."));
    let rows = session.table(false);
    assert_eq!(
        rows.iter().map(|row| (row.kind, row.calls)).collect::<Vec<_>>(),
        [(LineageKind::Main, 4), (LineageKind::Main, 1)]
    );
    let (broke, parent) = (rows[1].broke.expect("broken"), rows[1].parent.expect("known"));
    assert_eq!((broke.reason, broke.message, broke.from), (BreakReason::HistoryCompacted, Some(1), summed));
    assert_eq!((parent.call_id, parent.by), (summed, ParentBy::Reply));

    // A conversation of its own sums it up.
    let (mut main, mut session) = (history, Session::default());
    main.messages.truncate(1);
    turns(&mut main, &mut session);
    let transcript = format!("Sum this up: {}", Value::from(main.messages.clone()));
    let mut summer = Agent::new("You sum up conversations.", &transcript);
    summer.tools = json!([]);
    let summed = summer.ask(&mut session, &says(summary));
    main.messages = vec![json!({"role": "user", "content": summary})];
    main.ask(&mut session, &says("Now the lexer."));
    main.user("Yes");
    main.ask(&mut session, &says("Done with the lexer as well."));
    let rows = session.table(false);
    assert_eq!(
        rows.iter().map(|row| (row.kind, row.calls)).collect::<Vec<_>>(),
        [(LineageKind::Main, 3), (COMPACTION, 1), (LineageKind::Main, 2)]
    );
    assert_eq!(rows[1].broke, None);
    let (broke, parent) = (rows[2].broke.expect("broken"), rows[2].parent.expect("known"));
    assert_eq!((broke.reason, broke.from), (BreakReason::HistoryCompacted, session.calls[2].call_id));
    assert_eq!((parent.call_id, parent.by), (summed, ParentBy::Reply));
}

#[test]
fn g14_sub_agents_that_alternate_leave_the_parents_chain_unbroken() {
    let (mut main, mut session) = (agent(), Session::default());
    let asks = |task: &str| tool("I ask another.", &json!({"prompt": task, "description": "x"}).to_string());
    let first = main.ask(&mut session, &asks("List all files of the project"));
    main.result("it runs");
    let second = main.ask(&mut session, &asks("Read the documentation now"));
    main.result("it runs");
    let mut subs = ["List all files of the project", "Read the documentation now"]
        .map(|task| Agent::new("You are a sub-agent.", task));
    for turn in 0..2 {
        for sub in &mut subs {
            sub.ask(&mut session, &says(&format!("Turn {turn}: there is something.")));
            sub.user("more");
        }
        main.ask(&mut session, &tool("Wait.", &format!(r#"{{"command": "sleep {turn}"}}"#)));
        main.result("slept");
    }
    let rows = session.table(false);
    let of: Vec<_> =
        rows.iter().map(|row| (row.kind, row.calls, row.parent.map(|parent| parent.call_id))).collect();
    assert_eq!(of, [(LineageKind::Main, 4, None), (SUB_AGENT, 2, Some(first)), (SUB_AGENT, 2, Some(second))]);
    assert!(rows.iter().all(|row| row.broke.is_none()));
    assert_eq!(rows[1].parent.expect("known").by, ParentBy::ToolCall);
}

#[test]
fn who_could_be_meant_twice_is_nobody() {
    let (mut main, mut session) = (agent(), Session::default());
    let task = "List all files of the project";
    for turn in 0..2 {
        main.ask(&mut session, &tool(&format!("Turn {turn}"), &json!({"prompt": task}).to_string()));
        main.result("it runs");
    }
    Agent::new("You are a sub-agent.", task).ask(&mut session, &says("There are two files."));
    let rows = session.table(false);
    assert_eq!((rows[1].kind, rows[1].parent, rows[1].broke), (OTHER, None, None));
    // One that has the main agent's prompt may be its own again.
    agent().ask(&mut session, &says("Begun anew."));
    Agent::new(&main.system, "Quite another task").ask(&mut session, &says("I do it."));
    let rows = session.table(false);
    let last = rows.last().expect("the last");
    assert_eq!((last.kind, last.parent), (OTHER, None));
    assert_eq!(last.broke.expect("nobody knows").reason, BreakReason::Unknown);
}

#[test]
fn side_calls_are_nobodys_history() {
    let (mut main, mut session) = (agent(), Session::default());
    let mut title = Agent::new("Give a title.", "Repair the parser in main.rs");
    title.tools = json!([]);
    title.ask(&mut session, &says("Parser repair"));
    main.ask(&mut session, &tool("I look.", r#"{"command": "ls"}"#));
    main.result("a.py");
    main.ask(&mut session, &says("Done."));
    let rows = session.table(false);
    let of: Vec<_> = rows.iter().map(|row| (row.kind, row.parent, row.broke)).collect();
    assert_eq!(of, [(SIDE, None, None), (LineageKind::Main, None, None)]);
}

#[test]
fn conversations_that_the_harness_tells_apart_are_not_each_others_history() {
    let (mut main, mut session) = (agent(), Session::default());
    main.conversation = Some("c".to_owned());
    main.ask(&mut session, &tool("I look.", r#"{"command": "ls"}"#));
    main.result("a.py");
    let mut other = main.clone();
    other.conversation = Some("c/a1".to_owned());
    other.system.push_str(" You are another one.");
    other.ask(&mut session, &says("I have seen it."));
    main.ask(&mut session, &says("Done."));
    let rows = session.table(false);
    assert_eq!(rows.iter().map(|row| row.kind).collect::<Vec<_>>(), [LineageKind::Main, OTHER]);
    // Of one conversation it is the same agent with another prompt.
    let (mut main, mut session) = (agent(), Session::default());
    main.ask(&mut session, &tool("I look.", r#"{"command": "ls"}"#));
    main.result("a.py");
    main.system.push_str(" You are another one.");
    main.ask(&mut session, &says("I have seen it."));
    assert_eq!(session.table(false)[1].broke.expect("broken").reason, BreakReason::SystemChanged);
}

#[test]
fn a_fork_and_a_question_asked_again_are_not_broken_and_one_with_more_in_it_is_edited() {
    let (mut first, mut session) = (agent(), Session::default());
    let begun = first.ask(&mut session, &tool("I look.", r#"{"command": "ls"}"#));
    first.result("a.py");
    let (mut second, mut third) = (first.clone(), first.clone());
    let asked = first.ask(&mut session, &says("It is one file, I think."));
    // Something was added to the last message.
    third.messages[2]["content"] = json!("a.py\n\nYour reply was cut off.");
    third.ask(&mut session, &says("Again: it is one file."));
    second.messages[2]["content"] = json!("b.py and c.py");
    second.ask(&mut session, &says("It is two files."));
    let rows = session.table(false);
    let of: Vec<_> = rows
        .iter()
        .map(|row| (row.shared_calls, row.parent.map(|parent| (parent.call_id, parent.by))))
        .collect();
    assert_eq!(of, [(0, None), (1, Some((asked, ParentBy::Question))), (1, Some((begun, ParentBy::Tokens)))]);
    let broke = rows[1].broke.expect("edited");
    assert_eq!((broke.reason, broke.message, broke.from), (BreakReason::MessageEdited, Some(3), asked));
    assert_eq!(rows[2].broke, None);
    assert!(rows.iter().all(|row| row.kind == LineageKind::Main));
    // The token-in relay names in a record the call that it extends: that is no agent that another one started.
    for call in session.calls.iter_mut().skip(1) {
        Arc::make_mut(call).parent_call_id = Some(begun);
    }
    assert_eq!(format!("{:?}", session.table(false)), format!("{rows:?}"));
}

#[test]
fn calls_that_cannot_be_read_have_a_place_and_no_reason() {
    let (_, mut session, _) = broken(&says("One."), |agent| agent.system.push_str(" Now."));
    for call in &mut session.calls {
        std::sync::Arc::make_mut(call).client_request = None;
    }
    let rows = session.table(true);
    let broke = rows[1].broke.expect("another lineage");
    assert_eq!(
        (broke.reason, broke.message, broke.from),
        (BreakReason::Unknown, None, session.calls[0].call_id)
    );
    let [before, now] = [0, 1].map(|at| session.calls[at].prompt_token_ids.clone().expect("ids"));
    assert_eq!(broke.token.index(), before.iter().zip(&now).take_while(|(a, b)| a == b).count());
}

/// What a made-up harness does before its next call.
#[derive(Debug, Clone, Copy)]
enum Deed {
    GoOn,
    ChangeSystem,
    ChangeTools,
    Edit,
    DropThinking,
    PrintArguments,
    Cut,
    SumUp,
    SubAgent,
    Side,
}

const DEEDS: [Deed; 10] = [
    Deed::GoOn,
    Deed::ChangeSystem,
    Deed::ChangeTools,
    Deed::Edit,
    Deed::DropThinking,
    Deed::PrintArguments,
    Deed::Cut,
    Deed::SumUp,
    Deed::SubAgent,
    Deed::Side,
];

/// Kind and reason of each lineage that the deeds make, in order, and the call that each is linked to.
type Expected = Vec<(LineageKind, Option<BreakReason>, Option<CallId>)>;

fn play(deeds: &[Deed]) -> (Session, Expected) {
    let (mut main, mut session) = (agent(), Session::default());
    let mut expected: Expected = vec![(LineageKind::Main, None, None)];
    let ask = |main: &mut Agent, session: &mut Session| {
        let turn = session.calls.len();
        let says = Says {
            thinking: format!("Thought {turn}."),
            ..tool(&format!("Turn {turn} is done."), &format!(r#"{{"turn": {turn},"b":2}}"#))
        };
        let id = main.ask(session, &says);
        main.result(&format!("result of {turn}"));
        id
    };
    for _ in 0..3 {
        ask(&mut main, &mut session);
    }
    for (turn, deed) in deeds.iter().enumerate() {
        let of_main = session
            .calls
            .iter()
            .rev()
            .find(|call| call.text.as_ref().is_some_and(|text| text.starts_with("Turn")));
        let mut linked = of_main.map(|call| call.call_id);
        // The last reply of the main agent.
        let at = main.messages.len() - 2;
        let reason = match deed {
            Deed::GoOn => None,
            Deed::ChangeSystem => {
                main.system = format!("System prompt {turn}.");
                Some(BreakReason::SystemChanged)
            }
            Deed::ChangeTools => {
                main.tools = json!([{"type": "function", "function": {"name": format!("tool_{turn}")}}]);
                Some(BreakReason::ToolsChanged)
            }
            Deed::Edit => {
                main.messages[0]["content"] = json!(format!("Task {turn}"));
                Some(BreakReason::MessageEdited)
            }
            Deed::DropThinking => {
                main.messages[at].as_object_mut().expect("a message").remove("reasoning_content");
                Some(BreakReason::ReasoningDropped)
            }
            Deed::PrintArguments => {
                let arguments = &mut main.messages[at]["tool_calls"][0]["function"]["arguments"];
                let value: Value = serde_json::from_str(arguments.as_str().expect("text")).expect("JSON");
                *arguments = json!(value.to_string());
                Some(BreakReason::ArgumentsReserialised)
            }
            Deed::Cut if main.messages.len() > 5 => {
                main.messages.drain(1..3);
                Some(BreakReason::HistoryCompacted)
            }
            Deed::Cut => None,
            Deed::SumUp => {
                main.user("Sum up, in text only.");
                let text =
                    format!("Summary {turn}: the parser is being repaired, and much of it is done by now.");
                linked = Some(main.ask(&mut session, &says(&text)));
                main.messages = vec![json!({"role": "user", "content": format!("Before: {text}")})];
                Some(BreakReason::HistoryCompacted)
            }
            Deed::SubAgent => {
                let task = format!("Task of sub-agent {turn}");
                let says = tool(&format!("Turn {turn} asks."), &json!({"prompt": task}).to_string());
                let by = main.ask(&mut session, &says);
                main.result("it runs");
                Agent::new("You are a sub-agent.", &task)
                    .ask(&mut session, &self::says("Found nothing at all."));
                expected.push((SUB_AGENT, None, Some(by)));
                None
            }
            Deed::Side => {
                let mut side = Agent::new("Give a title.", &format!("Title {turn}"));
                side.tools = json!([]);
                side.ask(&mut session, &says("A title"));
                expected.push((SIDE, None, None));
                None
            }
        };

        if reason.is_some() {
            expected.push((LineageKind::Main, reason, linked));
        }
        ask(&mut main, &mut session);
    }
    (session, expected)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_deed_is_told_and_the_order_of_arrival_changes_nothing(
        deeds in prop::collection::vec(prop::sample::select(&DEEDS[..]), 0..8),
        seed in any::<u64>(),
    ) {
        let (mut session, expected) = play(&deeds);
        let rows = session.table(true);
        let told: Expected = rows
            .iter()
            .map(|row| (row.kind, row.broke.map(|broke| broke.reason), row.parent.map(|parent| parent.call_id)))
            .collect();
        prop_assert_eq!(told, expected);
        // Without texts less is known, and nothing else.
        for (row, mut without) in rows.iter().zip(session.table(false)) {
            if let Some(broke) = without.broke.as_mut().filter(|broke| broke.reason == BreakReason::Unknown) {
                *broke = row.broke.expect("broken as well");
            }
            prop_assert_eq!(row, &without);
        }
        let mut state = seed;
        for i in (1..session.calls.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            session.calls.swap(i, (state >> 33) as usize % (i + 1));
        }
        prop_assert_eq!(session.table(true), rows);
    }
}
