//! Lineages by tokens alone: turns, retries, choices, forks, and what cannot be trained.

use std::collections::HashMap;
use std::sync::Arc;

use lego::config::Samples;
use lego::record::{Call, CallId, CallKind, ChoiceId, Disposition, IdsSource, WeightSpan};
use lego::trajectory::{Built, Lineages, lineages, samples};
use proptest::prelude::*;

use crate::calls::{call, failed_call};

/// Calls of one session, in time.
#[derive(Default)]
struct Session(Vec<Arc<Call>>);

impl Session {
    fn add(&mut self, prompt: &[u32], completion: &[u32]) -> CallId {
        self.with(prompt, completion, |_| {})
    }

    fn with(&mut self, prompt: &[u32], completion: &[u32], edit: impl FnOnce(&mut Call)) -> CallId {
        let mut one = call("s", prompt, completion);
        one.received_at += self.0.len() as i64;
        edit(&mut one);
        let id = one.call_id;
        self.0.push(Arc::new(one));
        id
    }

    fn build(&self) -> (Lineages, Built) {
        let found = lineages(&self.0);
        let built = samples(&found, None, &Samples::default());
        built.check(&self.0).expect("every token in one bucket");
        (found, built)
    }

    fn fate(&self, id: CallId) -> Disposition {
        let (_, built) = self.build();
        let mut entries = built.ledger.into_iter().filter(|entry| entry.call_id == id);
        entries.next().expect("in the ledger").disposition
    }
}

fn targets(built: &Built) -> Vec<Vec<(usize, u32)>> {
    let of = |sample: &lego::record::Sample| {
        let tokens = sample.token_ids.iter().zip(&sample.loss_mask).enumerate();
        tokens.filter(|(_, (_, mask))| **mask).map(|(i, (id, _))| (i, *id)).collect()
    };
    built.samples.iter().map(of).collect()
}

#[test]
fn turns_that_extend_one_another_are_one_sample() {
    let mut session = Session::default();
    session.add(&[1, 2], &[3, 4]);
    session.add(&[1, 2, 3, 4, 9], &[5]);
    session.add(&[1, 2, 3, 4, 9, 5, 9], &[6, 7]);
    let (_, built) = session.build();
    assert_eq!(built.samples.len(), 1);
    assert_eq!(built.samples[0].token_ids, [1, 2, 3, 4, 9, 5, 9, 6, 7]);
    assert_eq!(targets(&built)[0], [(2, 3), (3, 4), (5, 5), (7, 6), (8, 7)]);
    assert_eq!(built.samples[0].logprobs[5], Some(-6.0 / 7.0));
    assert_eq!(built.samples[0].weight_version[7], Some(3));
}

#[test]
fn rewritten_history_begins_a_new_lineage() {
    let mut session = Session::default();
    session.add(&[1, 2], &[30, 31, 4]);
    // The template dropped the thinking 30, 31; the next turn extends that.
    session.add(&[1, 2, 4, 9], &[5]);
    session.add(&[1, 2, 4, 9, 5, 9], &[6]);
    let (found, built) = session.build();
    assert_eq!(found.lineages.iter().map(|l| l.calls.len()).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(targets(&built), [vec![(2, 30), (3, 31), (4, 4)], vec![(4, 5), (6, 6)]]);
}

#[test]
fn a_fork_trains_its_shared_calls_once() {
    let mut session = Session::default();
    session.add(&[1], &[2]);
    session.add(&[1, 2, 10], &[3]);
    session.add(&[1, 2, 20], &[4]);
    let (found, built) = session.build();
    assert_eq!(targets(&built), [vec![(1, 2), (3, 3)], vec![(3, 4)]]);
    assert_eq!(built.samples[1].token_ids, [1, 2, 20, 4]);
    assert_eq!([found.lineages[0].index, found.lineages[1].index], [0, 1]);
}

#[test]
fn the_retry_that_was_continued_counts() {
    let mut session = Session::default();
    let first = session.add(&[1, 2], &[3]);
    let second = session.add(&[1, 2], &[4]);
    session.add(&[1, 2, 3, 9], &[5]);
    assert_eq!(session.fate(first), Disposition::Trained);
    assert_eq!(session.fate(second), Disposition::Superseded);
    // Nobody went on from these: the last is what the client had.
    let third = session.add(&[7], &[3]);
    let fourth = session.add(&[7], &[4]);
    assert_eq!(session.fate(third), Disposition::Superseded);
    assert_eq!(session.fate(fourth), Disposition::Trained);
}

#[test]
fn the_same_tokens_twice_are_trained_once() {
    let mut session = Session::default();
    session.add(&[1, 2], &[3]);
    session.add(&[1, 2], &[3]);
    session.add(&[1, 2, 3, 9], &[5]);
    let (_, built) = session.build();
    assert_eq!(targets(&built), [vec![(2, 3), (4, 5)]]);
    let doubled: Vec<_> = session.0.iter().chain(&session.0).cloned().collect();
    assert_eq!(samples(&lineages(&doubled), None, &Samples::default()).samples, built.samples);
}

#[test]
fn of_two_choices_the_one_that_was_used_counts() {
    let mut session = Session::default();
    let id = session.with(&[1], &[2], |call| {
        call.usage.as_mut().expect("usage").completion_tokens = 3;
    });
    session.with(&[1], &[3, 4], |call| {
        call.call_id = id;
        call.choice_index = 1;
        call.usage.as_mut().expect("usage").completion_tokens = 3;
    });
    session.add(&[1, 3, 4, 9], &[5]);
    let (_, built) = session.build();
    assert_eq!(targets(&built), [vec![(1, 3), (2, 4), (4, 5)]]);
    let reason = Disposition::Dropped("another choice of the call was used".to_owned());
    assert_eq!(session.fate(id), reason);
}

#[test]
fn what_cannot_be_trained_is_context_and_accounted_with_its_reason() {
    let mut session = Session::default();
    let aux = session.with(&[8], &[1, 1], |call| call.kind = CallKind::Aux);
    let cut = session.with(&[1], &[2], |call| {
        call.trainable = false;
        call.not_trainable_reasons = vec!["logprobs missing".to_owned()];
    });
    let next = session.add(&[1, 2, 9], &[3]);
    let null = session.with(&[1, 2, 9, 3, 9], &[4, 5], |call| {
        call.completion_logprobs = Some(vec![Some(-0.5), None]);
    });
    let unlabelled = session.with(&[1, 2, 9, 3, 9, 4, 5], &[6], |call| {
        call.weight_spans = Some(vec![WeightSpan { version: "main".to_owned(), start: 0, end: 1 }]);
    });
    let unknown = session.with(&[50], &[6], |call| call.usage = None);
    let short = session.with(&[51], &[6], |call| {
        call.usage.as_mut().expect("usage").completion_tokens = 20;
    });
    session.0.push(Arc::new(failed_call("s")));
    let (_, built) = session.build();
    assert_eq!(targets(&built), [vec![(3, 3)]]);
    assert_eq!(session.fate(aux), Disposition::AuxCall);
    assert_eq!(session.fate(cut), Disposition::Dropped("logprobs missing".to_owned()));
    assert_eq!(session.fate(next), Disposition::Trained);
    assert_eq!(session.fate(null), Disposition::Dropped("a log-prob is missing".to_owned()));
    let no_version = "the weight version of a token is not known".to_owned();
    assert_eq!(session.fate(unlabelled), Disposition::Dropped(no_version));
    assert_eq!(session.fate(unknown), Disposition::UsageUnknown);
    let booked: Vec<_> = built.ledger.iter().filter(|entry| entry.call_id == short).collect();
    assert_eq!(booked[0].disposition, Disposition::NoIds);
    assert_eq!(booked[0].tokens, 19);
    let mismatch = Disposition::Dropped("ids do not sum to the usage".to_owned());
    assert_eq!((booked[1].disposition.clone(), booked[1].tokens), (mismatch, 1));
}

#[test]
fn a_call_over_a_weight_update_has_a_version_a_token() {
    let mut session = Session::default();
    session.with(&[1], &[2, 3, 4], |call| {
        let span = |version: &str, start, end| WeightSpan { version: version.to_owned(), start, end };
        call.weight_spans = Some(vec![span("7", 0, 2), span("8", 2, 3)]);
        call.sampling_sent.temperature = Some(0.5);
    });
    let (_, built) = session.build();
    assert_eq!(built.samples[0].weight_version, [None, Some(7), Some(7), Some(8)]);
    assert_eq!(built.samples[0].temperature, [None, Some(0.5), Some(0.5), Some(0.5)]);
}

#[test]
fn sessions_never_mix() {
    let first = Arc::new(call("a", &[1], &[2]));
    let mut second = call("b", &[1, 2, 3], &[4]);
    second.received_at += 1;
    let both = [first, Arc::new(second)];
    let built = samples(&lineages(&both), None, &Samples::default());
    assert_eq!(targets(&built), [vec![(1, 2)], vec![(3, 4)]]);
    assert_eq!([built.samples[0].lineage_id, built.samples[1].lineage_id], [0, 0]);
}

/// One turn of a made-up harness: what it does with the state after an earlier turn.
#[derive(Debug, Clone)]
struct Turn {
    /// Which earlier turn it goes on from.
    from: usize,
    action: u8,
    appended: Vec<u32>,
    completion: Vec<u32>,
    flaw: u8,
}

fn turn() -> impl Strategy<Value = Turn> {
    // Few different ids, so that prompts collide and extend one another by accident too.
    let ids = |length| prop::collection::vec(0..3_u32, length);
    (any::<prop::sample::Index>(), 0..6_u8, ids(0..3), ids(0..4), 0..12_u8).prop_map(
        |(from, action, appended, completion, flaw)| Turn {
            from: from.index(1 << 16),
            action,
            appended,
            completion,
            flaw,
        },
    )
}

fn play(turns: Vec<Turn>) -> Vec<Arc<Call>> {
    let mut session = Session::default();
    for turn in turns {
        let earlier = session.0.get(turn.from % (session.0.len() + 1)).cloned();
        let mut prompt = earlier.as_ref().and_then(|c| c.prompt_token_ids.clone()).unwrap_or_default();
        let sampled = earlier.as_ref().and_then(|c| c.completion_token_ids.clone());
        match turn.action {
            0 => {}                  // retry
            1 => prompt.truncate(1), // compaction
            2 => {
                // edit of the history
                if let Some(id) = prompt.last_mut() {
                    *id += 1;
                }
            }
            _ => prompt.extend(sampled.unwrap_or_default()), // goes on
        }
        if turn.action != 0 {
            prompt.extend(&turn.appended);
        }
        session.with(&prompt, &turn.completion, |call| match turn.flaw {
            0 => call.kind = CallKind::Aux,
            1 => call.usage = None,
            2 => call.trainable = false,
            3 => call.completion_token_ids = None,
            4 => call.completion_logprobs = None,
            5 => call.usage.as_mut().expect("usage").completion_tokens += 2,
            6 => call.prompt_token_ids = None,
            _ => {}
        });
    }
    session.0
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tokens_are_conserved_and_keep_their_context(
        turns in prop::collection::vec(turn(), 0..14),
        seed in any::<u64>(),
    ) {
        let calls = play(turns);
        let found = lineages(&calls);
        let built = samples(&found, None, &Samples::default());
        prop_assert!(built.check(&calls).is_ok(), "{:?}", built.check(&calls));

        // Exactly the context each token was sampled in.
        let by_id: HashMap<ChoiceId, &Arc<Call>> = calls.iter().map(|c| (c.choice(), c)).collect();
        for sample in &built.samples {
            for span in &sample.call_spans {
                let (call, start, end) = (by_id[&span.choice], span.start.index(), span.end.index());
                prop_assert_eq!(Some(&sample.token_ids[..start]), call.prompt_token_ids.as_deref());
                prop_assert_eq!(Some(&sample.token_ids[start..end]), call.completion_token_ids.as_deref());
            }
        }

        // A plain quadratic reading of the definition gives the same parents.
        for lineage in &found.lineages {
            for pair in lineage.calls.windows(2) {
                let ends = |c: &Call| [c.prompt_token_ids.clone(), c.completion_token_ids.clone()].into_iter().flatten().flatten().collect::<Vec<_>>();
                let prompt = pair[1].call.prompt_token_ids.clone().unwrap_or_default();
                let parent = ends(&pair[0].call);
                prop_assert!(prompt.starts_with(&parent));
                let in_tree = found.lineages.iter().flat_map(|l| &l.calls);
                let in_tree = in_tree.filter(|c| c.call.kind == pair[1].call.kind);
                let longest = in_tree.map(|c| ends(&c.call)).filter(|e| prompt.starts_with(e)).map(|e| e.len()).max();
                prop_assert_eq!(longest, Some(parent.len()));
            }
        }

        // The order of arrival changes nothing.
        let mut shuffled = calls.clone();
        let mut state = seed;
        for i in (1..shuffled.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            shuffled.swap(i, (state >> 33) as usize % (i + 1));
        }
        let again = samples(&lineages(&shuffled), None, &Samples::default());
        prop_assert_eq!(&again.samples, &built.samples);
        let sorted = |built: &Built| {
            let mut entries: Vec<String> = built.ledger.iter().map(|e| format!("{e:?}")).collect();
            entries.sort();
            entries
        };
        prop_assert_eq!(sorted(&again), sorted(&built));
    }
}

#[test]
fn ids_of_a_local_tokenizer_are_neither_targets_nor_context() {
    let local = |call: &mut Call| {
        call.completion_ids_source = IdsSource::LocalTokenizer;
        call.prompt_ids_source = IdsSource::LocalTokenizer;
    };
    let mut session = Session::default();
    let first = session.with(&[1, 2], &[3, 4], local);
    session.add(&[1, 2, 3, 4, 9], &[5]);
    let (found, built) = session.build();
    assert_eq!(session.fate(first), Disposition::NoIds);
    assert_eq!(found.lineages.iter().map(|l| l.calls.len()).collect::<Vec<_>>(), [1]);
    assert_eq!(targets(&built), [vec![(5, 5)]]);
    // A prompt that was rendered here is not the context of what was sampled.
    let mut session = Session::default();
    let rendered = session.with(&[1, 2], &[3], |call| call.prompt_ids_source = IdsSource::LocalTokenizer);
    assert_eq!(session.fate(rendered), Disposition::Dropped("no prompt ids".to_owned()));
}
