//! The embedded engine: what runs beside a request, chunks and reused prefixes change nothing, to the bit.

use std::path::Path;
use std::sync::Arc;

use lego::engine::{
    Engine, EngineError, EngineOptions, Event, FinishReason, GenerateRequest, LogprobsMode, SampledToken,
    SamplingParams,
};
use lego::kernels::Pool;
use lego::model::Model;
use lego::record::PolicyVersion;
use tokio::sync::mpsc::Receiver;

fn model() -> Arc<Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_tiny");
    Arc::new(Model::load(&folder).expect("the golden checkpoint"))
}

fn options(model: &Model) -> EngineOptions {
    EngineOptions { max_batch: 8, cache_slots: 12, threads: 2, ..EngineOptions::for_model(model) }
}

fn engine(change: impl FnOnce(&mut EngineOptions)) -> Engine {
    let model = model();
    let mut options = options(&model);
    change(&mut options);
    Engine::start(model, options).expect("starts")
}

/// A prompt of `len` ids that differs by `variant` from the token `shared` on.
fn prompt(len: usize, shared: usize, variant: u32) -> Vec<u32> {
    (0..len as u32).map(|at| (at * 7 + if at as usize >= shared { 13 * variant } else { 0 }) % 320).collect()
}

fn request(prompt: Vec<u32>, seed: u64, max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        prompt,
        sampling: SamplingParams { seed, ..SamplingParams::default() },
        max_tokens,
        stop_token_ids: Vec::new(),
        top_logprobs: 0,
    }
}

fn collect(mut receiver: Receiver<Event>) -> (Vec<SampledToken>, Option<FinishReason>) {
    let mut tokens = Vec::new();
    loop {
        match receiver.blocking_recv() {
            Some(Event::Token(token)) => tokens.push(token),
            Some(Event::Last(token, reason)) => {
                tokens.push(token);
                assert!(receiver.blocking_recv().is_none(), "nothing follows the last token");
                return (tokens, Some(reason));
            }
            Some(Event::Aborted(reason)) => panic!("aborted: {reason}"),
            None => return (tokens, None),
        }
    }
}

fn run(engine: &Engine, request: GenerateRequest) -> Vec<SampledToken> {
    collect(engine.submit(request).expect("accepted")).0
}

fn bits(tokens: &[SampledToken]) -> Vec<(u32, u32)> {
    tokens.iter().map(|token| (token.id, token.logprob.to_bits())).collect()
}

/// Requests of different lengths, with shared beginnings and different sampling.
fn requests() -> Vec<GenerateRequest> {
    (0..17u32)
        .map(|index| {
            let mut request =
                request(prompt(5 + 9 * index as usize % 60, 20, index % 3), u64::from(index), 24);
            request.sampling.temperature = [1.0, 0.7, 0.0, 1.5][index as usize % 4];
            request.sampling.top_p = [1.0, 0.9][index as usize % 2];
            request.sampling.top_k = [0, 0, 40][index as usize % 3];
            request
        })
        .collect()
}

#[test]
fn a_request_gives_the_same_alone_and_amid_others() {
    let requests = requests();
    let alone: Vec<_> = requests
        .iter()
        .map(|one| {
            bits(&run(&engine(|options| (options.threads, options.reuse_prefixes) = (1, false)), one.clone()))
        })
        .collect();
    for (threads, chunk, reuse_prefixes, max_batch) in [(2, 512, true, 12), (1, 7, true, 3), (2, 1, false, 5)]
    {
        let engine = engine(|options| {
            (options.threads, options.prefill_chunk) = (threads, chunk);
            (options.reuse_prefixes, options.max_batch) = (reuse_prefixes, max_batch);
        });
        let receivers: Vec<_> =
            requests.iter().map(|one| engine.submit(one.clone()).expect("accepted")).collect();
        for (receiver, expected) in receivers.into_iter().zip(&alone) {
            let (tokens, reason) = collect(receiver);
            assert_eq!(&bits(&tokens), expected);
            assert_eq!(reason, Some(FinishReason::Length));
        }
        assert_eq!(engine.stats().reused_tokens > 0, reuse_prefixes);
    }
}

#[test]
fn log_probs_are_those_of_replay() {
    for (temperature, mode) in
        [(1.0, LogprobsMode::Raw), (0.5, LogprobsMode::Raw), (0.5, LogprobsMode::Processed)]
    {
        let engine = engine(|options| options.logprobs_mode = mode);
        let mut request = request(prompt(33, 33, 0), 5, 40);
        request.sampling.temperature = temperature;
        let tokens = run(&engine, request.clone());
        let mut sequence = request.prompt.clone();
        sequence.extend(tokens.iter().map(|token| token.id));
        let replay_temperature = if mode == LogprobsMode::Processed { temperature } else { 1.0 };
        let replayed = model().log_probs(&Pool::serial(), &[&sequence], replay_temperature).expect("replays");
        let sampled: Vec<u32> = tokens.iter().map(|token| token.logprob.to_bits()).collect();
        let expected: Vec<u32> =
            replayed[0][request.prompt.len() - 1..].iter().map(|logprob| logprob.to_bits()).collect();
        assert_eq!(sampled, expected);
    }
}

#[test]
fn a_next_turn_reads_only_what_is_new() {
    let engine = engine(|_| {});
    let first = request(prompt(50, 50, 0), 1, 10);
    let sampled = run(&engine, first.clone());
    let read = engine.stats().prefill_tokens;
    let mut next = request(first.prompt, 2, 10);
    next.prompt.extend(sampled.iter().map(|token| token.id));
    next.prompt.extend([1, 2, 3, 4]);
    let tokens = run(&engine, next.clone());
    // The last token of the first turn was sampled, not read.
    assert_eq!(engine.stats().prefill_tokens - read, 5);
    assert_eq!(engine.stats().reused_tokens, 59);
    let fresh = run(&self::engine(|options| options.reuse_prefixes = false), next);
    assert_eq!(bits(&tokens), bits(&fresh));
}

#[test]
fn a_group_of_the_same_prompt_reads_it_once() {
    let engine = engine(|options| options.prefill_chunk = 16);
    let receivers: Vec<_> =
        (0..8).map(|seed| engine.submit(request(prompt(100, 100, 0), seed, 4)).expect("accepted")).collect();
    let all: Vec<_> = receivers.into_iter().map(|receiver| collect(receiver).0).collect();
    assert!(all.windows(2).any(|pair| pair[0] != pair[1]), "seeds differ");
    // Each reads at least the last token of its prompt, and at most what was not worth waiting for.
    assert!(engine.stats().prefill_tokens < 100 + 7 * 32, "{:?}", engine.stats());
}

#[test]
fn dropping_the_receiver_frees_the_slot() {
    let engine = engine(|options| (options.max_batch, options.cache_slots) = (1, 1));
    let mut endless = engine.submit(request(vec![1, 2, 3], 0, 500)).expect("accepted");
    assert!(matches!(endless.blocking_recv(), Some(Event::Token(_))));
    let waiting = engine.submit(request(vec![4], 0, 500)).expect("accepted");
    drop(waiting);
    drop(endless);
    assert_eq!(run(&engine, request(vec![5, 6], 0, 3)).len(), 3);
    assert_eq!(engine.stats().running, 0);
    assert_eq!(engine.stats().waiting, 0);
    assert!(engine.stats().sampled_tokens < 900, "both were ended early");
}

#[test]
fn requests_that_cannot_run_are_refused() {
    let engine = engine(|options| (options.max_context, options.max_queue) = (64, 2));
    let refused = |request: GenerateRequest| engine.submit(request).expect_err("refused");
    let error = refused(request(prompt(64, 64, 0), 0, 1));
    assert!(matches!(error, EngineError::PromptTooLong { prompt_tokens: 64, max_context: 64 }), "{error}");
    let error = refused(request(prompt(60, 60, 0), 0, 5));
    assert!(error.to_string().contains("maximum context length is 64 tokens"), "{error}");
    assert!(matches!(refused(request(vec![], 0, 5)), EngineError::EmptyPrompt));
    assert!(matches!(refused(request(vec![320], 0, 5)), EngineError::TokenOutOfRange { token: 320, .. }));
    let mut bad = request(vec![1], 0, 5);
    bad.sampling.top_p = 0.0;
    assert!(matches!(refused(bad), EngineError::Sampling { name: "top_p", .. }));
    // The longest that fits.
    assert_eq!(run(&engine, request(prompt(60, 60, 0), 0, 4)).len(), 4);
}

#[test]
fn a_full_queue_is_an_error() {
    let engine = engine(|options| (options.max_batch, options.cache_slots, options.max_queue) = (1, 1, 2));
    let mut running = engine.submit(request(vec![1], 0, 500)).expect("accepted");
    assert!(running.blocking_recv().is_some());
    let _waiting: Vec<_> =
        (0..2).map(|seed| engine.submit(request(vec![2], seed, 500)).expect("accepted")).collect();
    let error = engine.submit(request(vec![3], 0, 1)).expect_err("refused");
    assert!(matches!(error, EngineError::QueueFull { limit: 2 }), "{error}");
}

#[test]
fn a_stop_token_is_the_last_token() {
    let engine = engine(|_| {});
    let whole = run(&engine, request(vec![9, 8, 7], 3, 30));
    let mut stopped = request(vec![9, 8, 7], 3, 30);
    stopped.stop_token_ids = vec![whole[10].id];
    let first = whole.iter().position(|token| token.id == whole[10].id).expect("there");
    let (tokens, reason) = collect(engine.submit(stopped).expect("accepted"));
    assert_eq!(bits(&tokens), bits(&whole[..=first]));
    assert_eq!(reason, Some(FinishReason::Stop(whole[10].id)));
}

#[test]
fn publications_take_their_place_in_the_queue() {
    let old = model();
    let mut new = (*old).clone();
    new.update(|weights| weights.iter_mut().for_each(|weight| *weight *= 1.01));
    let new = Arc::new(new);
    let engine =
        Engine::start(old.clone(), EngineOptions { first_version: PolicyVersion(4), ..options(&old) })
            .expect("starts");
    let before: Vec<_> =
        (0..10).map(|seed| engine.submit(request(prompt(40, 40, 0), seed, 20)).expect("accepted")).collect();
    assert_eq!(engine.version(), PolicyVersion(4));
    assert_eq!(engine.publish(new.clone()).expect("same architecture"), PolicyVersion(5));
    let after: Vec<_> =
        (0..10).map(|seed| engine.submit(request(prompt(40, 40, 0), seed, 20)).expect("accepted")).collect();
    for (receivers, weights, version) in [(before, &old, 4), (after, &new, 5)] {
        let alone = Engine::start(weights.clone(), options(weights)).expect("starts");
        for (seed, receiver) in receivers.into_iter().enumerate() {
            let (tokens, _) = collect(receiver);
            assert!(tokens.iter().all(|token| token.version == PolicyVersion(version)));
            let expected = run(&alone, request(prompt(40, 40, 0), seed as u64, 20));
            assert_eq!(bits(&tokens), bits(&expected));
        }
    }
    assert_eq!(engine.version(), PolicyVersion(5));
}

#[test]
fn the_end_of_the_engine_reaches_its_requests() {
    let engine = engine(|options| (options.max_batch, options.cache_slots) = (1, 1));
    let mut running = engine.submit(request(vec![1], 0, 500)).expect("accepted");
    let mut waiting = engine.submit(request(vec![2], 0, 500)).expect("accepted");
    assert!(running.blocking_recv().is_some());
    drop(engine);
    let last = |receiver: &mut Receiver<Event>| std::iter::from_fn(|| receiver.blocking_recv()).last();
    assert!(matches!(last(&mut running), Some(Event::Aborted(_))));
    assert!(matches!(last(&mut waiting), Some(Event::Aborted(_))));
}

#[test]
fn options_that_cannot_work_are_refused() {
    let model = model();
    let start = |change: fn(&mut EngineOptions)| {
        let mut options = options(&model);
        change(&mut options);
        Engine::start(model.clone(), options).expect_err("refused").to_string()
    };
    assert!(start(|options| options.max_context = 513).contains("512 positions"));
    assert!(start(|options| options.max_batch = 0).contains("max_batch = 0"));
    assert!(start(|options| options.cache_slots = 2).contains("max_batch = 8"));
}
