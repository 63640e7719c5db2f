//! A sample fed back through the policy that sampled it gives the captured log-probs to the bit, whatever became of the
//! conversation in between.

use std::path::Path;
use std::sync::Arc;

use lego::config::Samples;
use lego::engine::{Engine, EngineOptions, Event, GenerateRequest, SamplingParams};
use lego::kernels::Pool;
use lego::model::Model;
use lego::record::{Call, Disposition};
use lego::replay::replay;
use lego::trajectory::{lineages, samples};

use crate::calls::call;

/// What a harness does with the last prompt and its reply before it asks again.
const DEEDS: [&str; 12] = [
    "go on",
    "go on",
    "retry",
    "fork",
    "go on",
    "drop the first half of the reply",
    "go on",
    "cut",
    "go on",
    "edit",
    "sub-agent",
    "go on",
];

#[test]
fn samples_give_their_captured_log_probs_to_the_bit() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/models/lego-tiny"));
    let model = Arc::new(Model::load(folder).expect("the tiny policy"));
    let engine =
        Engine::start(model.clone(), EngineOptions { threads: 2, ..EngineOptions::for_model(&model) });
    let engine = engine.expect("started");
    let vocabulary = model.config().vocab_size as u32;
    let text =
        |from: u32, tokens: u32| (0..tokens).map(|at| (from * 31 + at * at * 7 + 3) % vocabulary).collect();
    let mut calls: Vec<Arc<Call>> = vec![];
    let mut ask = |prompt: &[u32]| -> Vec<u32> {
        let request = GenerateRequest {
            prompt: prompt.to_vec(),
            sampling: SamplingParams { seed: calls.len() as u64, ..SamplingParams::default() },
            max_tokens: 5 + calls.len() % 9,
            stop_token_ids: vec![],
            top_logprobs: 0,
        };
        let mut events = engine.submit(request).expect("it fits");
        let mut sampled = vec![];
        while let Some(event) = events.blocking_recv() {
            match event {
                Event::Token(token) | Event::Last(token, _) => sampled.push((token.id, Some(token.logprob))),
                Event::Aborted(why) => panic!("{why}"),
            }
        }
        let (ids, logprobs): (Vec<u32>, Vec<Option<f32>>) = sampled.into_iter().unzip();
        let mut one = call("s", prompt, &ids);
        one.received_at += calls.len() as i64;
        one.completion_logprobs = Some(logprobs);
        calls.push(Arc::new(one));
        ids
    };
    let mut prompt: Vec<u32> = text(1, 20);
    let mut reply = ask(&prompt);
    for (at, deed) in (2..).zip(DEEDS) {
        match deed {
            "retry" => {}
            "fork" => {
                let other: Vec<u32> = [prompt.clone(), reply.clone(), text(50, 4)].concat();
                ask(&other);
                prompt.extend(reply);
                prompt.extend::<Vec<u32>>(text(at, 3));
            }
            "drop the first half of the reply" => {
                prompt.extend(&reply[reply.len() / 2..]);
                prompt.extend::<Vec<u32>>(text(at, 3));
            }
            "cut" => drop(prompt.drain(10..30)),
            "edit" => prompt[12] = (prompt[12] + 1) % vocabulary,
            "sub-agent" => {
                let mut own: Vec<u32> = text(90, 15);
                own.extend(ask(&own));
                own.extend::<Vec<u32>>(text(91, 2));
                ask(&own);
            }
            _ => {
                prompt.extend(reply);
                prompt.extend::<Vec<u32>>(text(at, 6));
            }
        }
        reply = ask(&prompt);
    }

    let found = lineages(&calls);
    let built = samples(&found, None, &Samples::default());
    built.check(&calls).expect("balanced");
    let trained: u64 = built.samples.iter().map(|sample| sample.sampled_tokens() as u64).sum();
    let sampled: usize = calls.iter().filter_map(|call| call.sampled_ids()).map(<[u32]>::len).sum();
    let superseded = built.ledger.iter().filter(|entry| entry.disposition == Disposition::Superseded);
    let superseded: u64 = superseded.map(|entry| entry.tokens).sum();
    assert!(superseded > 0 && built.samples.len() >= 5, "{} samples", built.samples.len());
    assert_eq!(trained + superseded, sampled as u64);
    let rows: Vec<_> = built.samples.iter().collect();
    for threads in [1, 2] {
        let replayed = replay(&model, &Pool::new(threads), &rows).expect("they fit");
        for (sample, replayed) in built.samples.iter().zip(&replayed) {
            let bits = |values: &[Option<f32>]| -> Vec<Option<u32>> {
                values.iter().map(|value| value.map(f32::to_bits)).collect()
            };
            assert_eq!(bits(replayed), bits(&sample.logprobs));
        }
    }
}
