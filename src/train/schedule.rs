//! Learning rate over the steps of a run.

use serde::{Deserialize, Serialize};

/// Factor on the learning rate at each step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Always 1.
    Constant,
    /// Rises over `warmup` steps, stays 1 for the first half of `steps`, then falls in a line to 0.05.
    WarmupHoldDecay {
        /// Steps of the rise.
        warmup: u64,
        /// Steps of the whole run.
        steps: u64,
    },
}

impl Schedule {
    /// The factor for step `step`, counted from 0.
    #[must_use]
    pub fn factor(&self, step: u64) -> f64 {
        match *self {
            Self::Constant => 1.0,
            Self::WarmupHoldDecay { warmup, steps } => {
                let rise = ((step + 1) as f64 / warmup.max(1) as f64).min(1.0);
                let done = step as f64 / steps.max(1) as f64;
                let fall = if done < 0.5 { 1.0 } else { (1.0 - (done - 0.5) * 1.9).max(0.05) };
                rise * fall
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Schedule;

    #[test]
    fn the_rate_rises_holds_and_falls_to_a_twentieth() {
        let schedule = Schedule::WarmupHoldDecay { warmup: 50, steps: 1000 };
        assert_eq!(schedule.factor(0), 0.02);
        assert_eq!(schedule.factor(49), 1.0);
        assert_eq!(schedule.factor(499), 1.0);
        assert!((schedule.factor(750) - 0.525).abs() < 1e-12);
        assert!((schedule.factor(1000) - 0.05).abs() < 1e-12);
    }
}
