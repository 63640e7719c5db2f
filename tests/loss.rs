//! The losses against numbers computed by independent implementations (`tests/golden/losses.json`),
//! against finite differences, and against what must not change them.

use lego::loss::{
    AdvantageEstimator, Aggregation, Denominator, KlEstimator, LossError, PolicyLossOptions, Row, TokenStats,
    advantages, alignment,
};
use serde_json::Value;

struct Golden {
    json: Value,
    mask: Vec<Vec<bool>>,
    log_probs: Vec<Vec<f64>>,
    old: Vec<Vec<Option<f64>>>,
    reference: Vec<Vec<f64>>,
}

fn matrix(value: &Value) -> Vec<Vec<f64>> {
    serde_json::from_value(value.clone()).expect("matrix of numbers")
}

fn golden() -> Golden {
    let json: Value = serde_json::from_str(include_str!("golden/losses.json")).expect("golden file parses");
    let inputs = &json["inputs"];
    let mask = matrix(&inputs["mask"]).iter().map(|row| row.iter().map(|&m| m == 1.0).collect()).collect();
    let old = matrix(&inputs["old_logp"]).iter().map(|row| row.iter().map(|&v| Some(v)).collect()).collect();
    Golden { mask, log_probs: matrix(&inputs["logp"]), old, reference: matrix(&inputs["ref_logp"]), json }
}

impl Golden {
    fn advantages(&self, estimator: AdvantageEstimator) -> Vec<f64> {
        let uid: Vec<u64> = serde_json::from_value(self.json["inputs"]["uid"].clone()).expect("uid");
        let rewards: Vec<f64> =
            serde_json::from_value(self.json["inputs"]["rewards"].clone()).expect("rewards");
        advantages(estimator, &uid, &rewards).expect("finite").values
    }

    fn denominator(&self, aggregation: Aggregation) -> Denominator {
        let tokens = self.mask.iter().map(|row| row.iter().filter(|&&m| m).count()).collect::<Vec<_>>();
        Denominator::new(aggregation, tokens).expect("tokens")
    }

    /// Loss and gradient over all six rows.
    fn loss(
        &self,
        options: &PolicyLossOptions,
        aggregation: Aggregation,
        estimator: AdvantageEstimator,
    ) -> (f64, Vec<Vec<f64>>, TokenStats) {
        let advantages = self.advantages(estimator);
        let denominator = self.denominator(aggregation);
        let (mut loss, mut gradients, mut stats) = (0.0, Vec::new(), TokenStats::default());
        for (i, &advantage) in advantages.iter().enumerate() {
            let row = options
                .row(&Row {
                    mask: &self.mask[i],
                    log_probs: &self.log_probs[i],
                    old_log_probs: &self.old[i],
                    reference_log_probs: Some(&self.reference[i]),
                    advantage,
                    token_weight: denominator.token_weight(i),
                })
                .expect("golden inputs are finite");
            loss += row.loss;
            gradients.push(row.gradient);
            stats.add(&row.stats);
        }
        (loss, gradients, stats)
    }
}

fn assert_near(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() <= 1e-12, "{what}: found {found}, expected {expected}");
}

#[test]
fn advantages_equal_the_libraries() {
    let golden = golden();
    for (estimator, name) in [
        (AdvantageEstimator::GrpoVerl, "grpo_verl"),
        (AdvantageEstimator::GrpoTrl, "grpo_trl"),
        (AdvantageEstimator::MeanOnly, "dr_grpo"),
        (AdvantageEstimator::LeaveOneOut, "rloo"),
    ] {
        let expected: Vec<f64> =
            serde_json::from_value(golden.json["advantages"][name].clone()).expect("numbers");
        for (i, (found, expected)) in golden.advantages(estimator).into_iter().zip(expected).enumerate() {
            assert_near(found, expected, &format!("{name}[{i}]"));
        }
    }
}

#[test]
fn kl_estimates_equal_the_libraries() {
    let golden = golden();
    for (estimator, name) in [(KlEstimator::K1, "k1"), (KlEstimator::K2, "k2"), (KlEstimator::K3, "k3")] {
        let expected = matrix(&golden.json["kl"][name]);
        let (mut sum, mut count) = (0.0, 0.0);
        for (i, mask) in golden.mask.iter().enumerate() {
            for t in (0..mask.len()).filter(|&t| mask[t]) {
                let (kl, _) = estimator.estimate(golden.log_probs[i][t], golden.reference[i][t]);
                assert_near(kl, expected[i][t], &format!("{name}[{i}][{t}]"));
                sum += kl;
                count += 1.0;
            }
        }
        let mean = golden.json["kl"][format!("{name}_token_mean")].as_f64().expect("number");
        assert_near(sum / count, mean, name);
    }
}

#[test]
fn losses_and_gradients_equal_the_libraries() {
    let golden = golden();
    let symmetric = PolicyLossOptions::default();
    let higher = PolicyLossOptions { clip_high: 0.28, ..symmetric };
    let verl = AdvantageEstimator::GrpoVerl;
    let episode_sum = Aggregation::EpisodeSum { length: 8.0 };
    let cases = [
        ("grpo", symmetric, Aggregation::EpisodeMean, verl),
        ("grpo_k3_0.04", PolicyLossOptions { kl_coef: 0.04, ..symmetric }, Aggregation::EpisodeMean, verl),
        ("dapo", higher, Aggregation::TokenMean, verl),
        ("dapo_dual3", PolicyLossOptions { dual_clip: Some(3.0), ..higher }, Aggregation::TokenMean, verl),
        ("dr_grpo", symmetric, episode_sum, AdvantageEstimator::MeanOnly),
    ];
    for (name, options, aggregation, estimator) in cases {
        let (loss, gradients, _) = golden.loss(&options, aggregation, estimator);
        let expected = &golden.json["losses"][name];
        assert_near(loss, expected["loss"].as_f64().expect("loss"), name);
        for (i, row) in matrix(&expected["grad"]).iter().enumerate() {
            for (t, &value) in row.iter().enumerate() {
                assert_near(gradients[i][t], value, &format!("{name} gradient [{i}][{t}]"));
            }
        }
    }
    let (_, _, stats) = golden.loss(&higher, Aggregation::TokenMean, verl);
    let counts = &golden.json["stats"];
    assert_eq!(Some(stats.tokens as u64), counts["n_tokens"].as_u64());
    assert_eq!(Some(stats.clipped_low as u64), counts["dapo_clipped"]["low"].as_u64());
    assert_eq!(Some(stats.clipped_high as u64), counts["dapo_clipped"]["high"].as_u64());
}

#[test]
fn gradients_equal_finite_differences() {
    let mut golden = golden();
    for kl in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3] {
        let options = PolicyLossOptions { kl_coef: 0.3, kl, dual_clip: Some(3.0), ..Default::default() };
        let run = |g: &Golden| g.loss(&options, Aggregation::EpisodeMean, AdvantageEstimator::GrpoTrl);
        let (_, gradients, _) = run(&golden);
        let step = 1e-6;
        for (i, row) in gradients.iter().enumerate() {
            for (t, &gradient) in row.iter().enumerate() {
                let original = golden.log_probs[i][t];
                golden.log_probs[i][t] = original + step;
                let above = run(&golden).0;
                golden.log_probs[i][t] = original - step;
                let below = run(&golden).0;
                golden.log_probs[i][t] = original;
                let numeric = (above - below) / (2.0 * step);
                assert!((numeric - gradient).abs() < 1e-8, "{kl:?} [{i}][{t}]: {numeric} against {gradient}");
            }
        }
    }
}

#[test]
fn masked_positions_are_never_read() {
    let clean = golden();
    let options = PolicyLossOptions { kl_coef: 0.04, dual_clip: Some(3.0), ..Default::default() };
    let run = |g: &Golden| g.loss(&options, Aggregation::TokenMean, AdvantageEstimator::GrpoTrl);
    let expected = run(&clean);
    let mut dirty = golden();
    for (i, filler) in
        [200.0, f64::NEG_INFINITY, f64::NAN].into_iter().cycle().take(clean.mask.len()).enumerate()
    {
        for t in (0..clean.mask[i].len()).filter(|&t| !clean.mask[i][t]) {
            dirty.log_probs[i][t] = filler;
            dirty.reference[i][t] = filler;
            dirty.old[i][t] = if t % 2 == 0 { None } else { Some(f64::NAN) };
        }
    }
    assert_eq!(run(&dirty), expected);
}

#[test]
fn what_the_loss_needs_is_refused_by_name_when_missing_or_not_finite() {
    let options = PolicyLossOptions { kl_coef: 0.1, ..Default::default() };
    let run = |log_prob: f64, old: Option<f64>, reference: Option<f64>, advantage: f64| {
        let reference = reference.map(|value| [0.0, value]);
        options.row(&Row {
            mask: &[false, true],
            log_probs: &[0.0, log_prob],
            old_log_probs: &[None, old],
            reference_log_probs: reference.as_ref().map(|r| r.as_slice()),
            advantage,
            token_weight: 1.0,
        })
    };
    let message = |result: Result<_, LossError>| result.expect_err("refused").to_string();
    assert!(run(-1.0, Some(-1.0), Some(-1.0), 1.0).is_ok());
    assert_eq!(
        message(run(-1.0, None, Some(-1.0), 1.0)),
        "captured log-prob of token 1 is missing: the loss needs it for every sampled token"
    );
    assert!(message(run(-1.0, Some(-1.0), None, 1.0)).contains("reference log-prob of token 1"));
    assert!(message(run(f64::NAN, Some(-1.0), Some(-1.0), 1.0)).starts_with("log-prob of token 1 is NaN"));
    assert!(message(run(-1.0, Some(f64::NEG_INFINITY), Some(-1.0), 1.0)).contains("captured log-prob"));
    assert!(message(run(-1.0, Some(-1.0), Some(-1.0), f64::NAN)).contains("advantage"));
    assert!(message(run(0.0, Some(-1000.0), Some(-1.0), 1.0)).contains("importance ratio"));
    assert!(
        advantages(AdvantageEstimator::GrpoTrl, &[1, 1], &[0.0, f64::NAN])
            .expect_err("refused")
            .to_string()
            .contains("reward of episode 1")
    );
    assert!(PolicyLossOptions { clip_low: 1.5, ..options }.check().is_err());
    assert!(PolicyLossOptions { dual_clip: Some(0.5), ..options }.check().is_err());
    assert!(Denominator::new(Aggregation::TokenMean, vec![0, 0]).is_err());
}

#[test]
fn groups_without_spread_have_advantage_exactly_zero() {
    let groups = [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5];
    let rewards = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.5 + 1e-9, 0.5, 1.0];
    for estimator in [
        AdvantageEstimator::GrpoVerl,
        AdvantageEstimator::GrpoTrl,
        AdvantageEstimator::MeanOnly,
        AdvantageEstimator::LeaveOneOut,
    ] {
        let result = advantages(estimator, &groups, &rewards).expect("finite");
        for (i, value) in result.values.iter().enumerate() {
            assert_eq!(*value != 0.0, groups[i] == 3, "{estimator:?} {i} {value}");
        }
        assert_eq!((result.groups, result.groups_all_failed, result.groups_all_solved), (5, 1, 3));
        assert!((result.degenerate_group_ratio() - 0.8).abs() < 1e-12);
    }
}

#[test]
fn groups_are_named_by_id_whatever_the_order() {
    let groups = [7, 9, 7, 9, 7, 9, 9];
    let rewards = [1.0, 0.1, 0.3, 0.2, 0.0, 0.7, 1.0];
    let result = advantages(AdvantageEstimator::GrpoTrl, &groups, &rewards).expect("finite");
    for group in [7, 9] {
        let sum: f64 = (0..7).filter(|&i| groups[i] == group).map(|i| result.values[i]).sum();
        assert!(sum.abs() < 1e-12);
    }
    let order = [6, 2, 5, 0, 4, 1, 3];
    let shuffled =
        advantages(AdvantageEstimator::GrpoTrl, &order.map(|i| groups[i]), &order.map(|i| rewards[i]))
            .expect("finite");
    for (place, &i) in order.iter().enumerate() {
        assert_eq!(shuffled.values[place].to_bits(), result.values[i].to_bits());
    }
}

#[test]
fn an_episode_of_many_rows_has_one_vote() {
    // Episode 0 has its 12 tokens in three rows or in one; episode 1 has 4 tokens.
    let options = PolicyLossOptions::default();
    let loss = |rows: &[(usize, usize)], aggregation| {
        let denominator = Denominator::new(aggregation, vec![12, 4]).expect("tokens");
        rows.iter()
            .map(|&(episode, tokens)| {
                options
                    .row(&Row {
                        mask: &vec![true; tokens],
                        log_probs: &vec![-1.0; tokens],
                        old_log_probs: &vec![Some(-1.1); tokens],
                        reference_log_probs: None,
                        advantage: if episode == 0 { 1.0 } else { -1.0 },
                        token_weight: denominator.token_weight(episode),
                    })
                    .expect("finite")
                    .loss
            })
            .sum::<f64>()
    };
    let episode_sum = Aggregation::EpisodeSum { length: 8.0 };
    for aggregation in [Aggregation::EpisodeMean, Aggregation::TokenMean, episode_sum] {
        let whole = loss(&[(0, 12), (1, 4)], aggregation);
        let cut = loss(&[(0, 2), (1, 4), (0, 9), (0, 1)], aggregation);
        assert!((whole - cut).abs() < 1e-12, "{aggregation:?}");
    }
    assert!(loss(&[(0, 12), (1, 4)], Aggregation::EpisodeMean).abs() < 1e-12, "votes cancel");
}

#[test]
fn alignment_of_equal_log_probs_is_exact() {
    let captured = [-0.1, -2.5, -0.7, -5.0];
    let equal = alignment(&captured, &captured).expect("finite");
    assert_eq!(equal.prob_correlation, Some(1.0));
    assert_eq!((equal.max_logprob_diff, equal.mismatch_kl), (0.0, 0.0));

    let other = alignment(&captured, &[-0.1, -2.0, -0.7, -5.0]).expect("finite");
    assert_eq!(other.max_logprob_diff, 0.5);
    assert_eq!(other.mean_logprob_diff, 0.125);
    assert!((other.mismatch_kl - (0.5f64.exp() - 1.5) / 4.0).abs() < 1e-12);
    assert!(other.prob_correlation.expect("spread") < 1.0);

    assert_eq!(alignment(&[-1.0, -1.0], &[-1.0, -2.0]).expect("finite").prob_correlation, None);
    assert!(alignment(&[], &[]).is_err());
    assert!(alignment(&[f64::NAN], &[-1.0]).is_err());
}
