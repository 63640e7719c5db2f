//! How a policy version's episodes are cut: into optimizer steps, and those into microbatches.

use crate::record::Sample;

/// A row on its way through a step.
pub(super) struct TrainingRow<'a> {
    pub episode: usize,
    pub sample: &'a Sample,
    pub advantage: f64,
    pub temperature: f32,
    /// Whether it can have a gradient.
    pub is_active: bool,
}

/// Cuts episodes sorted by group into at most `parts` consecutive ranges of whole groups, of about equal size.
pub(super) fn parts_of_whole_groups(groups: &[u64], parts: usize) -> Vec<std::ops::Range<usize>> {
    let mut starts: Vec<usize> =
        (0..groups.len()).filter(|&i| i == 0 || groups[i] != groups[i - 1]).collect();
    starts.push(groups.len());
    let count = starts.len() - 1;
    let parts = parts.clamp(1, count.max(1));
    (0..parts).map(|part| starts[part * count / parts]..starts[(part + 1) * count / parts]).collect()
}

/// Consecutive rows of at most `max_tokens` tokens, one temperature, and all active or none, each with the
/// index of its first row.
pub(super) fn microbatches<'r, 'a>(
    rows: &'r [TrainingRow<'a>],
    max_tokens: usize,
) -> Vec<(usize, &'r [TrainingRow<'a>])> {
    let mut batches = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (index, row) in rows.iter().enumerate() {
        let length = row.sample.token_ids.len();
        let is_cut = index > start
            && (tokens + length > max_tokens
                || row.temperature != rows[start].temperature
                || row.is_active != rows[start].is_active);
        if is_cut {
            batches.push((start, &rows[start..index]));
            (start, tokens) = (index, 0);
        }
        tokens += length;
    }
    if start < rows.len() {
        batches.push((start, &rows[start..]));
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::parts_of_whole_groups;

    #[test]
    fn parts_hold_whole_groups() {
        let groups = [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4];
        assert_eq!(parts_of_whole_groups(&groups, 2), [0..6, 6..12]);
        assert_eq!(parts_of_whole_groups(&groups, 1).first(), Some(&(0..12)));
        assert_eq!(parts_of_whole_groups(&groups, 1).len(), 1);
        assert_eq!(parts_of_whole_groups(&groups, 9).len(), 4);
        assert_eq!(parts_of_whole_groups(&[1, 1, 2], 2), [0..2, 2..3]);
    }
}
