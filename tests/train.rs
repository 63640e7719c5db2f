//! The learner from outside: it learns, its results do not depend on how the work is cut, checkpoints resume to the bit.

use lego::kernels::Pool;
use lego::loss::{AdvantageEstimator, Aggregation, PolicyLossOptions};
use lego::model::{Config, Model, Shape};
use lego::record::{
    CallId, CallSpan, ChoiceId, EpisodeId, GroupId, PolicyVersion, Position, Sample, SampleParts,
};
use lego::train::{
    Checkpoints, DegenerateGroups, Episode, Learner, LearnerOptions, OptimizerOptions, StepMetrics,
    TrainError,
};
use serde_json::json;

const VOCAB: usize = 40;
/// Learning rates of one step, and of two.
const ONE: [f64; 1] = [1e-2];
const TWO: [f64; 2] = [1e-2, 1e-2];

fn tiny_model() -> Model {
    let config = Config::new(Shape {
        vocab_size: VOCAB,
        hidden_size: 16,
        intermediate_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        rope_theta: 1e4,
        max_position_embeddings: 64,
        tie_word_embeddings: true,
    })
    .expect("sizes fit");
    Model::init(config, 5)
}

fn options() -> LearnerOptions {
    LearnerOptions {
        loss: PolicyLossOptions { kl_coef: 0.01, clip_high: 0.28, ..Default::default() },
        ..LearnerOptions::default()
    }
}

fn span(start: usize, end: usize) -> CallSpan {
    let choice = ChoiceId { call_id: CallId::now(), choice_index: 0 };
    CallSpan { choice, start: Position::new(start), end: Position::new(end) }
}

/// A row whose sampled tokens are two stretches, with log-probs as `model` has them.
fn sample(model: &Model, pool: &Pool, token_ids: Vec<u32>, version: u64) -> Sample {
    let length = token_ids.len();
    let log_probs = model.log_probs(pool, &[&token_ids], 1.0).expect("valid ids").remove(0);
    let is_sampled = |i: usize| (3..6).contains(&i) || i >= length - 3;
    let some = |i: usize| is_sampled(i).then_some(());
    Sample::new(SampleParts {
        loss_mask: (0..length).map(is_sampled).collect(),
        logprobs: (0..length).map(|i| some(i).map(|()| log_probs[i - 1])).collect(),
        weight_version: (0..length).map(|i| some(i).map(|()| version)).collect(),
        temperature: (0..length).map(|i| some(i).map(|()| 1.0)).collect(),
        call_spans: vec![span(3, 6), span(length - 3, length)],
        token_ids,
        ..SampleParts::default()
    })
    .expect("a valid sample")
}

fn ids(seed: usize, length: usize) -> Vec<u32> {
    (0..length).map(|i| ((seed * 31 + i * i * 7 + i) % VOCAB) as u32).collect()
}

/// Four groups of four; the last has no spread. Episodes have one to three rows of different lengths.
fn episodes(model: &Model, pool: &Pool) -> Vec<Episode> {
    (0..16)
        .map(|i| Episode {
            episode_id: EpisodeId(i as u64),
            group_id: GroupId(i as u64 / 4),
            reward: if i >= 12 { 1.0 } else { f64::from(u8::from(i % 3 == 0)) },
            samples: (0..1 + i % 3)
                .map(|row| sample(model, pool, ids(i * 5 + row, 9 + (i * 7 + row * 11) % 40), 0))
                .collect(),
        })
        .collect()
}

/// Weights and metrics after two versions of two optimizer steps each.
fn train(threads: usize, max_microbatch_tokens: usize, is_reversed: bool) -> (Vec<f32>, Vec<StepMetrics>) {
    let model = tiny_model();
    let pool = Pool::new(threads);
    let mut episodes = episodes(&model, &pool);
    if is_reversed {
        episodes.reverse();
    }
    let options = LearnerOptions { max_microbatch_tokens, ..options() };
    let mut learner = Learner::new(model.clone(), Some(model), options, pool).expect("valid options");
    let mut metrics = Vec::new();
    for version in 0..2 {
        metrics
            .extend(learner.train_version(&episodes, &TWO, PolicyVersion(version)).expect("finite numbers"));
    }
    (learner.model().parameters().flat().to_vec(), metrics)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_step_is_the_same_bits_at_any_threads_microbatches_and_arrival_order() {
    let (weights, metrics) = train(1, 100_000, false);
    for (threads, tokens, is_reversed) in [(2, 100_000, false), (1, 1, false), (2, 90, true)] {
        let (other, other_metrics) = train(threads, tokens, is_reversed);
        assert_eq!(metrics, other_metrics, "{threads} threads, {tokens} tokens");
        assert_eq!(bits(&weights), bits(&other), "{threads} threads, {tokens} tokens");
    }
    assert_eq!(metrics.len(), 4);
    assert_eq!(metrics[0].max_logprob_diff, Some(0.0), "captured by the same model");
    assert_eq!(metrics[1].max_logprob_diff, Some(0.0), "recomputed before the first update");
    assert_eq!(metrics[0].prob_correlation, Some(1.0));
    assert_eq!(metrics[0].kl, Some(0.0), "the first step starts at the reference");
    assert!(metrics[1].kl.expect("reference") > 0.0);
    assert_eq!(metrics[0].ratio_max, Some(1.0));
    assert!(metrics[1].ratio_max > Some(1.0), "the ratio is against captured log-probs");
    // The second version's batch was sampled by the first.
    assert_eq!(metrics[2].policy_version_lag_max, Some(1));
    assert_eq!((metrics[2].aligned_tokens, metrics[2].max_logprob_diff), (0, None));
    // The loss is its two parts.
    for step in &metrics {
        let (loss, policy) = (step.loss.expect("a loss"), step.policy_loss.expect("its policy part"));
        let kl = step.kl_loss.expect("its KL part");
        assert!((loss - (policy + 0.01 * kl)).abs() < 1e-12, "{loss} {policy} {kl}");
        assert!(step.advantage_mean.abs() < 1e-3, "{}", step.advantage_mean);
    }
    assert!(metrics[1].kl_loss > Some(0.0));
    assert_eq!(metrics[0].degenerate_group_ratio, 0.25);
    assert_eq!(metrics[0].all_solved_group_ratio, 0.25);
}

#[test]
fn rewarded_tokens_become_likely() {
    let model = tiny_model();
    let pool = Pool::new(2);
    let good = sample(&model, &pool, ids(1, 12), 0);
    let bad = sample(&model, &pool, ids(2, 12), 0);
    let options = LearnerOptions {
        loss: PolicyLossOptions::default(),
        advantage: AdvantageEstimator::GrpoTrl,
        ..options()
    };
    let mut learner = Learner::new(model, None, options, pool).expect("valid options");
    let probability = |learner: &Learner, sample: &Sample| {
        let log_probs =
            learner.model().log_probs(&Pool::new(1), &[&sample.token_ids], 1.0).expect("valid ids").remove(0);
        (1..sample.token_ids.len())
            .filter(|&i| sample.loss_mask[i])
            .map(|i| f64::from(log_probs[i - 1]).exp())
            .sum::<f64>()
            / sample.sampled_tokens() as f64
    };
    let before = probability(&learner, &good);
    for version in 0..40 {
        // Fresh captures each version: on-policy.
        let episode = |id: u64, reward: f64, sample_ids: &Sample| Episode {
            episode_id: EpisodeId(id),
            group_id: GroupId(0),
            reward,
            samples: vec![sample(learner.model(), &Pool::new(1), sample_ids.token_ids.clone(), version)],
        };
        let batch = [episode(0, 1.0, &good), episode(1, 0.0, &bad)];
        let metrics = learner.train_version(&batch, &ONE, PolicyVersion(version)).expect("finite numbers");
        assert_eq!(metrics[0].max_logprob_diff, Some(0.0));
        assert_eq!(metrics[0].clip_fraction, Some(0.0));
    }
    let after = probability(&learner, &good);
    assert!(after > 0.8 && before < 0.1, "{before} -> {after}");
}

#[test]
fn a_batch_without_spread_changes_nothing() {
    let model = tiny_model();
    let pool = Pool::new(1);
    let mut episodes = episodes(&model, &pool);
    for episode in &mut episodes {
        episode.reward = 0.0;
    }
    for degenerate_groups in [DegenerateGroups::Keep, DegenerateGroups::Drop] {
        let options = LearnerOptions { loss: PolicyLossOptions::default(), degenerate_groups, ..options() };
        let mut learner = Learner::new(model.clone(), None, options, Pool::new(1)).expect("valid options");
        let metrics =
            learner.train_version(&episodes, &ONE, PolicyVersion(0)).expect("a step without effect");
        assert_eq!((metrics[0].grad_norm, metrics[0].loss), (None, Some(0.0)));
        assert_eq!(metrics[0].degenerate_group_ratio, 1.0);
        assert_eq!(metrics[0].all_failed_group_ratio, 1.0);
        assert_eq!(metrics[0].max_logprob_diff, Some(0.0), "still compared");
        assert_eq!(learner.optimizer_steps(), 0);
        assert_eq!(bits(learner.model().parameters().flat()), bits(model.parameters().flat()));
    }
}

#[test]
fn episodes_without_rows_are_counted_and_give_no_numbers_of_tokens() {
    let model = tiny_model();
    let mut episodes = episodes(&model, &Pool::new(1));
    for episode in &mut episodes {
        episode.samples.clear();
    }
    let mut learner =
        Learner::new(model.clone(), Some(model.clone()), options(), Pool::new(1)).expect("valid options");
    let metrics = learner.train_version(&episodes, &ONE, PolicyVersion(0)).expect("no effect").remove(0);
    assert!(metrics.solve_rate > 0.0 && metrics.advantage_std > 0.0, "{metrics:?}");
    assert_eq!((metrics.sampled_tokens, metrics.aligned_tokens), (0, 0));
    let of_tokens = [
        metrics.loss,
        metrics.policy_loss,
        metrics.kl_loss,
        metrics.kl,
        metrics.kl_old,
        metrics.entropy,
        metrics.clip_fraction,
        metrics.ratio_mean,
        metrics.ratio_max,
        metrics.grad_norm,
        metrics.policy_version_lag,
        metrics.max_logprob_diff,
        metrics.mean_logprob_diff,
    ];
    assert_eq!(of_tokens, [None; 13]);
    assert_eq!(bits(learner.model().parameters().flat()), bits(model.parameters().flat()));
}

#[test]
fn each_step_has_its_own_learning_rate() {
    let model = tiny_model();
    let episodes = episodes(&model, &Pool::new(1));
    let trained = |rates: &[f64]| {
        let mut learner =
            Learner::new(model.clone(), Some(model.clone()), options(), Pool::new(1)).expect("valid options");
        let metrics = learner.train_version(&episodes, rates, PolicyVersion(0)).expect("finite");
        assert_eq!(metrics.iter().map(|step| step.learning_rate).collect::<Vec<_>>(), rates);
        assert_eq!(learner.replay_time().is_some(), rates.len() > 1);
        (bits(learner.model().parameters().flat()), metrics)
    };
    let (first_only, _) = trained(&[1e-2, 0.0]);
    let (both, _) = trained(&TWO);
    assert_ne!(first_only, both);
    // At a rate of 0 a step changes no weight.
    let (_, metrics) = trained(&[0.0, 1e-2]);
    assert_eq!(metrics[1].ratio_max, Some(1.0), "the weights are still those that sampled");
}

#[test]
fn a_bound_of_0_leaves_the_gradient_as_it_is() {
    let model = tiny_model();
    let episodes = episodes(&model, &Pool::new(1));
    let weights = |max_grad_norm| {
        // One step of AdamW hides the gradient's scale but for its epsilon.
        let optimizer = OptimizerOptions { max_grad_norm, eps: 1.0, ..Default::default() };
        let options = LearnerOptions { optimizer, ..options() };
        let mut learner =
            Learner::new(model.clone(), Some(model.clone()), options, Pool::new(1)).expect("0 is allowed");
        learner.train_version(&episodes, &ONE, PolicyVersion(0)).expect("finite");
        bits(learner.model().parameters().flat())
    };
    assert_eq!(weights(0.0), weights(1e9), "a bound that is never reached");
    assert_ne!(weights(0.0), weights(1e-3));
    for clip_low in [0.0, 1.0] {
        let loss = PolicyLossOptions { clip_low, ..options().loss };
        let options = LearnerOptions { loss, ..options() };
        Learner::new(model.clone(), Some(model.clone()), options, Pool::new(1))
            .expect("both ends are allowed");
    }
}

#[test]
fn dropped_groups_leave_the_denominator() {
    let model = tiny_model();
    let pool = Pool::new(1);
    let episodes = episodes(&model, &pool);
    let step = |degenerate_groups| {
        let options = LearnerOptions {
            loss: PolicyLossOptions::default(),
            aggregation: Aggregation::TokenMean,
            degenerate_groups,
            ..options()
        };
        let mut learner = Learner::new(model.clone(), None, options, Pool::new(1)).expect("valid options");
        learner.train_version(&episodes, &ONE, PolicyVersion(0)).expect("finite").remove(0)
    };
    let (kept, dropped) = (step(DegenerateGroups::Keep), step(DegenerateGroups::Drop));
    let without_spread: usize =
        episodes[12..].iter().flat_map(|e| &e.samples).map(Sample::sampled_tokens).sum();
    assert_eq!(kept.sampled_tokens - dropped.sampled_tokens, without_spread);
    let ratio = dropped.grad_norm.expect("gradient") / kept.grad_norm.expect("gradient");
    let expected = kept.sampled_tokens as f64 / dropped.sampled_tokens as f64;
    assert!((ratio - expected).abs() < 1e-4, "{ratio} {expected}");
}

#[test]
fn what_cannot_be_trained_on_is_refused_by_name() {
    let model = tiny_model();
    let pool = Pool::new(1);
    let mut bad = episodes(&model, &pool);
    bad[3].reward = f64::NAN;
    let mut learner =
        Learner::new(model.clone(), Some(model.clone()), options(), Pool::new(1)).expect("valid options");
    let refused = |learner: &mut Learner, episodes: &[Episode]| {
        learner.train_version(episodes, &ONE, PolicyVersion(0)).expect_err("refused").to_string()
    };
    assert!(refused(&mut learner, &bad).contains("reward of episode 3"));
    assert!(refused(&mut learner, &[]).contains("no episode"));
    let twice = [bad[0].clone(), bad[0].clone()];
    assert!(refused(&mut learner, &twice).contains("episode 0 is in the batch twice"));
    assert_eq!(bits(learner.model().parameters().flat()), bits(model.parameters().flat()));

    let mut bad_options = options();
    bad_options.loss.clip_low = 2.0;
    let refused = Learner::new(model.clone(), Some(model.clone()), bad_options, Pool::new(1));
    assert!(refused.expect_err("refused").to_string().contains("clip_low"));
    for rates in [&[][..], &[f64::NAN], &[1e-2, -1.0]] {
        let refused = learner.train_version(&bad, rates, PolicyVersion(0)).expect_err("refused");
        assert!(refused.to_string().contains("learning_rates"), "{refused}");
    }
    let refused = Learner::new(model, None, options(), Pool::new(1));
    assert!(refused.expect_err("refused").to_string().contains("kl_coef"));
}

#[test]
fn a_checkpoint_resumes_to_the_bit() {
    let folder = tempfile::tempdir().expect("temp folder");
    let checkpoints = Checkpoints::new(folder.path().join("checkpoints"), 2);
    let model = tiny_model();
    let pool = Pool::new(1);
    let episodes = episodes(&model, &pool);
    let new = || {
        let options = LearnerOptions {
            optimizer: OptimizerOptions { weight_decay: 0.1, ..Default::default() },
            ..options()
        };
        Learner::new(model.clone(), Some(model.clone()), options, Pool::new(1)).expect("valid")
    };
    let mut straight = new();
    let companion = folder.path().join("tokenizer.json");
    std::fs::write(&companion, "{}").expect("written");
    assert_eq!(checkpoints.latest().expect("readable"), None);
    for version in 0..4 {
        straight.train_version(&episodes, &TWO, PolicyVersion(version)).expect("finite");
        let run = json!({ "version": version + 1, "rng": "0xfeed" });
        checkpoints.save(version + 1, &straight, std::slice::from_ref(&companion), &run).expect("saved");
    }
    assert_eq!(checkpoints.steps().expect("readable"), [3, 4], "the last two are kept");

    let mut resumed = new();
    let earlier = folder.path().join("checkpoints/step_3");
    let run = resumed.restore(&earlier).expect("restored");
    assert_eq!(run, json!({ "version": 3, "rng": "0xfeed" }));
    assert_eq!(resumed.optimizer_steps(), 6);
    resumed.train_version(&episodes, &TWO, PolicyVersion(3)).expect("finite");
    assert_eq!(resumed.optimizer_steps(), 8);
    assert_eq!(bits(resumed.model().parameters().flat()), bits(straight.model().parameters().flat()));
    // Any Hugging Face tool can load the folder.
    assert!(Model::load(&earlier).is_ok());
    assert!(earlier.join("tokenizer.json").exists());
}

#[test]
fn checkpoints_are_all_kept_when_none_is_to_go() {
    let folder = tempfile::tempdir().expect("temp folder");
    let learner = Learner::new(tiny_model(), Some(tiny_model()), options(), Pool::new(1)).expect("valid");
    for (keep, kept) in [(0, vec![1, 2, 3, 4]), (1, vec![4]), (3, vec![2, 3, 4])] {
        let checkpoints = Checkpoints::new(folder.path().join(format!("keep_{keep}")), keep);
        for step in 1..=4 {
            checkpoints.save(step, &learner, &[], &json!({})).expect("saved");
        }
        assert_eq!(checkpoints.steps().expect("readable"), kept, "keep {keep}");
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_by_file_name() {
    let folder = tempfile::tempdir().expect("temp folder");
    let checkpoints = Checkpoints::new(folder.path().to_owned(), 5);
    let mut learner = Learner::new(tiny_model(), Some(tiny_model()), options(), Pool::new(1)).expect("valid");
    for (step, file) in
        (1..).zip(["model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json"])
    {
        let dir = checkpoints.save(step, &learner, &[], &json!({})).expect("saved");
        let path = dir.join(file);
        let mut bytes = std::fs::read(&path).expect("readable");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, &bytes).expect("written");
        let refused = learner.restore(&dir).expect_err("refused");
        assert!(matches!(refused, TrainError::BrokenCheckpoint { .. }), "{refused}");
        assert!(refused.to_string().contains(file), "{refused}");
        bytes.truncate(middle);
        std::fs::write(&path, &bytes).expect("written");
        assert!(learner.restore(&dir).expect_err("refused").to_string().contains("were written"));
        std::fs::remove_file(&path).expect("removed");
        assert!(learner.restore(&dir).expect_err("refused").to_string().contains(file));
    }
    let dir = checkpoints.save(9, &learner, &[], &json!({})).expect("saved");
    std::fs::remove_file(dir.join("checkpoint.json")).expect("removed");
    assert!(learner.restore(&dir).expect_err("refused").to_string().contains("checkpoint.json"));
}

#[test]
fn a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones() {
    let folder = tempfile::tempdir().expect("temp folder");
    let checkpoints = Checkpoints::new(folder.path().to_owned(), 1);
    let learner = Learner::new(tiny_model(), Some(tiny_model()), options(), Pool::new(1)).expect("valid");
    checkpoints.save(1, &learner, &[], &json!({})).expect("saved");
    let missing = folder.path().join("no-such-tokenizer.json");
    let error = checkpoints.save(2, &learner, &[missing], &json!({})).expect_err("refused");
    assert!(error.to_string().contains("no-such-tokenizer.json"), "{error}");
    assert_eq!(checkpoints.steps().expect("readable"), [1]);
    assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 1, "no half folder");
}

#[test]
fn an_episode_without_rows_counts_in_its_group_and_a_batch_of_them_changes_nothing() {
    let model = tiny_model();
    let pool = Pool::new(1);
    let episode = |id: u64, reward: f64, samples: Vec<Sample>| Episode {
        episode_id: EpisodeId(id),
        group_id: GroupId(0),
        reward,
        samples,
    };
    let options = LearnerOptions { loss: PolicyLossOptions::default(), ..options() };
    let mut learner = Learner::new(model.clone(), None, options, Pool::new(1)).expect("valid options");
    let masked = [episode(0, 0.0, Vec::new()), episode(1, 0.0, Vec::new())];
    let metrics = learner.train_version(&masked, &ONE, PolicyVersion(0)).expect("no empty batch");
    assert_eq!((metrics[0].grad_norm, metrics[0].sampled_tokens), (None, 0));
    let solved = sample(&model, &pool, ids(1, 12), 0);
    let mixed = [episode(0, 0.0, Vec::new()), episode(1, 1.0, vec![solved])];
    let metrics = learner.train_version(&mixed, &ONE, PolicyVersion(0)).expect("a step");
    assert_eq!((metrics[0].degenerate_group_ratio, metrics[0].solve_rate), (0.0, 0.5));
    assert!(metrics[0].grad_norm.is_some_and(|norm| norm > 0.0), "the solved one has an advantage");
}
