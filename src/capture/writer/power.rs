//! What is acknowledged stays, whatever the disk does and whenever the power goes: on a machine that forgets all that
//! was not synced ([`machine`]), and with a failure of each operation in turn.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use futures_util::future::join_all;
use tempfile::TempDir;

use super::super::merge::compact_on;
use super::super::reader::{Query, Reader};
use super::super::storage::machine::{Dice, Fault, Machine};
use super::super::verify::{Finding, Watch, verify};
use super::tests::open;
use super::*;
use crate::record::example;

/// Small segments, so that some become Parquet meanwhile.
fn options() -> WriterOptions {
    WriterOptions { segment_bytes: 6 << 10, ..WriterOptions::default() }
}

/// What a client was told is kept.
#[derive(Default, Clone)]
struct Kept {
    /// Calls, and how many choices they have.
    calls: BTreeMap<CallId, u16>,
    /// Calls of which a part is kept.
    drafts: BTreeSet<CallId>,
    refused: Vec<SinkError>,
}

fn call(dice: &mut Dice) -> Call {
    // Some parts are so long that they are written by themselves.
    let long = if dice.below(12) == 0 { 70_000 } else { dice.below(900) };
    let body = "x".repeat(long as usize);
    let day = i64::try_from(dice.below(2)).expect("small") * 86_400_000_000;
    example::call(serde_json::json!({
        "received_at": day, "response": body, "finish_reason": "stop", "session_id": format!("s{}", dice.below(4)),
        "not_trainable_reasons": ["example"]
    }))
}

/// Appends and drafts, one after another and several at once.
async fn work(writer: &Writer, machine: &Machine, dice: &mut Dice, turns: u64, kept: &mut Kept) {
    for _ in 0..turns {
        let kind = dice.below(5);
        let mut calls: Vec<Call> = (0..if kind == 0 { 4 } else { 1 }).map(|_| call(dice)).collect();
        let id = calls[0].call_id;
        if kind == 1 {
            calls.push(Call { choice_index: 1, ..calls[0].clone() });
        }
        let done: Vec<Result<(), SinkError>> = match kind {
            0 => {
                let appends = calls.iter().map(|call| writer.append(vec![call.clone()]));
                let done = join_all(appends).await;
                let acked = calls.iter().zip(&done).filter(|(_, done)| done.is_ok());
                kept.calls.extend(acked.map(|(call, _)| (call.call_id, 1)));
                done
            }
            2 | 3 => {
                let draft = writer.draft(calls.clone()).await;
                if draft.is_ok() {
                    kept.drafts.insert(id);
                }
                let record = if kind == 3 { Some(writer.append(calls).await) } else { None };
                if record == Some(Ok(())) {
                    kept.calls.insert(id, 1);
                }
                [Some(draft), record].into_iter().flatten().collect()
            }
            _ => {
                let choices = calls.len() as u16;
                let done = writer.append(calls).await;
                if done.is_ok() {
                    kept.calls.insert(id, choices);
                }
                vec![done]
            }
        };
        kept.refused.extend(done.into_iter().filter_map(Result::err));
        if machine.is_over() {
            break;
        }
    }
}

/// Every call that was acknowledged is there once, and nothing is there twice.
fn check(dir: &Path, kept: &Kept, has_drafts: bool, when: &str) {
    let mut found: BTreeMap<CallId, Vec<u16>> = BTreeMap::new();
    let mut reader = Reader::open(dir, Query::default()).expect("a folder");
    for call in reader.by_ref() {
        let call = call.unwrap_or_else(|error| panic!("{when}: {error}"));
        found.entry(call.call_id).or_default().push(call.choice_index);
    }
    assert_eq!(reader.skipped(), [] as [String; 0], "{when}");
    for (id, choices) in &mut found {
        choices.sort_unstable();
        let is_once = *choices == [0] || *choices == [0, 1];
        assert!(is_once, "{when}: call {id} has the choices {choices:?}");
    }
    for (id, choices) in &kept.calls {
        let there = found.get(id).map_or(0, Vec::len);
        assert_eq!(there, usize::from(*choices), "{when}: call {id} was acknowledged");
    }
    for id in kept.drafts.iter().filter(|_| has_drafts) {
        assert!(found.contains_key(id), "{when}: a part of call {id} was acknowledged");
    }
}

struct Listed(Vec<String>);

impl Watch for Listed {
    fn found(&mut self, finding: &Finding) -> ControlFlow<()> {
        self.0.push(format!("{finding:?}"));
        ControlFlow::Continue(())
    }

    fn progress(&mut self, _: u64, _: u64) {}
}

/// Opened by a writer that nothing happens to, it is all there and all whole.
async fn check_reopened(dir: &Path, kept: &Kept, when: &str) {
    let writer = Writer::open(dir, options()).unwrap_or_else(|error| panic!("{when}: {error}"));
    assert_eq!(writer.recovery().damaged, [], "{when}");
    assert_eq!(writer.recovery().quarantined, [] as [PathBuf; 0], "{when}");
    check(dir, kept, true, when);
    assert_eq!(writer.close().await.left_in_journal, [] as [String; 0], "{when}");
    check(dir, kept, true, when);
    let mut listed = Listed(vec![]);
    verify(dir, None, &mut listed).expect("readable");
    assert_eq!(listed.0, [] as [String; 0], "{when}");
    let journal = std::fs::read_dir(dir.join("journal")).expect("a folder").count();
    assert_eq!(journal, 0, "{when}: all of the journal is Parquet");
}

/// One process: what it does until it ends, is killed or the power goes.
async fn process(machine: &Machine, dice: &mut Dice, dir: &Path, kept: &mut Kept, when: &str) {
    match open(dir, machine, options()) {
        Err(error) => assert!(machine.is_over(), "{when}: {error}"),
        Ok(writer) => {
            let turns = dice.below(40);
            work(&writer, machine, dice, turns, kept).await;
            writer.close().await;
            if dice.below(2) == 0 && !machine.is_over() {
                let merged = compact_on(machine, dir, &mut |_| {});
                assert!(merged.is_ok() || machine.is_over(), "{when}: {merged:?}");
            }
        }
    }
}

/// One life of a machine, from a folder to what the next one finds: some of its processes are killed before the power
/// goes.
async fn life(seed: u64, from: &Path, to: &Path, kept: &mut Kept) {
    let mut dice = Dice::new(seed);
    let mut machine = Machine::new(from);
    machine.cut_after(dice.below(250));
    for number in 0..1 + dice.below(3) {
        if dice.below(2) == 0 {
            machine.kill_after(dice.below(100));
        }
        process(&machine, &mut dice, from, kept, &format!("seed {seed}, process {number}")).await;
        machine = machine.restarted();
    }
    machine.wreck(&mut dice, from, to);
}

#[tokio::test]
async fn a_power_cut_at_any_moment_loses_nothing_acknowledged_and_doubles_nothing() {
    let chains = if std::env::var_os("LEGO_TEST_FULL").is_some() { 400 } else { 12 };
    const LIVES: u64 = 8;
    let mut lives = 0;
    for chain in 0..chains {
        let temp = tempfile::tempdir().expect("a folder");
        let mut kept = Kept::default();
        let mut dir = temp.path().join("0");
        std::fs::create_dir(&dir).expect("a folder");
        for number in 1..=LIVES {
            let seed = chain * LIVES + number;
            let next = temp.path().join(number.to_string());
            life(seed, &dir, &next, &mut kept).await;
            if next.join("journal").is_dir() {
                check(&next, &kept, false, &format!("seed {seed}, after the cut"));
            } else {
                assert!(kept.calls.is_empty() && kept.drafts.is_empty(), "seed {seed}: nothing is left");
            }
            std::fs::remove_dir_all(&dir).expect("a folder");
            dir = next;
            lives += 1;
        }
        check_reopened(&dir, &kept, &format!("chain {chain}")).await;
    }
    assert_eq!(lives, chains * LIVES);
}

/// A writer's work with one operation after `at` failing, and `more` after it. True if there were as many operations.
async fn failing(at: u64, more: u64, fault: Fault, ends_by_power: bool) -> bool {
    let when = format!("operation {at}, {more} more, {fault:?}, power {ends_by_power}");
    let temp: TempDir = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("captures");
    std::fs::create_dir(&dir).expect("a folder");
    let (mut dice, mut kept) = (Dice::new(7), Kept::default());
    // What an earlier life left, with a draft and a torn tail, is a part of it.
    let machine = Machine::new(&dir);
    let writer = open(&dir, &machine, options()).expect("a free folder");
    work(&writer, &machine, &mut dice, 6, &mut kept).await;
    machine.cut_after(0);
    writer.close().await;
    let next = temp.path().join("next");
    machine.wreck(&mut dice, &dir, &next);

    let machine = Machine::new(&next);
    machine.fail_after(at, more, fault);
    // Whoever is told that it could not be opened tries again.
    let writer = (0..=more + 1).find_map(|_| open(&next, &machine, options()).ok());
    let writer = writer.unwrap_or_else(|| panic!("{when}: it is over"));
    work(&writer, &machine, &mut dice, 12, &mut kept).await;
    for error in &kept.refused {
        let text = error.to_string();
        assert!(matches!(error, SinkError::Full { .. } | SinkError::Io { .. }), "{when}: {text}");
        assert!(text.contains(&*next.to_string_lossy()), "{when}: it names the folder: {text}");
    }
    let has_come = machine.operations() > at;
    if more < 10 {
        let mut goes_on = false;
        for _ in 0..5 {
            let last = call(&mut dice);
            if !goes_on && writer.append(vec![last.clone()]).await.is_ok() {
                kept.calls.insert(last.call_id, 1);
                goes_on = true;
            }
        }
        assert!(goes_on || !has_come, "{when}: it goes on by itself");
    }
    check(&next, &kept, false, &when);
    if ends_by_power {
        machine.cut_after(0);
        writer.close().await;
        let last = temp.path().join("last");
        machine.wreck(&mut dice, &next, &last);
        check_reopened(&last, &kept, &when).await;
    } else {
        writer.close().await;
        check_reopened(&next, &kept, &when).await;
    }
    has_come
}

#[tokio::test]
async fn a_failure_of_each_operation_in_turn_loses_nothing_acknowledged_and_is_told() {
    let step = if std::env::var_os("LEGO_TEST_FULL").is_some() { 1 } else { 5 };
    for fault in [Fault::Device, Fault::Full, Fault::Short] {
        for ends_by_power in [false, true] {
            let mut at = 2 * u64::from(ends_by_power);
            // A device that failed a sync and then cannot even cut off what it was to sync is beyond help.
            let more = |at: u64| if fault == Fault::Device { 0 } else { at % 4 };
            while failing(at, more(at), fault, ends_by_power).await {
                at += step;
            }
            assert!(at > 40, "{at} operations");
        }
    }
}

#[tokio::test]
async fn a_call_whose_first_draft_failed_is_recorded_once() {
    for at in 0..10 {
        let when = format!("operation {at} of the first draft");
        let temp: TempDir = tempfile::tempdir().expect("a folder");
        let (dir, next) = (temp.path().join("captures"), temp.path().join("next"));
        std::fs::create_dir(&dir).expect("a folder");
        let (mut dice, mut kept) = (Dice::new(7), Kept::default());
        let machine = Machine::new(&dir);
        let writer = open(&dir, &machine, options()).expect("a free folder");
        let call = call(&mut dice);
        machine.fail_after(at, 1, Fault::Full);
        let mut failures = 0;
        while writer.draft(vec![call.clone()]).await.is_err() {
            failures += 1;
            assert!(failures <= 2, "{when}");
        }
        assert!(failures > 0 || at > 4, "{when}");
        while writer.append(vec![call.clone()]).await.is_err() {
            failures += 1;
            assert!(failures <= 2, "{when}");
        }
        kept.calls.insert(call.call_id, 1);
        machine.cut_after(0);
        writer.close().await;
        machine.wreck(&mut dice, &dir, &next);
        check_reopened(&next, &kept, &when).await;
    }
}
