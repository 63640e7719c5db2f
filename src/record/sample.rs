//! A training row: one lineage's token sequence with everything aligned to it.

use super::{ChoiceId, EpisodeId, GroupId, Position, RoutedExperts};

/// The tokens `[start, end)` of a sample are what one choice sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallSpan {
    pub choice: ChoiceId,
    pub start: Position,
    pub end: Position,
}

#[cfg(test)]
impl CallSpan {
    /// Of some call.
    pub(crate) fn of_test(start: usize, end: usize) -> Self {
        let choice = ChoiceId { call_id: super::CallId::now(), choice_index: 0 };
        Self { choice, start: Position::new(start), end: Position::new(end) }
    }
}

/// The parts of a [`Sample`], before they are checked. All per-token lists have the length of `token_ids`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SampleParts {
    pub token_ids: Vec<u32>,
    /// True exactly on sampled ids.
    pub loss_mask: Vec<bool>,
    /// Log-prob of `token_ids[i]` given all before it; `None` where the mask is false.
    pub logprobs: Vec<Option<f32>>,
    /// Policy version that sampled the token; `None` where the mask is false.
    pub weight_version: Vec<Option<u64>>,
    /// Sampling temperature; `None` where the mask is false.
    pub temperature: Vec<Option<f32>>,
    pub episode_id: Option<EpisodeId>,
    pub group_id: Option<GroupId>,
    /// Index of the lineage in its session, in order of its first call.
    pub lineage_id: u32,
    /// For each call: the tokens it sampled.
    pub call_spans: Vec<CallSpan>,
    /// Where calls had any. The last token has no row.
    pub routed_experts: Option<RoutedExperts>,
}

/// A checked training row. Built by [`Sample::new`] only.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample(SampleParts);

/// Why parts do not make a sample.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSample {
    #[error("{field} has {found} entries for {expected} tokens")]
    Length { field: &'static str, found: usize, expected: usize },
    #[error("sampled token {index} has no {field}")]
    MissingValue { field: &'static str, index: usize },
    #[error("context token {index} carries a {field}: only sampled tokens may")]
    ValueOnContext { field: &'static str, index: usize },
    #[error("log-prob {value} of token {index} is not a finite number at most 0")]
    BadLogprob { value: String, index: usize },
    #[error("the first token is sampled: it has no context to be sampled in")]
    SampledWithoutContext,
    #[error("call spans do not tile the sampled tokens")]
    Spans,
    #[error("no sampled token")]
    NothingSampled,
    #[error("the last token has a row of expert routing: no forward pass has read it")]
    RowOfLastToken,
}

impl Sample {
    /// Checks lengths, mask and values.
    ///
    /// # Errors
    /// [`InvalidSample`] names the first field and token that are wrong.
    pub fn new(parts: SampleParts) -> Result<Self, InvalidSample> {
        let expected = parts.token_ids.len();
        let lengths = [
            ("loss_mask", parts.loss_mask.len()),
            ("logprobs", parts.logprobs.len()),
            ("weight_version", parts.weight_version.len()),
            ("temperature", parts.temperature.len()),
        ];
        let routed = parts.routed_experts.as_ref().map(|experts| ("routed_experts", experts.tokens()));
        for (field, found) in lengths.into_iter().chain(routed) {
            if found != expected {
                return Err(InvalidSample::Length { field, found, expected });
            }
        }
        if parts.loss_mask.first() == Some(&true) {
            return Err(InvalidSample::SampledWithoutContext);
        }
        for (index, &is_sampled) in parts.loss_mask.iter().enumerate() {
            let values = [
                ("log-prob", parts.logprobs[index].is_some()),
                ("weight version", parts.weight_version[index].is_some()),
                ("temperature", parts.temperature[index].is_some()),
            ];
            for (field, has_value) in values {
                match (is_sampled, has_value) {
                    (true, false) => return Err(InvalidSample::MissingValue { field, index }),
                    (false, true) => return Err(InvalidSample::ValueOnContext { field, index }),
                    _ => {}
                }
            }
            if let Some(value) = parts.logprobs[index]
                && !(value.is_finite() && value <= 0.0)
            {
                return Err(InvalidSample::BadLogprob { value: value.to_string(), index });
            }
        }
        let mut covered = vec![false; expected];
        for &CallSpan { start, end, .. } in &parts.call_spans {
            let (start, end) = (start.index(), end.index());
            if start > end || end > expected || covered[start..end].contains(&true) {
                return Err(InvalidSample::Spans);
            }
            covered[start..end].fill(true);
        }
        if covered != parts.loss_mask {
            return Err(InvalidSample::Spans);
        }
        if !parts.loss_mask.contains(&true) {
            return Err(InvalidSample::NothingSampled);
        }
        let last = Position::new(expected.saturating_sub(1));
        if parts.routed_experts.as_ref().is_some_and(|experts| experts.row(last).is_some()) {
            return Err(InvalidSample::RowOfLastToken);
        }
        Ok(Self(parts))
    }

    /// Number of sampled tokens.
    #[must_use]
    pub fn sampled_tokens(&self) -> usize {
        self.0.loss_mask.iter().filter(|&&is_sampled| is_sampled).count()
    }
}

impl std::ops::Deref for Sample {
    type Target = SampleParts;

    fn deref(&self) -> &SampleParts {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> SampleParts {
        SampleParts {
            token_ids: vec![5, 6, 7],
            loss_mask: vec![false, true, true],
            logprobs: vec![None, Some(-0.5), Some(0.0)],
            weight_version: vec![None, Some(0), Some(0)],
            temperature: vec![None, Some(1.0), Some(1.0)],
            call_spans: vec![CallSpan::of_test(1, 3)],
            ..SampleParts::default()
        }
    }

    #[test]
    fn a_null_where_the_loss_needs_a_value_is_refused() {
        let mut bad = parts();
        bad.logprobs[1] = None;
        assert_eq!(Sample::new(bad), Err(InvalidSample::MissingValue { field: "log-prob", index: 1 }));
        assert_eq!(Sample::new(parts()).expect("valid").sampled_tokens(), 2);
    }

    #[test]
    fn only_sampled_ids_carry_the_mask() {
        let mut bad = parts();
        bad.call_spans[0].start = Position::new(2);
        assert_eq!(Sample::new(bad), Err(InvalidSample::Spans));
        let mut bad = parts();
        bad.logprobs[0] = Some(-1.0);
        assert_eq!(Sample::new(bad), Err(InvalidSample::ValueOnContext { field: "log-prob", index: 0 }));
    }
}
