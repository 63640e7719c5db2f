//! Group-relative advantages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::error::{LossError, finite, same_length};
use crate::config::Training;

/// Rewards of a group that differ by no more than this are equal: dividing by their spread would
/// only blow up rounding noise.
const NO_SPREAD: f64 = 1e-6;

/// How an episode's advantage follows from the rewards of its group.
///
/// The standard deviation is the sample's (`ddof = 1`). The two GRPO forms differ in what is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// `(r - mean) / (std + 1e-6)`, as verl computes GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).
    GrpoVerl,
    /// `(r - mean) / (std + 1e-4)`, as TRL computes GRPO.
    #[default]
    GrpoTrl,
    /// `r - mean`, without the division (Dr. GRPO: Liu et al. 2025, arXiv:2503.20783).
    MeanOnly,
    /// `r -` mean of the others (RLOO: Ahmadian et al. 2024, arXiv:2402.14740).
    LeaveOneOut,
}

impl AdvantageEstimator {
    /// The one that a config asks for; `None`: its `advantage_eps` is no estimator's.
    #[must_use]
    pub fn of(training: &Training) -> Option<Self> {
        match training.advantage_eps {
            _ if !training.advantage_scale_by_std => Some(Self::MeanOnly),
            1e-6 => Some(Self::GrpoVerl),
            1e-4 => Some(Self::GrpoTrl),
            _ => None,
        }
    }
}

/// Advantages of a set of episodes, and what their groups looked like.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// One an episode, in the order given.
    pub values: Vec<f64>,
    /// Number of groups.
    pub groups: usize,
    /// Groups without spread in which every reward is at least 0.5.
    pub groups_all_solved: usize,
    /// Groups without spread in which every reward is below 0.5.
    pub groups_all_failed: usize,
}

impl Advantages {
    /// Share of groups without spread: every advantage in them is exactly 0.
    #[must_use]
    pub fn degenerate_group_ratio(&self) -> f64 {
        if self.groups == 0 {
            return 0.0;
        }
        (self.groups_all_solved + self.groups_all_failed) as f64 / self.groups as f64
    }

    /// Mean of the advantages over all episodes.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.values.iter().sum::<f64>() / self.values.len().max(1) as f64
    }

    /// Standard deviation of the advantages over all episodes (population form).
    #[must_use]
    pub fn std(&self) -> f64 {
        let count = self.values.len().max(1) as f64;
        let mean = self.mean();
        (self.values.iter().map(|a| (a - mean).powi(2)).sum::<f64>() / count).sqrt()
    }
}

/// The advantage of each episode within its group. `group_ids[i]` and `rewards[i]` belong to episode `i`.
///
/// A group without spread, and so a group of one, has advantage exactly 0. The result does not depend on
/// the order of the episodes, to the bit.
///
/// # Errors
/// A reward that is not finite, or lists of different lengths.
pub fn advantages(
    estimator: AdvantageEstimator,
    group_ids: &[u64],
    rewards: &[f64],
) -> Result<Advantages, LossError> {
    same_length("group_ids", group_ids.len(), rewards.len())?;
    let mut groups: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (index, (&group, &reward)) in group_ids.iter().zip(rewards).enumerate() {
        groups.entry(group).or_default().push(finite(reward, "reward", "episode", index)?);
    }
    let mut result = Advantages {
        values: Vec::with_capacity(rewards.len()),
        groups: groups.len(),
        groups_all_solved: 0,
        groups_all_failed: 0,
    };
    let mut baselines = BTreeMap::new();
    for (&group, members) in &mut groups {
        // Summed in sorted order, so that arrival order changes no bit.
        members.sort_by(f64::total_cmp);
        let baseline = Baseline::of(members);
        if baseline.is_none() {
            let is_solved = members[0] >= 0.5;
            result.groups_all_solved += usize::from(is_solved);
            result.groups_all_failed += usize::from(!is_solved);
        }
        baselines.insert(group, baseline);
    }
    result.values.extend(group_ids.iter().zip(rewards).map(|(group, &reward)| {
        baselines[group].as_ref().map_or(0.0, |baseline| baseline.advantage(estimator, reward))
    }));
    Ok(result)
}

/// Statistics of one group with spread.
struct Baseline {
    count: f64,
    sum: f64,
    mean: f64,
    std: f64,
}

impl Baseline {
    /// `None` for a group without spread. `sorted` is not empty.
    fn of(sorted: &[f64]) -> Option<Self> {
        if sorted[sorted.len() - 1] - sorted[0] <= NO_SPREAD {
            return None;
        }
        let count = sorted.len() as f64;
        let sum = sorted.iter().sum::<f64>();
        let mean = sum / count;
        let variance = sorted.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Some(Self { count, sum, mean, std: variance.sqrt() })
    }

    fn advantage(&self, estimator: AdvantageEstimator, reward: f64) -> f64 {
        match estimator {
            AdvantageEstimator::GrpoVerl => (reward - self.mean) / (self.std + 1e-6),
            AdvantageEstimator::GrpoTrl => (reward - self.mean) / (self.std + 1e-4),
            AdvantageEstimator::MeanOnly => reward - self.mean,
            AdvantageEstimator::LeaveOneOut => reward - (self.sum - reward) / (self.count - 1.0),
        }
    }
}
