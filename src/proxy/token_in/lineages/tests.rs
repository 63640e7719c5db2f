use proptest::prelude::*;

use super::*;

fn said(text: &str) -> Identity {
    Said::reply(text.to_owned(), vec![]).identity()
}

fn keys(messages: &[&str]) -> Vec<Key> {
    let mut keys = vec![Key::of_shape(b"shape")];
    for message in messages {
        keys.push(keys[keys.len() - 1].with(&said(message)));
    }
    keys
}

fn spelled(messages: &[(&str, &str)]) -> Vec<Spelling> {
    let of = |(text, reasoning): &(&str, &str)| {
        let mut said = Said::reply((*text).to_owned(), vec![]);
        (*reasoning).clone_into(&mut said.reasoning);
        Spelling::of(&said)
    };
    messages.iter().map(of).collect()
}

/// A reply behind so many messages that says this text and thought that.
fn reply(at: usize, told: (&str, &str), asked: u64) -> Reply {
    let given = Given::default();
    given.set();
    Reply { call_id: CallId::now(), choice: 0, at, spelling: spelled(&[told])[0], asked, given }
}

#[test]
fn a_request_goes_on_from_the_longest_conversation() {
    let lineages = Lineages::default();
    let longest = |messages: &[&str]| lineages.longest(&keys(messages), &[]);
    let asked = keys(&["u1"]);
    assert!(lineages.is_empty());
    assert_eq!(lineages.ask([&asked, &[], &[]]), 1);
    let first = Turn::new(None, &[1, 2], &[3, 4], reply(1, ("a1", ""), 1));
    lineages.hold(asked[1].with(&said("a1")), first);
    let next = keys(&["u1", "a1", "u2"]);
    let (messages, turn) = longest(&["u1", "a1", "u2"]).expect("it goes on");
    assert_eq!((messages, turn.all_ids()), (2, vec![1, 2, 3, 4]));
    let second = Turn::new(Some(turn), &[1, 2, 3, 4, 9], &[5], reply(3, ("a2", ""), 2));
    lineages.hold(next[3].with(&said("a2")), second);
    let (messages, turn) = longest(&["u1", "a1", "u2", "a2", "u3"]).expect("it goes on");
    assert_eq!((messages, turn.all_ids(), turn.sampled_ids()), (4, vec![1, 2, 3, 4, 9, 5], &[5][..]));
    // Two branches of one.
    let (messages, turn) = longest(&["u1", "a1", "other"]).expect("it goes on");
    assert_eq!((messages, turn.all_ids()), (2, vec![1, 2, 3, 4]));
    assert!(longest(&["u1", "a1"]).is_none(), "nothing new is said");
    assert!(longest(&["u1", "edited", "u2"]).is_none());
    assert_eq!(lineages.seen(&keys(&["u1", "edited", "u2"])), 1);
    assert_eq!(lineages.seen(&keys(&["u0"])), 0);
}

/// The ids that a request of these messages goes on from.
fn gone_on_from(lineages: &Lineages, messages: &[(&str, &str)]) -> Vec<u32> {
    let texts: Vec<&str> = messages.iter().map(|(text, _)| *text).collect();
    lineages.longest(&keys(&texts), &spelled(messages)).expect("it goes on").1.all_ids()
}

#[test]
fn of_replies_that_say_the_same_the_one_that_the_client_has_is_gone_on_from() {
    let lineages = Lineages::default();
    let end = keys(&["u", "a"])[2];
    let held = [("a", "one"), ("a", "two"), ("a\n", "two"), ("a", "")];
    for ((asked, told), id) in (1..).zip(held).zip(10..) {
        lineages.hold(end, Turn::new(None, &[1], &[id], reply(1, told, asked)));
    }
    let ids = |told| gone_on_from(&lineages, &[("u", ""), told, ("more", "")]);
    assert_eq!(ids(("a", "one")), [1, 10]);
    assert_eq!(ids(("a", "two")), [1, 11]);
    assert_eq!(ids(("a\n", "two")), [1, 12]);
    assert_eq!(ids(("a", "")), [1, 13]);
    // What the protocol trimmed tells as much.
    assert_eq!(ids(("a", " one\n")), [1, 10]);
    // A thought that is nobody's does not: the text that is nobody else's does.
    assert_eq!(ids(("a\n", "three")), [1, 12]);
}

#[test]
fn of_replies_that_nothing_tells_apart_the_one_that_was_asked_for_last_is_gone_on_from() {
    let end = keys(&["u", "a"])[2];
    let of = |order: &[usize]| {
        let lineages = Lineages::default();
        let turns: Vec<Arc<Turn>> = (0..4_u32)
            .map(|at| {
                let mut reply = reply(1, ("a", ""), u64::from(at / 2));
                reply.choice = (at % 2) as u16;
                Turn::new(None, &[1], &[at], reply)
            })
            .collect();
        order.iter().for_each(|&at| lineages.hold(end, Arc::clone(&turns[at])));
        gone_on_from(&lineages, &[("u", ""), ("a", ""), ("more", "")])
    };
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        assert_eq!(of(&order), [1, 2], "the first choice of the later call");
    }
}

#[test]
fn a_reply_that_was_not_given_never_counts_before_one_that_was() {
    let lineages = Lineages::default();
    let end = keys(&["u", "a"])[2];
    let mut left = reply(1, ("a", "thought"), 2);
    left.given = Given::default();
    let mark = left.given.clone();
    lineages.hold(end, Turn::new(None, &[1], &[2], left));
    let ids = || gone_on_from(&lineages, &[("u", ""), ("a", "thought"), ("more", "")]);
    assert_eq!(ids(), [1, 2], "there is no other");
    lineages.hold(end, Turn::new(None, &[1], &[3], reply(1, ("a", "another"), 1)));
    assert_eq!(ids(), [1, 3]);
    // Its client has it after all.
    mark.set();
    assert_eq!(ids(), [1, 2]);
}

#[test]
fn an_earlier_reply_tells_later_ones_apart() {
    let lineages = Lineages::default();
    let all = keys(&["u", "a", "v", "b"]);
    for (number, thought) in (1..).zip(["one", "two"]) {
        let first = Turn::new(None, &[1], &[number as u32], reply(1, ("a", thought), number));
        lineages.hold(all[2], Arc::clone(&first));
        let prompt = [1, number as u32, 7];
        lineages.hold(all[4], Turn::new(Some(first), &prompt, &[8], reply(3, ("b", ""), 10 - number)));
    }
    // One that was rendered anew says nothing of what came before it.
    lineages.hold(all[4], Turn::new(None, &[1, 9, 7], &[8], reply(3, ("b", "else"), 20)));
    let ids = |thought, later| {
        gone_on_from(&lineages, &[("u", ""), ("a", thought), ("v", ""), ("b", later), ("w", "")])
    };
    assert_eq!(ids("one", "else"), [1, 9, 7, 8]);
    lineages.lock().by_end.get_mut(&all[4]).expect("held").pop();
    assert_eq!(ids("one", ""), [1, 1, 7, 8]);
    assert_eq!(ids("two", ""), [1, 2, 7, 8]);
    assert_eq!(ids("gone", ""), [1, 1, 7, 8], "the later one");
}

proptest! {
    #[test]
    fn few_are_held_and_the_choice_is_the_same_in_whatever_order_they_came(
        replies in prop::collection::vec((0..3_usize, any::<bool>(), 0..4_u16), 1..12),
        back in 0..3_usize,
        seed in any::<u64>(),
    ) {
        const THOUGHTS: [&str; 3] = ["", "one", "two"];
        let end = keys(&["u", "a"])[2];
        let turns: Vec<Arc<Turn>> = replies.iter().zip(0_u32..).map(|((thought, is_given, choice), at)| {
            let mut reply = reply(1, ("a", THOUGHTS[*thought]), u64::from(at));
            (reply.choice, reply.given) = (*choice, Given::default());
            if *is_given {
                reply.given.set();
            }
            Turn::new(None, &[1], &[at], reply)
        }).collect();
        let of = |turns: &[Arc<Turn>]| {
            let lineages = Lineages::default();
            turns.iter().for_each(|turn| lineages.hold(end, Arc::clone(turn)));
            prop_assert!(lineages.lock().by_end[&end].len() <= MOST_ALIKE);
            Ok(gone_on_from(&lineages, &[("u", ""), ("a", THOUGHTS[back]), ("more", "")]))
        };
        let found = of(&turns)?;
        if turns.len() > MOST_ALIKE {
            return Ok(());
        }
        let mut shuffled = turns.clone();
        for i in (1..shuffled.len()).rev() {
            shuffled.swap(i, (seed as usize).wrapping_mul(i + 7) % (i + 1));
        }
        prop_assert_eq!(&of(&shuffled)?, &found);
        // Those that were given, of these those that thought what came back, of these the last.
        let is_given = replies.iter().any(|(_, is_given, _)| *is_given);
        let mut fit: Vec<usize> = (0..replies.len()).filter(|&at| replies[at].1 == is_given).collect();
        if fit.iter().any(|&at| replies[at].0 == back) {
            fit.retain(|&at| replies[at].0 == back);
        }
        prop_assert_eq!(Some(found[1] as usize), fit.last().copied());
    }
}

#[test]
fn a_long_conversation_is_dropped_without_recursion() {
    let mut turn = Turn::new(None, &[0], &[1], reply(1, ("", ""), 1));
    for _ in 0..200_000 {
        turn = Arc::new(Turn { before: Some(turn), ids: vec![2], sampled: 1, reply: reply(1, ("", ""), 1) });
    }
    assert_eq!(turn.len(), 200_002);
}
